"""Requests served without HTTP: the scheduler, the worker and the text of every token.

Owns: the parts `throughput-...`. `part.py` has the loads, `loads.py` keeps them going, `readers.py` is the
process on the other side.
"""
