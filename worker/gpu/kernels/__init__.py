"""Kernels in Triton, each in a module with the function that launches it."""
