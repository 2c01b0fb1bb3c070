"""Families without a paged cache: each sequence is computed alone (engine process)."""
