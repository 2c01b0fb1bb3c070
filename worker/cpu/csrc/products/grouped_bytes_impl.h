// Grouped codes times whole inputs: each run is summed exactly, then scaled.
//
// Included by grouped_impl.h. Codes become whole numbers that are `shift` too large and therefore not negative, as
// the processor's products want them; inputs have a sign here. A row has one scale, and each run one that is a power
// of two finer, as far as its numbers are smaller than the row's largest.

constexpr int kFinest = 16;
constexpr float kLeastSize = 1e-30f;  // rows below are zeros: scales of theirs would leave float32

// Bytes and starts of one row. A sum of the run begins at `bits`; see RunStart.
template <typename T>
inline void quantize_runs(const T* input, const Product<T>& product, const Prepared<T>& memory, int64_t row) {
  const PackedWeight<T>& weight = product.weight;
  const T* x = input + row * weight.num_inputs;
  uint8_t* bytes = memory.bytes + row * memory.bytes_stride;
  const auto start_of = [&](const Run& run) -> RunStart& { return memory.run_starts[run.index * product.num_rows + row]; };
  Floats poison = {};  // not a number if one of the row is not finite
  float highest = 0;
  for_each_run(weight, 0, [&](const Run& run) {
    Floats most = {};
    for (int64_t k = run.first; k < run.first + run.size; k += kV) {
      const Floats value = load(x + k);
      most = larger(value < 0 ? -value : value, most);
      poison += value * 0.0f;
    }
    const float highest_of_run = start_of(run).zero = largest(most);
    highest = highest_of_run > highest ? highest_of_run : highest;
  });
  memory.scales[row] = highest / 127 + sum(poison);
  const float inverse = highest > kLeastSize ? 127 / highest : 0;
  for_each_run(weight, 0, [&](const Run& run) {
    const float ratio = highest / start_of(run).zero;  // of a run of zeros: not finite, or not a number
    int finer = static_cast<int>(__builtin_bit_cast(uint32_t, ratio) >> 23 & 255) - 127;
    finer = finer < kFinest ? finer : kFinest;
    const float scale = inverse * static_cast<float>(1 << finer);
    const Floats shift = splat(12582912.0f);  // as in `exponential`: rounds to the nearest whole number
    Words total = {};
    for (int64_t k = run.first; k < run.first + run.size; k += kV) {
      const Ints whole = __builtin_convertvector((load(x + k) * scale + shift) - shift, Ints);
      const Bytes kept = __builtin_convertvector(whole, Bytes);
      __builtin_memcpy(bytes + k, &kept, sizeof kept);
      total += (Words)whole;
    }
    uint32_t all = 0;
    for (int lane = 0; lane < kV; ++lane) all += total[lane];
    const float unit = 1.0f / static_cast<float>(1 << finer), zero = 12582912.0f * unit;
    const uint32_t bits = __builtin_bit_cast(uint32_t, zero) - static_cast<uint32_t>(weight.grouped.shift) * all;
    start_of(run) = {static_cast<int32_t>(bits), zero};
    if (memory.run_sums == nullptr) return;
    memory.run_sums[run.index * product.num_rows + row] = unit * static_cast<float>(static_cast<int32_t>(all));
  });
}

// Four inputs of each column are four bytes of a lane, and inputs are bytes that `quantize_runs` made.
struct ByteColumns {
  static constexpr bool kIsDecoded = false, kHasPanels = false;
  using Input = uint8_t;
  template <int M>
  using Rows = RowsInPlace<uint8_t>;
  using Sum = Ints;
  using Vector = Words;
  static constexpr int kInputs = 4, kSteps = 1;
#if TOKENYARD_LANES == 16
  static constexpr int kStraightInputs = 32;
#else
  static constexpr int kStraightInputs = kInputs;
#endif
  static constexpr int kDirectRows = kTileRows, kSharingTileRows = kScaledTileRows;
  template <typename T>
  static const uint8_t* rows(const Product<T>& product) { return product.bytes; }
  template <typename T>
  static int64_t row_stride(const Product<T>& product) { return product.bytes_stride; }
  template <typename T>
  static Sum begin(const Product<T>& product, int64_t run) { return Sum{} + product.run_starts[run].bits; }
  template <typename T>
  static float zero(const Product<T>& product, int64_t run) { return product.run_starts[run].zero; }
  static Floats end(Sum sum, float zero) { return (Floats)sum - zero; }
  template <typename T>
  static void finish(const Product<T>& product, int64_t row, Floats* totals) {
    for (int part = 0; part < kParts; ++part) totals[part] *= splat(product.scales[row]);
  }

  static void add(Sum& total, const uint8_t* four, int, Words columns) {
#if defined(TOKENYARD_BYTE_DOT)
    total = with_byte_products(total, columns, (Words)splat(four_of(four)));
#elif TOKENYARD_LANES == 8
    // Tables are of numbers up to 127: the sum of two products has room in 16 bits.
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)columns, _mm256_set1_epi32(four_of(four)));
    total += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int i = 0; i < 4; ++i) total += (Ints)(columns >> (8 * i) & 255) * static_cast<int32_t>(static_cast<int8_t>(four[i]));
#endif
  }
};

struct ByteNibbles : ByteColumns {
  static constexpr bool kHasPanels = kV == 8;
#if TOKENYARD_LANES == 8
  static constexpr int kDirectRows = 3 * kTileRows;  // decoding is two instructions for as many as three products are
#else
  static constexpr int kSharingTileRows = 4;  // more leave no registers to look up in
#endif
  static constexpr int64_t kBytesPerInput = kColumns / 2;
#if TOKENYARD_LANES == 16
  explicit ByteNibbles(const GroupedCodes& codes)
      : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.lookup)))) {}

#if defined(TOKENYARD_BYTE_TABLES)
  // Of an index only the lower six bits count, and the table is there four times: nothing needs to be masked.
  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    const __m512i raw = _mm512_loadu_si512(data);
    columns[0][0] = (Words)_mm512_permutexvar_epi8(raw, table);
    columns[0][1] = (Words)_mm512_permutexvar_epi8(_mm512_srli_epi16(raw, 4), table);
  }
#else
  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    const __m512i raw = _mm512_loadu_si512(data), lower = _mm512_set1_epi8(15);
    columns[0][0] = (Words)_mm512_shuffle_epi8(table, _mm512_and_si512(raw, lower));
    columns[0][1] = (Words)_mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(raw, 4), lower));
  }
#endif

  __m512i table;
#elif TOKENYARD_LANES == 8
  explicit ByteNibbles(const GroupedCodes& codes)
      : table(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.lookup)))) {
#if !defined(TOKENYARD_BYTE_DOT)
    int highest = 1;
    for (int i = 0; i < 16; ++i) highest = codes.lookup[i] > highest ? codes.lookup[i] : highest;
    inputs_at_once = 4 * (INT16_MAX / (2 * 127 * highest));
#endif
  }

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int quarter = 0; quarter < 2; ++quarter) {
      const __m256i raw = load_bits(data + 32 * quarter), lower = _mm256_set1_epi8(15);
      columns[0][quarter] = (Words)_mm256_shuffle_epi8(table, _mm256_and_si256(raw, lower));
      columns[0][2 + quarter] = (Words)_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(raw, 4), lower));
    }
  }

  __m256i table;
#if !defined(TOKENYARD_BYTE_DOT)
  int64_t inputs_at_once;  // whose products have room in 16 bits, two of each four summed
#endif
#else
  explicit ByteNibbles(const GroupedCodes& codes) : table(codes.lookup) {}

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) {
      const int half = part * kV / 16, first = part * kV % 16;
      uint8_t bytes[4 * kV];
      for (int i = 0; i < 4 * kV; ++i) bytes[i] = table[data[4 * first + i] >> (4 * half) & 15];
      __builtin_memcpy(&columns[0][part], bytes, sizeof bytes);
    }
  }

  const uint8_t* table;
#endif
};

struct DecodedBytes : ByteColumns {
  static constexpr bool kIsDecoded = true;
  static constexpr int64_t kBytesPerInput = kColumns;

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) __builtin_memcpy(&columns[0][part], data + 4 * part * kV, sizeof(Words));
  }
};

#if TOKENYARD_LANES == 8 && !defined(TOKENYARD_BYTE_DOT)
// Numbers of 8 bits: two products of them have no room in 16 bits. Inputs 0 and 2 of the four are words, then 1 and 3.
struct WordColumns : ByteColumns {
  static constexpr int kSteps = 2;
  static void add(Sum& total, const uint8_t* four, int step, Words columns) {
    const __m256i inputs = _mm256_set1_epi32(four_of(four));
    const __m256i words = _mm256_srai_epi16(step == 0 ? _mm256_slli_epi16(inputs, 8) : inputs, 8);
    total += (Ints)_mm256_madd_epi16((__m256i)columns, words);
  }
};

struct ByteBytes : WordColumns {
  static constexpr int64_t kBytesPerInput = kColumns;
  explicit ByteBytes(const GroupedCodes&) {}

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) {
      const __m256i raw = load_bits(data + 4 * part * kV);
      columns[0][part] = (Words)raw & 0x00ff00ffu;
      columns[1][part] = (Words)_mm256_srli_epi16(raw, 8);
    }
  }
};

struct DecodedWords : WordColumns {
  static constexpr bool kIsDecoded = true;
  static constexpr int64_t kBytesPerInput = kColumns * sizeof(uint16_t);

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int i = 0; i < 2 * kParts; ++i) columns[i / kParts][i % kParts] = (Words)load_bits(data + 4 * i * kV);
  }
};
#else
struct ByteBytes : ByteColumns {
  static constexpr bool kHasPanels = kV == 8;
  static constexpr int64_t kBytesPerInput = kColumns;
  explicit ByteBytes(const GroupedCodes&) {}

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) __builtin_memcpy(&columns[0][part], data + 4 * part * kV, sizeof(Words));
  }
};

using DecodedWords = DecodedBytes;
#endif
