// The kernels for processors with AVX-512, its bf16 products and its byte tables (Zen 4, Sapphire Rapids and later).
#include "kernels.h"

#if defined(TOKENYARD_X86)
#include "instruction_sets/avx512_impl.h"
#pragma GCC pop_options

namespace tokenyard {
const AllKernels* avx512_kernels() {
  static constexpr Kernels<Bf16> bf16 = avx512::kernels_of<Bf16>();
  static const AllKernels all = {"avx512-bf16", bf16, avx512_float_kernels};
  const bool can = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512dq");
  return can ? &all : nullptr;
}
}  // namespace tokenyard
#else
namespace tokenyard {
const AllKernels* avx512_kernels() { return nullptr; }
}  // namespace tokenyard
#endif
