"""Captured forwards and draft loops, and Triton kernels."""
