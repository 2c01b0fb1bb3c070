"""The products of a decode step in one kernel, and what it is made of: a prototype, which nothing serves by.

Owns: the parts `exchange`, `stream` and `chain`. `one_kernel.cu` has the kernels, `launching.py` compiles and
launches them; `rehearse.cpp` compiles the same source for a CPU, with each thread as a fiber (`rehearsal.h`).
"""
