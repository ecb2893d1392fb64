"""Decides when to draft, with which drafter and how far, in plain Python without torch."""
