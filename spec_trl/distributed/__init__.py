"""Rollouts over several processes."""
