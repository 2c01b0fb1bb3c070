"""Tensors and devices: loads a checkpoint, measures memory, executes a plan, returns tokens."""
