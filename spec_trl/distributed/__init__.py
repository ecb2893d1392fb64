"""Shares rollouts among processes: one pool of requests, rows that move between ranks."""
