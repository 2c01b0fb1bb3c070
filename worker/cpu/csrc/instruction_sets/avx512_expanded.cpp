// The kernels of avx512_bf16.cpp with other products of plain bf16 weights: multiply-adds of expanded numbers, which
// some processors do faster than the instruction for bf16. Which one a machine takes is measured (cpu/arithmetic.py).
#include "kernels.h"

#if defined(TOKENYARD_X86)
#define TOKENYARD_EXPANDED
#define TOKENYARD_AVX512 avx512_expanded
#include "instruction_sets/avx512_impl.h"
#pragma GCC pop_options

namespace tokenyard {
const AllKernels* avx512_expanded_kernels() {
  static constexpr Kernels<Bf16> bf16 = avx512_expanded::kernels_of<Bf16>();
  static const AllKernels all = {"avx512-expanded", bf16, avx512_float_kernels};
  return avx512_kernels() == nullptr ? nullptr : &all;
}
}  // namespace tokenyard
#else
namespace tokenyard {
const AllKernels* avx512_expanded_kernels() { return nullptr; }
}  // namespace tokenyard
#endif
