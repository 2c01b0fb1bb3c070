"""Start of a worker: load the model, measure memory, allocate, try (engine process)."""
