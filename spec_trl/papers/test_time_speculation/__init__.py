"""Trains the drafter on the rounds that it drafts (TTS, arXiv 2605.09329)."""
