"""Other engines, each in an environment of its own, next to ours."""
