"""Search for the fastest sizes: the constants of the kernels, beside others.

Owns: the part `tune`. `workloads.py` has what the kernels are given, `candidates.py` what is tried, `part.py`
compiles, measures and tells. What it finds is for the next commit: nothing is changed where it serves.
"""
