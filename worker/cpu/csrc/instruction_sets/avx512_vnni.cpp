// The kernels for processors with AVX-512 and its byte products, but no bf16 products (Cascade Lake, Ice Lake, Tiger Lake,
// Rocket Lake). Weights of bf16 and codes become float32 in registers; whole inputs are multiplied as bytes.
#include "kernels.h"

#define TOKENYARD_LANES 16

#if defined(TOKENYARD_X86)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#define TOKENYARD_BYTE_DOT
namespace tokenyard::avx512_vnni {
#include "instruction_sets/simd.h"

#include "instruction_sets/kernels_impl.h"
}  // namespace tokenyard::avx512_vnni

#pragma GCC pop_options

namespace tokenyard {
const AllKernels* avx512_vnni_kernels() {
  static constexpr Kernels<Bf16> bf16 = avx512_vnni::kernels_of<Bf16>();
  const bool can = avx2_kernels() != nullptr && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  if (!can) return nullptr;
  // Models in float32 are for trials: a second set of kernels would take longer to compile than it saves.
  static const AllKernels all = {"avx512-vnni", bf16, avx2_kernels()->float32};
  return &all;
}
}  // namespace tokenyard
#else
namespace tokenyard {
const AllKernels* avx512_vnni_kernels() { return nullptr; }
}  // namespace tokenyard
#endif
