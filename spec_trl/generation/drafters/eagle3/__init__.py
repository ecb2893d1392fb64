"""Drafts token by token from the target's hidden states (EAGLE-3)."""
