"""Decoupled execution (SA §4.1): the drafter drafts the next window while the target verifies the one before."""
