"""One step of a model that generates: rows, inputs, the forward pass, the host's pool (engine process)."""
