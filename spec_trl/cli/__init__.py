"""Runs the command `spec-trl`: gains, a certificate of bits, the report of a run, training from YAML files."""
