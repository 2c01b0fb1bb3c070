"""CPU kernels in C++ and the layers that call them (engine process).

Never: decides which layers are replaced (worker/model/layer_replacement.py).
"""
