"""Holds C++ for CPUs, compiled on the machine that runs it."""
