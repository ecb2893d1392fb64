"""Drafts with the multi-token-prediction head of a checkpoint."""
