"""Times rounds of a model on this machine before the first one."""
