"""EAGLE-3: drafts token by token from the target's hidden states."""
