"""Decodes rows of different lengths in one loop."""
