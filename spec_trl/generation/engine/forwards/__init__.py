"""Target forwards: prefill, verification, their costs and their exactness."""
