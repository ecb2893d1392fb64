"""TRL's trainers with speculative rollouts, and `speculate` for any other loop."""
