"""Checkpoints of real shapes with random weights, for measuring speed (commands).

Never: weights that mean anything.
"""
