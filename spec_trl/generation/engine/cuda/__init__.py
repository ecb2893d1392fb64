"""Captures forwards and draft loops in CUDA graphs, and holds Triton kernels."""
