"""Quantized checkpoints: formats, readers, and the one type that every weight becomes (engine process).

Never: multiplies by a weight (worker/cpu, worker/gpu), or changes a model's modules.
"""
