"""Trials that a start makes, alone: of tiles for products by codes, and of another library's attention.

Owns: the parts `tiles` and `libraries`. `random_codes.py` has what products are given.
"""
