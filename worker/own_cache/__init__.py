"""Families without a paged cache: each sequence is computed alone, by the cache of its own model (engine process).

Never: batches.
"""
