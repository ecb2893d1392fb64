"""Drafts a block of tokens in one forward from the target's hidden states (DFlash)."""
