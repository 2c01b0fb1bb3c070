// The instructions of avx512_bf16.cpp and avx512_float.cpp, which are compiled side by side.
//
// They are pushed: whoever includes this pops them before the functions that ask the processor what it has.
#define TOKENYARD_LANES 16

#include <immintrin.h>

namespace tokenyard {
extern const Kernels<float> avx512_float_kernels;  // no function: it would run before the processor is asked
}  // namespace tokenyard

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx2,fma,prefer-vector-width=512")
#define TOKENYARD_BF16_DOT
#define TOKENYARD_BYTE_DOT
#define TOKENYARD_BYTE_TABLES
#if !defined(TOKENYARD_AVX512)
#define TOKENYARD_AVX512 avx512
#endif
namespace tokenyard::TOKENYARD_AVX512 {
#include "instruction_sets/simd.h"

#include "instruction_sets/kernels_impl.h"
}  // namespace tokenyard::TOKENYARD_AVX512
