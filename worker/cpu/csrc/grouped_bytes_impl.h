// Grouped codes times whole inputs: each run is summed exactly, then scaled.
//
// Included by grouped_impl.h. Codes become whole numbers that are `shift` too large and therefore not negative, as
// the processor's products want them; inputs have a sign here.

// Makes signed bytes of 128 more than those, in place; returns their sum.
inline float sum_and_center_bytes(uint8_t* bytes, int64_t size) {
  int32_t total = 0;
  for (int64_t k = 0; k < size; ++k) {
    total += static_cast<int32_t>(bytes[k]) - 128;
    bytes[k] ^= 0x80;
  }
  return static_cast<float>(total);
}

// Four inputs of each column are four bytes of a lane.
struct ByteNibbles {
  static constexpr int64_t kBytesPerInput = kColumns / 2;
#if defined(TOKENYARD_BYTE_DOT)
  explicit ByteNibbles(const GroupedCodes& codes)
      : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.lookup)))) {}

  void read(const uint8_t* data, Words* columns) const {
    const __m512i raw = _mm512_loadu_si512(data), mask = _mm512_set1_epi8(15);
    columns[0] = (Words)_mm512_shuffle_epi8(table, _mm512_and_si512(raw, mask));
    columns[1] = (Words)_mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
  }

  __m512i table;
#else
  explicit ByteNibbles(const GroupedCodes& codes) : table(codes.lookup) {}

  void read(const uint8_t* data, Words* columns) const {
    for (int part = 0; part < kParts; ++part) {
      const int half = part * kV / 16, first = part * kV % 16;
      uint8_t bytes[4 * kV];
      for (int i = 0; i < 4 * kV; ++i) bytes[i] = table[data[4 * first + i] >> (4 * half) & 15];
      __builtin_memcpy(columns + part, bytes, sizeof bytes);
    }
  }

  const uint8_t* table;
#endif
};

struct ByteBytes {
  static constexpr int64_t kBytesPerInput = kColumns;
  explicit ByteBytes(const GroupedCodes&) {}

  void read(const uint8_t* data, Words* columns) const {
    for (int part = 0; part < kParts; ++part) __builtin_memcpy(columns + part, data + 4 * part * kV, sizeof(Words));
  }
};

inline void add_bytes(Ints& total, const uint8_t* four, Words columns) {
#if defined(TOKENYARD_BYTE_DOT)
  int32_t value;
  __builtin_memcpy(&value, four, sizeof value);
  total = (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)columns, _mm512_set1_epi32(value));
#else
  for (int i = 0; i < 4; ++i) total += (Ints)(columns >> (8 * i) & 255) * static_cast<int32_t>(static_cast<int8_t>(four[i]));
#endif
}

template <int M, int B, class Codes, typename T>
inline void multiply_byte_blocks(const Product<T>& product, const Codes& codes, int64_t row, int64_t block) {
  const PackedWeight<T>& weight = product.weight;
  const int64_t size = weight.num_inputs, stride = size * Codes::kBytesPerInput;
  const int64_t num_runs = weight.num_runs();
  fetch_updates<M, B>(product, row, block);
  Floats totals[M][B * kParts] = {};
  for_each_run(weight, block, [&](const Run& run) {
    Ints sums[M][B * kParts] = {};
    const uint8_t* data = weight.grouped.data + block * stride + run.first * Codes::kBytesPerInput;
    const uint8_t* x = product.bytes + row * size + run.first;
    for (int64_t k = 0; k < run.size; k += 4, data += 4 * Codes::kBytesPerInput) {
      for (int b = 0; b < B; ++b) {
        Words columns[kParts];
        codes.read(data + b * stride, columns);
        for (int m = 0; m < M; ++m) {
          for (int part = 0; part < kParts; ++part) add_bytes(sums[m][b * kParts + part], x + m * size + k, columns[part]);
        }
      }
    }
    Floats shifted[M][B * kParts];
    for (int m = 0; m < M; ++m) {
      const int32_t shift = weight.grouped.shift * static_cast<int32_t>(product.run_sums[(row + m) * num_runs + run.index]);
      for (int part = 0; part < B * kParts; ++part) shifted[m][part] = __builtin_convertvector(sums[m][part] - shift, Floats);
    }
    add_run<M, B>(product, run, row, shifted, totals);
  });
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < B * kParts; ++part) totals[m][part] *= splat(product.scales[row + m]);
    for (int b = 0; b < B; ++b) finish_row(product, row + m, block + b, totals[m] + b * kParts);
  }
}

template <int M, int B, class Codes, typename T>
inline void multiply_byte_rows(const Product<T>& product, const Codes& codes, int64_t row, int64_t begin, int64_t end) {
  for (; begin + B <= end; begin += B) multiply_byte_blocks<M, B>(product, codes, row, begin);
  if constexpr (B > 1) multiply_byte_rows<M, B / 2>(product, codes, row, begin, end);
}

// M rows, or all that are left.
template <int M, class Codes, typename T>
inline void multiply_byte_tile(const Product<T>& product, const Codes& codes, int64_t row, int64_t begin, int64_t end) {
  if constexpr (M > 0) {
    if (product.num_rows - row < M) return multiply_byte_tile<M - 1>(product, codes, row, begin, end);
    multiply_byte_rows<M, blocks_at_once(M)>(product, codes, row, begin, end);
  }
}

template <class Codes, typename T>
inline void multiply_byte_codes(const Product<T>& product, int64_t begin, int64_t end) {
  const Codes codes(product.weight.grouped);
  if (product.num_rows <= kTileRows) return multiply_byte_tile<kTileRows>(product, codes, 0, begin, end);
  for (; begin < end; ++begin) {
    for (int64_t row = 0; row < product.num_rows; row += kTileRows) {
      multiply_byte_tile<kTileRows>(product, codes, row, begin, begin + 1);
    }
  }
}

template <typename T>
inline void multiply_grouped_bytes(const Product<T>& product, int64_t begin, int64_t end) {
  if (product.weight.grouped.kind == CodeKind::kNibbles) return multiply_byte_codes<ByteNibbles>(product, begin, end);
  multiply_byte_codes<ByteBytes>(product, begin, end);
}
