"""The layers of a model: recognised, and replaced where our kernels compute the same (engine process)."""
