"""What the GPU's kernels will do on an H100, told from their machine code: no GPU is asked."""
