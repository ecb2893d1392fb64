"""Test-Time Speculation (TTS, arXiv 2605.09329): the drafter learns from the rounds that it drafts."""
