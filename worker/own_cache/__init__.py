"""Families that no paged KV cache can be put under: each sequence is computed alone, with its own cache."""
