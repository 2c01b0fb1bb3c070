// The kernels for processors with AVX2 and FMA (nearly all x86 servers and laptops since 2015).
#include "kernels.h"

#define TOKENYARD_LANES 8

#if defined(TOKENYARD_X86)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace tokenyard::avx2 {
#include "instruction_sets/simd.h"

#include "instruction_sets/kernels_impl.h"
}  // namespace tokenyard::avx2

#pragma GCC pop_options

namespace tokenyard {
const AllKernels* avx2_kernels() {
  static constexpr AllKernels all = {"avx2", avx2::kernels_of<Bf16>(), avx2::kernels_of<float>()};
  const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return can ? &all : nullptr;
}
}  // namespace tokenyard
#else
namespace tokenyard {
const AllKernels* avx2_kernels() { return nullptr; }
}  // namespace tokenyard
#endif
