"""Rollouts over several processes: one pool of requests, rows that move between ranks."""
