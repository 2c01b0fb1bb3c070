"""First contact with a GPU: each thing that must work, tried by itself, with one line for each.

Owns: the part `first`. `part.py` begins the processes and writes the table, `group.py` is such a process, and
the modules of trials say what is tried.
"""
