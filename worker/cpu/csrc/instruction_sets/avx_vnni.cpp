// The kernels of avx2.cpp with other products of whole inputs: by the instruction for bytes of processors that have
// it without AVX-512 (AVX-VNNI: Alder Lake and later). Sums of whole numbers are exact, so that these are bit for bit
// those of avx2.cpp.
#include "kernels.h"

#define TOKENYARD_LANES 8

#if defined(TOKENYARD_X86) && __GNUC__ >= 11
#include <immintrin.h>

#pragma GCC push_options
#if defined(TOKENYARD_EVEX)  // the same instruction of AVX-512, for trials where the other is lacking
#pragma GCC target("avx2,fma,f16c,avx512vl,avx512vnni")
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define TOKENYARD_BYTE_DOT
#define TOKENYARD_BYTES_ALONE
namespace tokenyard::avx_vnni {
#include "instruction_sets/simd.h"

#include "instruction_sets/kernels_impl.h"
}  // namespace tokenyard::avx_vnni

#pragma GCC pop_options

namespace tokenyard {
const AllKernels* avx_vnni_kernels() {
#if defined(TOKENYARD_EVEX)
  const bool can = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
  const bool can = __builtin_cpu_supports("avxvnni");
#endif
  if (!can || avx2_kernels() == nullptr) return nullptr;
  static const AllKernels all = with_products(*avx2_kernels(), "avx-vnni", avx_vnni::multiply<Bf16>);
  return &all;
}
}  // namespace tokenyard
#else
namespace tokenyard {
const AllKernels* avx_vnni_kernels() { return nullptr; }
}  // namespace tokenyard
#endif
