"""Weights in the form and the memory in which the CPU kernels read them (engine process)."""
