"""Triton kernels of a model's layers, each in a module with the function that launches it (engine process).

Never: asks the host for anything.
"""
