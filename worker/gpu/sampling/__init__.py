"""Sampling on a GPU: state of each row, edits of logits, tokens (engine process).

Never: waits for the device.
"""
