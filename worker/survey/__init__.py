"""Survey for `tokenyard doctor`: device, files and memory, without loading the model (process of its own)."""
