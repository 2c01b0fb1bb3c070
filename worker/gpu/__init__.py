"""GPU steps: CUDA graphs, Triton kernels and the layers that call them (engine process).

Never: decides which layers are replaced (worker/model/layer_replacement.py).
"""
