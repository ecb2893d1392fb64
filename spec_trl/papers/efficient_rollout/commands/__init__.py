"""Runs the commands of `spec-trl` about a roofline profile."""
