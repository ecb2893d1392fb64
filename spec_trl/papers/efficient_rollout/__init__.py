"""EfficientRollout's control: see README.md."""
