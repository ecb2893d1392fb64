"""Trains learned drafters along with the policy."""
