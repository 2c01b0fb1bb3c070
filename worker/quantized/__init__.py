"""Quantized checkpoints: formats, readers, and the one type that every weight becomes (engine process)."""
