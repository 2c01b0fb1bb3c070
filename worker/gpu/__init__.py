"""A GPU: its kernels, and how a step is launched on it."""
