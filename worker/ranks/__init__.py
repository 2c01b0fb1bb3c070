"""Ranks: processes that compute one model together, each with a shard of its layers (engine process, ranks).

Owns: what ranks exchange, and the memory that they exchange it over.
"""
