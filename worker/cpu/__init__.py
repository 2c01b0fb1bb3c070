"""CPU kernels in C++ and the layers that call them (engine process)."""
