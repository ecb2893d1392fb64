"""Runs the command `spec-trl`: gains on this machine, the report of a run, training from YAML files."""
