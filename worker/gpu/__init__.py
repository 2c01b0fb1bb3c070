"""GPU steps: CUDA graphs, Triton kernels and the layers that call them (engine process).

Never: decides what is replaced (worker/model/surgery.py).
"""
