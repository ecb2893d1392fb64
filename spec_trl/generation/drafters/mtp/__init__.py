"""The multi-token-prediction head that a checkpoint brings along."""
