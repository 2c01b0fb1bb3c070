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
  uint8_t* bytes = memory.bytes + row * weight.num_inputs;
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
  static constexpr bool kIsDecoded = false;
  using Input = uint8_t;
  using Sum = Ints;
  using Vector = Words;
  static constexpr int kInputs = 4, kSteps = 1;
#if defined(TOKENYARD_BYTE_DOT)
  static constexpr int kStraightInputs = 32;
#else
  static constexpr int kStraightInputs = kInputs;
#endif
  static constexpr int kDirectRows = kTileRows, kSharingTileRows = kScaledTileRows;
  template <typename T>
  static const uint8_t* rows(const Product<T>& product) { return product.bytes; }
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
    int32_t value;
    __builtin_memcpy(&value, four, sizeof value);
    total = (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)columns, _mm512_set1_epi32(value));
#else
    for (int i = 0; i < 4; ++i) total += (Ints)(columns >> (8 * i) & 255) * static_cast<int32_t>(static_cast<int8_t>(four[i]));
#endif
  }
};

struct ByteNibbles : ByteColumns {
  static constexpr int kSharingTileRows = 4;  // more leave no registers to look up in
  static constexpr int64_t kBytesPerInput = kColumns / 2;
#if defined(TOKENYARD_BYTE_DOT)
  explicit ByteNibbles(const GroupedCodes& codes)
      : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.lookup)))) {}

  // Of an index only the lower six bits count, and the table is there four times: nothing needs to be masked.
  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    const __m512i raw = _mm512_loadu_si512(data);
    columns[0][0] = (Words)_mm512_permutexvar_epi8(raw, table);
    columns[0][1] = (Words)_mm512_permutexvar_epi8(_mm512_srli_epi16(raw, 4), table);
  }

  __m512i table;
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

struct ByteBytes : ByteColumns {
  static constexpr int64_t kBytesPerInput = kColumns;
  explicit ByteBytes(const GroupedCodes&) {}

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) __builtin_memcpy(&columns[0][part], data + 4 * part * kV, sizeof(Words));
  }
};

struct DecodedBytes : ByteColumns {
  static constexpr bool kIsDecoded = true;
  static constexpr int64_t kBytesPerInput = kColumns;

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) __builtin_memcpy(&columns[0][part], data + 4 * part * kV, sizeof(Words));
  }
};
