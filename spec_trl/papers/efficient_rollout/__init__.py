"""Decides by EfficientRollout's roofline whether to draft: see README.md."""
