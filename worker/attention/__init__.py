"""Attention over the paged KV cache: interface.py, then one backend per file."""
