"""Adapters: small updates of linear layers, apart from the model's weights (engine process).

Imports no device's kernels: a layer that computes updates itself has `adapt`.
"""
