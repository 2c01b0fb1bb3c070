"""GPU steps: CUDA graphs, Triton kernels and the layers that call them (engine process)."""
