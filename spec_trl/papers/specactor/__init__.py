"""SpecActor's plans, ladder and simulator: see README.md."""
