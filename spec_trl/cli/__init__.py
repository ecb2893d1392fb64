"""The command `spec-trl`: what a model gains here, a run's report, training from YAML files."""
