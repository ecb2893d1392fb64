"""Drafts the next window while the target verifies the window before (SA §4.1)."""
