"""Benchmarks: rollout speed (`rollout`), losslessness (`identity`), drafter refresh (`refresh`)."""
