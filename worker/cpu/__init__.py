"""CPU kernels in C++ and the layers that call them (engine process).

Never: decides what is replaced (worker/model/surgery.py).
"""
