"""Triton kernels from logits to tokens, each in a module with the function that launches it (engine process).

Never: asks the host for anything.
"""
