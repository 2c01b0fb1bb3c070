"""Estimates for the GPU's kernels on an H100, from their machine code: no GPU is needed."""
