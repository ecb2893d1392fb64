"""Serves one call of `generate`: its options, strategies, drafters, planner and engine."""
