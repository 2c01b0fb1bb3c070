// Codes as columns of floats: for models in float32, and for processors without products of bf16.
//
// Included by grouped_impl.h. Rows become floats too, once for all columns of a block.

template <int M>
struct ExpandedRows {
  template <typename T>
  ExpandedRows(const T* from, int64_t row_stride, int64_t size) {
    for (int m = 0; m < M; ++m) {
      for (int64_t k = 0; k < size; k += kV) store(numbers[m] + k, load(from + m * row_stride + k));
    }
  }
  alignas(64) float numbers[M][kRunInputs];
  const float* first = numbers[0];
  static constexpr int64_t stride = kRunInputs;
};

template <typename T, int M>
struct FloatRows {
  using Rows = ExpandedRows<M>;
};

template <int M>
struct FloatRows<float, M> {
  using Rows = RowsInPlace<float>;
};

// Four inputs are four vectors a part.
template <typename T>
struct FloatColumns : PlainInputs<T> {
  using Vector = Floats;
  using Input = float;
  template <int M>
  using Rows = typename FloatRows<T, M>::Rows;
  static constexpr int kInputs = 4, kSteps = 4;  // inputs that are read at once, and vectors that they are
  static constexpr int kStraightInputs = kInputs;  // of a run: they have no loop
  // One where there are products of bf16: models in float32 are for trials there, and each row takes long to compile.
#if defined(TOKENYARD_BF16_DOT)
  static constexpr int kDirectRows = 1;
#else
  static constexpr int kDirectRows = kTileRows < 4 ? kTileRows : 4;
#endif
  static void add(Floats& total, const float* x, int step, Vector columns) { total = fused(splat(x[step]), columns, total); }
};

template <typename T>
struct DecodedFloats : FloatColumns<T> {
  static constexpr bool kIsDecoded = true;
  static constexpr int64_t kBytesPerInput = kColumns * sizeof(float);

  void read(const uint8_t* data, Floats (*columns)[kParts]) const {
    for (int i = 0; i < 4 * kParts; ++i) columns[i / kParts][i % kParts] = load(reinterpret_cast<const float*>(data) + i * kV);
  }
};

#if TOKENYARD_LANES == 8
template <typename T>
struct FloatNibbles : FloatColumns<T> {
  static constexpr int64_t kBytesPerInput = kColumns / 2;
  explicit FloatNibbles(const GroupedCodes& codes) {
    uint8_t low[32], high[32];
    for (int i = 0; i < 32; ++i) low[i] = codes.lookup[i % 16 * 2], high[i] = codes.lookup[i % 16 * 2 + 1];
    lows = load_bits(low), highs = load_bits(high);
  }

  // A table of 16 bytes is one instruction: lower and upper bytes of numbers as bf16 are found by themselves. A column's
  // four inputs are four bytes, in the order 0, 2, 1, 3; those of four columns are sorted first, so that joining both
  // bytes makes pairs of inputs.
  void read(const uint8_t* data, Floats (*columns)[kParts]) const {
    const __m256i sorted = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    for (int quarter = 0; quarter < 2; ++quarter) {
      const __m256i raw = _mm256_shuffle_epi8(load_bits(data + 32 * quarter), sorted);
      for (int half = 0; half < 2; ++half) {
        const __m256i codes = _mm256_and_si256(half == 0 ? raw : _mm256_srli_epi16(raw, 4), _mm256_set1_epi8(15));
        const __m256i low = _mm256_shuffle_epi8(lows, codes), high = _mm256_shuffle_epi8(highs, codes);
        const int part = 2 * half + quarter;
        for (int two = 0; two < 2; ++two) {
          const Words pairs = (Words)(two == 0 ? _mm256_unpacklo_epi8(low, high) : _mm256_unpackhi_epi8(low, high));
          columns[2 * two][part] = (Floats)(pairs << 16);
          columns[2 * two + 1][part] = (Floats)(pairs & 0xffff0000u);
        }
      }
    }
  }

  __m256i lows, highs;
};

// Of the upper bytes of eight words: numbers of 16 bits that are 2^8 too small, their subnormal ones included.
inline Floats numbers_of_float8(__m128i words) {
  const __m128i halves = _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  return (Floats)_mm256_cvtph_ps(halves) * 256.0f;
}

// Both inputs of eight columns, as numbers: bytes of four columns of each half of a block alternate.
template <CodeKind kKind>
inline void read_pairs(const uint8_t* data, int part, Floats& even, Floats& odd) {
  const bool is_first_half = part / 2 == 0;
  data += part % 2 * 32;
  if constexpr (kKind == CodeKind::kInt8) {
    const __m256i raw = load_bits(data), zero = _mm256_setzero_si256();
    const Ints upper = (Ints)(is_first_half ? _mm256_unpacklo_epi8(zero, raw) : _mm256_unpackhi_epi8(zero, raw));
    even = __builtin_convertvector(upper << 16 >> 24, Floats);
    odd = __builtin_convertvector(upper >> 24, Floats);
  } else {
    const __m128i* from = reinterpret_cast<const __m128i*>(data);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i pairs = is_first_half ? _mm_unpacklo_epi64(a, b) : _mm_unpackhi_epi64(a, b);
    even = numbers_of_float8(_mm_slli_epi16(pairs, 8)), odd = numbers_of_float8(pairs);
  }
}
#else
// Of the lowest four bits of each lane.
inline Floats lookup(const float* table, Words codes) {
#if TOKENYARD_LANES == 16
  return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(table));
#else
  Floats found;
  for (int lane = 0; lane < kV; ++lane) found[lane] = table[codes[lane] & 15];
  return found;
#endif
}

template <typename T>
struct FloatNibbles : FloatColumns<T> {
  static constexpr int64_t kBytesPerInput = kColumns / 2;
  explicit FloatNibbles(const GroupedCodes& codes) : table(codes.table) {}

  void read(const uint8_t* data, Floats (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) {
      const int half = part * kV / 16, first = part * kV % 16;
      Words raw;
      __builtin_memcpy(&raw, data + 4 * first, sizeof raw);
      for (int step = 0; step < 4; ++step) {
        columns[step][part] = lookup(table, raw >> (16 * (step % 2) + 4 * (step / 2 * 2 + half)));
      }
    }
  }

  const float* table;
};

#if TOKENYARD_LANES == 16
// Both inputs of 16 columns, as numbers. As for eight: bytes of four columns of each half of a block alternate.
template <CodeKind kKind>
inline void read_pairs(const uint8_t* data, int part, Floats& even, Floats& odd) {
  const __m512i raw = _mm512_loadu_si512(data), zero = _mm512_setzero_si512();
  const Ints upper = (Ints)(part == 0 ? _mm512_unpacklo_epi8(zero, raw) : _mm512_unpackhi_epi8(zero, raw));
  if constexpr (kKind == CodeKind::kInt8) {
    even = __builtin_convertvector(upper << 16 >> 24, Floats);
    odd = __builtin_convertvector(upper >> 24, Floats);
  } else {
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16((__m512i)upper, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    even = (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)) * 256.0f;
    odd = (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(halves, 16))) * 256.0f;
  }
}
#else
inline Floats number_of_int8(Words code) { return __builtin_convertvector((Ints)(code << 24) >> 24, Floats); }

// Of 4 bits of exponent and 3 of mantissa. A float of the same bits, its exponent moved, is right unless the code
// is subnormal; then it is 2^-7 plus half of the number.
inline Floats number_of_float8(Words code) {
  const Words size = code & 0x7f;
  const Floats moved = (Floats)((size << 20) + 0x3c000000u);
  const Floats positive = size < 8 ? 2.0f * (moved - 0.0078125f) : moved;
  return (Floats)((Words)positive | (code & 0x80) << 24);
}

// Both inputs of a vector of columns, as numbers.
template <CodeKind kKind>
inline void read_pairs(const uint8_t* data, int part, Floats& even, Floats& odd) {
  const int half = part * kV / 16, first = part * kV % 16;
  Halves raw;
  for (int i = 0; i < kV / 4; ++i) {
    __builtin_memcpy(reinterpret_cast<uint8_t*>(&raw) + 8 * i, data + (first / 4 + i) * 16 + half * 8, 8);
  }
  const Words codes = __builtin_convertvector(raw, Words);
  const auto number = [](Words code) { return kKind == CodeKind::kInt8 ? number_of_int8(code) : number_of_float8(code); };
  even = number(codes & 255), odd = number(codes >> 8);
}
#endif
#endif

template <typename T, CodeKind kKind>
struct FloatBytes : FloatColumns<T> {
  static constexpr int64_t kBytesPerInput = kColumns;
  explicit FloatBytes(const GroupedCodes&) {}

  void read(const uint8_t* data, Floats (*columns)[kParts]) const {
    for (int two = 0; two < 2; ++two, data += 2 * kColumns) {
      for (int part = 0; part < kParts; ++part) {
        read_pairs<kKind>(data, part, columns[2 * two][part], columns[2 * two + 1][part]);
      }
    }
  }
};
