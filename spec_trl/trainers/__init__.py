"""Gives TRL's trainers speculative rollouts, and any other loop `speculate`."""
