// One register full of floats at a time, in the compiler's own vector types.
//
// TOKENYARD_LANES says how many: 16, 8 or 4. Wider than the registers would be right too, but very slow.
//
// Included once per instruction set, inside of a namespace of its own: one function compiled for two
// processors must never share a name, or the linker would keep either.
//
constexpr int kV = TOKENYARD_LANES;

using Floats = float __attribute__((vector_size(4 * TOKENYARD_LANES)));
using Ints = int32_t __attribute__((vector_size(4 * TOKENYARD_LANES)));
using Words = uint32_t __attribute__((vector_size(4 * TOKENYARD_LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * TOKENYARD_LANES)));
using Bytes = int8_t __attribute__((vector_size(TOKENYARD_LANES)));

#if TOKENYARD_LANES == 16
constexpr Ints kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif TOKENYARD_LANES == 8
constexpr Ints kLanes = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Ints kLanes = {0, 1, 2, 3};
#endif

inline Floats splat(float value) { return value - Floats{}; }  // a sum with 0 would cost one: -0 is not 0

inline Floats load(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// A compiler makes halves of what it converts by itself.
#if TOKENYARD_LANES == 16
inline Floats load(const Bf16* from) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
}
#elif TOKENYARD_LANES == 8
inline Floats load(const Bf16* from) {
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
}
#else
inline Floats load(const Bf16* from) {
  Halves raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return (Floats)(__builtin_convertvector(raw, Words) << 16);
}
#endif

#if TOKENYARD_LANES == 16
inline Floats load_half(const uint16_t* from) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif TOKENYARD_LANES == 8
inline Floats load_half(const uint16_t* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#else
// Numbers of 16 bits with 5 bits of exponent, all of them finite: 2^112 brings their exponents to where they belong,
// those of subnormal numbers too.
inline Floats load_half(const uint16_t* from) {
  Halves raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  const Words bits = __builtin_convertvector(raw, Words);
  const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Floats)((Words)size | (bits & 0x8000) << 16);
}
#endif

#if TOKENYARD_LANES == 8
inline __m256i load_bits(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
#endif

inline int32_t four_of(const uint8_t* bytes) {
  int32_t four;
  __builtin_memcpy(&four, bytes, sizeof four);
  return four;
}

inline Ints splat(int32_t value) { return value + Ints{}; }

#if defined(TOKENYARD_BYTE_DOT)
// Adds the four products of each lane: bytes of `a` have no sign, those of `b` have one.
inline Ints with_byte_products(Ints total, Words a, Words b) {
#if TOKENYARD_LANES == 16
  return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(TOKENYARD_EVEX)
  return (Ints)_mm256_dpbusd_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#endif
}
#endif

inline Floats load_bytes(const int8_t* from) {
#if TOKENYARD_LANES == 8
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bytes raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return __builtin_convertvector(__builtin_convertvector(raw, Ints), Floats);
#endif
}

inline void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }

// Rounds to nearest, ties to even; what is not a number stays so.
inline void store(Bf16* to, Floats value) {
  Words bits = (Words)value;
  bits += 0x7fff + ((bits >> 16) & 1);
  bits = (value == value) ? bits : Words{} + 0x7fc00000u;
  Halves raw = __builtin_convertvector(bits >> 16, Halves);
  __builtin_memcpy(to, &raw, sizeof raw);
}

// a * b + c, rounded once where the instructions can, whatever a compiler makes of the loop around it.
inline Floats fused(Floats a, Floats b, Floats c) {
#if TOKENYARD_LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif TOKENYARD_LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const Bf16* from) {
  const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float sum(Floats a) {
  for (int width = kV / 2; width > 0; width /= 2) a += __builtin_shuffle(a, (kLanes + width) & (kV - 1));
  return a[0];
}

inline float largest(Floats a) {
  for (int width = kV / 2; width > 0; width /= 2) a = larger(a, __builtin_shuffle(a, (kLanes + width) & (kV - 1)));
  return a[0];
}

// Lane i of the result is the sum of rows[i]: a tree of pairwise sums.
inline Floats sums_of_rows(Floats rows[kV]) {
  const Ints even = kLanes * 2, odd = kLanes * 2 + 1;
#pragma GCC unroll 4
  for (int width = kV / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) {
      const Floats a = rows[2 * i], b = rows[2 * i + 1];
      rows[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
  }
  return rows[0];
}

// e^x for x <= 88; about 1e-7 relative. Below -87 it is 0, of what is not a number it is not one.
inline Floats exponential(Floats x) {
  const Floats clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Floats scaled = clamped * 1.44269504088896341f;
  const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats whole = (scaled + shift) - shift;
  const Floats rest = (clamped - whole * 0.693145751953125f) - whole * 1.42860682030941723212e-6f;
  Floats power = splat(1.9875691500e-4f);
  power = power * rest + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = power * rest * rest + rest + 1.0f;
  const Ints exponent = __builtin_convertvector(whole, Ints);
  const Floats value = (Floats)((Ints)power + (exponent << 23));
  return x < splat(-87.0f) ? Floats{} : (x == x ? value : x);
}

inline Floats sigmoid(Floats x) {
  const Floats bounded = x < splat(-80.0f) ? splat(-80.0f) : x;
  return 1.0f / (1.0f + exponential(-bounded));
}

inline Floats hyperbolic_tangent(Floats x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }
