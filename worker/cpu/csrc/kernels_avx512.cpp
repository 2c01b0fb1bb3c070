// The kernels for processors with AVX-512, its bf16 products and its byte tables (Zen 4, Sapphire Rapids and later).
#include "kernels.h"

#define TOKENYARD_LANES 16

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx2,fma,prefer-vector-width=512")
#define TOKENYARD_BF16_DOT
#define TOKENYARD_BYTE_DOT
namespace tokenyard::avx512 {
#include "simd.h"

#include "kernels_impl.h"
}  // namespace tokenyard::avx512

namespace tokenyard {
const AllKernels* avx512_kernels() {
  static const AllKernels all = {"avx512-bf16", avx512::kernels_of<Bf16>(), avx512::kernels_of<float>()};
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
