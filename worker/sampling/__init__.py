"""Logits to tokens: edits, grammars, sampling (engine process).

Never: computes logits.
"""
