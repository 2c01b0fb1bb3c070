"""Logits to tokens: edits, grammars, the draw (engine process).

Never: computes logits.
"""
