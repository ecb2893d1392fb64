"""Our C++ for CPUs, and how it is compiled on the machine where it runs."""
