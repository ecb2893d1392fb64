"""Runs the commands of `spec-trl` about a cluster and a ladder."""
