// The instructions of kernels_avx512.cpp and kernels_avx512_float.cpp, which are compiled side by side.
#define TOKENYARD_LANES 16

#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx2,fma,prefer-vector-width=512")
#define TOKENYARD_BF16_DOT
#define TOKENYARD_BYTE_DOT
#if !defined(TOKENYARD_AVX512)
#define TOKENYARD_AVX512 avx512
#endif
namespace tokenyard::TOKENYARD_AVX512 {
#include "simd.h"

#include "kernels_impl.h"
}  // namespace tokenyard::TOKENYARD_AVX512

