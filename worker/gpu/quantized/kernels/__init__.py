"""Triton kernels of products by codes (engine process).

Never: asks the host for anything.
"""
