// The kernels of avx512_bf16.cpp for models in float32: a file of their own, so that both compile at once.
#include "kernels.h"

#if defined(TOKENYARD_X86)
#include "instruction_sets/avx512_impl.h"
#pragma GCC pop_options

namespace tokenyard {
constinit const Kernels<float> avx512_float_kernels = avx512::kernels_of<float>();
}  // namespace tokenyard
#endif
