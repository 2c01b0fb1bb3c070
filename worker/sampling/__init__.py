"""Logits to tokens: edits, grammars, sampling (engine process)."""
