// Products by weights that are codes with scales of groups.
//
// Included by products_impl.h. Inputs are taken in runs: a group, or a part of a large one. A run is summed in
// the order of K, then scaled and added to the output, so that nothing depends on how many rows there are, nor on
// whether columns are decoded for one tile of rows or once for many.

// Rows that share a run's decoded columns, if there are more than a tile of them.
constexpr int kSharingRows = 192;

// Inputs that are decoded at once: a block of them stays in the nearest cache while all rows read it.
constexpr int64_t kSharedInputs = kRunInputs;

// Rows of which both sums and totals have registers. Groups are scaled so often that it pays to have fewer.
constexpr int kScaledTileRows = kV == 16 ? 6 : kTileRows;

// As `blocks_at_once`, for rows that have totals beside their sums. Groups' sums do not wait for one another, so that one
// row takes one block, whose bytes are one stream of memory.
constexpr int scaled_blocks_at_once(int num_rows) {
  if (kV == 16) return num_rows == 2 || num_rows == 3 ? 2 : 1;
  return blocks_at_once(num_rows);
}

// Rows of a run that are read where they lie, `stride` numbers apart.
template <typename T>
struct RowsInPlace {
  RowsInPlace(const T* from, int64_t row_stride, int64_t) : first(from), stride(row_stride) {}
  const T* first;
  int64_t stride;
};

// Inputs as they are: a run's sum begins at 0, and is what it is.
template <typename T>
struct PlainInputs {
  static constexpr bool kIsDecoded = false, kHasPanels = kPanels;
  static constexpr int kSharingTileRows = kScaledTileRows;  // of which several tiles decode for themselves
  using Input = T;
  template <int M>
  using Rows = RowsInPlace<T>;
  using Sum = Floats;
  static const T* rows(const Product<T>& product) { return product.input; }
  static int64_t row_stride(const Product<T>& product) { return product.input_stride; }
  static Sum begin(const Product<T>&, int64_t) { return Sum{}; }
  static float zero(const Product<T>&, int64_t) { return 0; }
  static Floats end(Sum sum, float) { return sum; }
  static void finish(const Product<T>&, int64_t, Floats*) {}
};

#include "products/grouped_floats_impl.h"

#if defined(TOKENYARD_BF16_DOT)
// Columns as pairs of bf16: four inputs are two vectors a part.
struct PairColumns : PlainInputs<Bf16> {
  using Vector = __m512bh;
  static constexpr int kInputs = 4, kSteps = 2, kStraightInputs = 32;
  static constexpr int kDirectRows = kTileRows;
  static void add(Floats& total, const Bf16* x, int step, Vector columns) {
    int32_t pair;
    __builtin_memcpy(&pair, x + 2 * step, sizeof pair);
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(pair), columns);
  }
};

struct PairNibbles : PairColumns {
  static constexpr int64_t kBytesPerInput = kColumns / 2;
  explicit PairNibbles(const GroupedCodes& codes) : table(_mm512_loadu_si512(codes.lookup)) {}

  // Of an index only the lower five bits count, and the table is there twice: nothing needs to be masked.
  void read(const uint8_t* data, Vector (*columns)[kParts]) const {
    const __m512i raw = _mm512_loadu_si512(data);
    columns[0][0] = (Vector)_mm512_permutexvar_epi16(raw, table);
    columns[0][1] = (Vector)_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), table);
    columns[1][0] = (Vector)_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), table);
    columns[1][1] = (Vector)_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), table);
  }

  __m512i table;
};

struct PairBytes : PairColumns {
  static constexpr int kSharingTileRows = kTileRows;  // looking up two tables a number is worth doing once
  static constexpr int64_t kBytesPerInput = kColumns;
  explicit PairBytes(const GroupedCodes& codes) {
    for (int i = 0; i < 8; ++i) tables[i] = _mm512_loadu_si512(codes.lookup + 64 * i);
  }

  void read(const uint8_t* data, Vector (*columns)[kParts]) const {
    for (int two = 0; two < 2; ++two) {
      const __m512i raw = _mm512_loadu_si512(data + 64 * two);
      const __mmask64 is_upper = _mm512_movepi8_mask(raw);
      const __m512i low = _mm512_mask_blend_epi8(is_upper, _mm512_permutex2var_epi8(tables[0], raw, tables[1]),
                                                 _mm512_permutex2var_epi8(tables[2], raw, tables[3]));
      const __m512i high = _mm512_mask_blend_epi8(is_upper, _mm512_permutex2var_epi8(tables[4], raw, tables[5]),
                                                  _mm512_permutex2var_epi8(tables[6], raw, tables[7]));
      columns[two][0] = (Vector)_mm512_unpacklo_epi8(low, high);
      columns[two][1] = (Vector)_mm512_unpackhi_epi8(low, high);
    }
  }

  __m512i tables[8];
};

// Two inputs at a time: of four, the vectors beside sums and totals would not all have registers.
struct DecodedPairs : PairColumns {
  static constexpr bool kIsDecoded = true;
  static constexpr int kInputs = 2, kSteps = 1;
  static constexpr int64_t kBytesPerInput = kColumns * sizeof(Bf16);

  void read(const uint8_t* data, Vector (*columns)[kParts]) const {
    for (int part = 0; part < kParts; ++part) columns[0][part] = (Vector)_mm512_loadu_si512(data + 64 * part);
  }
};
#endif

#include "products/grouped_runs_impl.h"

#include "products/grouped_bytes_impl.h"

#include "products/grouped_planes_impl.h"

#if defined(TOKENYARD_PANELS) && !defined(TOKENYARD_EXPANDED)
#include "products/grouped_panels_impl.h"
#endif

// Bytes that come later are on their way: they cross pages, and pages stop a processor that reads ahead by itself.
template <int kBytes, int kNearness = 2>
inline void fetch(const uint8_t* from) {
#pragma GCC unroll 4
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, 0, kNearness);
}

// How many inputs ahead codes are fetched, and how near: one row uses them up so soon that they go to the nearest cache.
constexpr int64_t inputs_ahead(int num_rows) { return num_rows == 1 ? kSharedInputs / 2 : kSharedInputs; }
constexpr int nearness(int num_rows) { return num_rows == 1 ? 3 : 2; }

// The next inputs of M rows, of which `data` has the codes of B blocks, `stride` bytes apart.
template <int M, int B, class Codes>
[[gnu::always_inline]] inline void sum_inputs(const Codes& codes, const uint8_t* data, int64_t stride,
                                              const typename Codes::Input* x, int64_t row_stride,
                                              typename Codes::Sum (*sums)[B * kParts]) {
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
    const uint8_t* from = data + b * stride;
    if constexpr (!Codes::kIsDecoded) {
      fetch<Codes::kInputs * Codes::kBytesPerInput, nearness(M)>(from + inputs_ahead(M) * Codes::kBytesPerInput);
    }
    typename Codes::Vector columns[Codes::kSteps][kParts];
    codes.read(from, columns);
#pragma GCC unroll 4
    for (int step = 0; step < Codes::kSteps; ++step) {
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) {
          Codes::add(sums[m][b * kParts + part], x + m * row_stride, step, columns[step][part]);
        }
      }
    }
  }
}

// The next run of M rows; moves `data` on. Groups of 32 are straight code where products are fast: the end of a short
// loop would be foreseen wrongly too often.
template <int M, int B, class Codes>
inline void sum_run(const Codes& codes, const uint8_t*& data, int64_t stride, const typename Codes::Input* x,
                    int64_t row_stride, int64_t size, typename Codes::Sum (*sums)[B * kParts]) {
  constexpr int64_t kBytes = Codes::kInputs * Codes::kBytesPerInput;
  int64_t left = size;
  for (; left >= Codes::kStraightInputs; left -= Codes::kStraightInputs) {
#pragma GCC unroll 16
    for (int k = 0; k < Codes::kStraightInputs; k += Codes::kInputs, data += kBytes, x += Codes::kInputs) {
      sum_inputs<M, B>(codes, data, stride, x, row_stride, sums);
    }
  }
  if constexpr (Codes::kStraightInputs > Codes::kInputs) {
    for (; left > 0; left -= Codes::kInputs, data += kBytes, x += Codes::kInputs) {
      sum_inputs<M, B>(codes, data, stride, x, row_stride, sums);
    }
  }
}

// Adds runs to the totals of M rows from `row` on. A function of its own, in which few enough totals have registers;
// its loops must be unrolled for that.
template <int M, int B, class Codes, class Runs, typename T>
[[gnu::noinline]] void add_runs(const Product<T>& product, const Codes& codes, const uint8_t* data, int64_t stride,
                                const Runs& runs, int64_t row, Floats (*totals)[B * kParts]) {
  constexpr int kAll = B * kParts;
  constexpr bool kInRegisters = M * kAll <= kScaledTileRows * kParts;
  const int64_t row_stride = Codes::row_stride(product), num_rows = product.num_rows;
  const bool has_offsets = product.weight.grouped.offsets.data != nullptr;
  Floats here[M][kAll];
  if (kInRegisters) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 32
      for (int part = 0; part < kAll; ++part) here[m][part] = totals[m][part];
    }
  }
  runs.for_each([&](const Run& run, const Floats* scales, const Floats* offsets) {
    const int64_t first = run.index * num_rows + row;
    typename Codes::Sum sums[M][kAll];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const auto start = Codes::begin(product, first + m);
#pragma GCC unroll 32
      for (int part = 0; part < kAll; ++part) sums[m][part] = start;
    }
    const typename Codes::template Rows<M> rows(Codes::rows(product) + row * row_stride + run.first, row_stride, run.size);
    sum_run<M, B>(codes, data, stride, rows.first, rows.stride, run.size, sums);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const auto zero = Codes::zero(product, first + m);
#pragma GCC unroll 32
      for (int part = 0; part < kAll; ++part) {
        Floats& total = kInRegisters ? here[m][part] : totals[m][part];
        total = fused(scales[part], Codes::end(sums[m][part], zero), total);
      }
    }
    if (!has_offsets) return;
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const Floats inputs = splat(product.run_sums[first + m]);
#pragma GCC unroll 32
      for (int part = 0; part < kAll; ++part) {
        Floats& total = kInRegisters ? here[m][part] : totals[m][part];
        total = fused(-offsets[part], inputs, total);
      }
    }
  });
  if (kInRegisters) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 32
      for (int part = 0; part < kAll; ++part) totals[m][part] = here[m][part];
    }
  }
}

template <int M, int B, class Codes, typename T>
inline void multiply_grouped_blocks(const Product<T>& product, const Codes& codes, int64_t row, int64_t block) {
  const PackedWeight<T>& weight = product.weight;
  const int64_t stride = weight.num_inputs * Codes::kBytesPerInput;
  Floats totals[M][B * kParts] = {};
  fetch_updates<M, B>(product, row, block);
  const uint8_t* data = weight.grouped.data + block * stride;
  add_runs<M, B>(product, codes, data, stride, AllRuns<B, T>{weight, block}, row, totals);
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < B; ++b) {
      Codes::finish(product, row + m, totals[m] + b * kParts);
      finish_row(product, row + m, block + b, totals[m] + b * kParts);
    }
  }
}

template <int M, int B, class Codes, typename T>
inline void multiply_grouped_rows(const Product<T>& product, const Codes& codes, int64_t begin, int64_t end) {
  for (; begin + B <= end; begin += B) multiply_grouped_blocks<M, B>(product, codes, 0, begin);
  if constexpr (B > 1) multiply_grouped_rows<M, B / 2>(product, codes, begin, end);
}

// All rows, M of them or fewer.
template <int M, class Codes, typename T>
inline void multiply_grouped_tile(const Product<T>& product, const Codes& codes, int64_t num_rows, int64_t begin,
                                  int64_t end) {
  if constexpr (M > 0) {
    if (num_rows < M) return multiply_grouped_tile<M - 1>(product, codes, num_rows, begin, end);
    multiply_grouped_rows<M, scaled_blocks_at_once(M)>(product, codes, begin, end);
  }
}

// One tile of M rows, or the last ones, with runs of one block.
template <int M, class Codes, typename T>
inline void add_kept_runs(const Product<T>& product, const Codes& codes, const uint8_t* data, const KeptRuns& kept,
                          int64_t row, int64_t num_rows, Floats (*totals)[kParts]) {
  if constexpr (M > 0) {
    if (num_rows < M) return add_kept_runs<M - 1>(product, codes, data, kept, row, num_rows, totals);
    add_runs<M, 1>(product, codes, data, 0, kept, row, totals);
  }
}

// Several tiles of rows share scales, and many of them decoded columns.
template <class Codes, class Decoded, bool kDecodes, typename T>
inline void multiply_many_grouped_rows(const Product<T>& product, const Codes& codes, int64_t block) {
  const PackedWeight<T>& weight = product.weight;
  const uint8_t* data = weight.grouped.data + block * weight.num_inputs * Codes::kBytesPerInput;
  constexpr int64_t kStepBytes = Codes::kInputs * Codes::kBytesPerInput;
  typename Codes::Vector decoded[kDecodes ? kSharedInputs / Codes::kInputs : 1][Codes::kSteps][kParts];
  const bool is_small = weight.grouped.group_size <= kSmallGroup;
  const int64_t most = !kDecodes ? Codes::kSharingTileRows : is_small ? kScaledTileRows : kTileRows;
  const int64_t num_passes = (product.num_rows + kSharingRows - 1) / kSharingRows;
  for (int64_t pass = 0; pass < num_passes; ++pass) {
    const int64_t first = product.num_rows * pass / num_passes;
    const int64_t num_rows = product.num_rows * (pass + 1) / num_passes - first, num_tiles = (num_rows + most - 1) / most;
    Floats totals[kSharingRows][kParts];
    __builtin_memset(totals, 0, sizeof totals[0] * static_cast<uint64_t>(num_rows));
    for_some_runs(weight, block, [&](const KeptRuns& kept) {
      const uint8_t* const codes_of_runs = data + kept.runs[0].first * Codes::kBytesPerInput;
      const int64_t num_steps = kept.size / Codes::kInputs;
      for (int64_t i = 0; i < num_steps && kDecodes; ++i) codes.read(codes_of_runs + i * kStepBytes, decoded[i]);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = num_rows * tile / num_tiles, here = num_rows * (tile + 1) / num_tiles - row;
        if constexpr (!kDecodes) {
          add_kept_runs<Codes::kSharingTileRows>(product, codes, codes_of_runs, kept, first + row, here, totals + row);
          continue;
        }
        // What comes next, of this block or the one after it, is on its way while these are multiplied: a share for each
        // tile, since all at once would have to wait for one another.
        for (int64_t i = num_steps * tile / num_tiles; i < num_steps * (tile + 1) / num_tiles; ++i) {
          fetch<kStepBytes>(codes_of_runs + (num_steps + i) * kStepBytes);
        }
        const uint8_t* const columns = reinterpret_cast<const uint8_t*>(decoded);
        if (is_small) {
          add_kept_runs<kScaledTileRows>(product, Decoded(), columns, kept, first + row, here, totals + row);
        } else {
          add_kept_runs<kTileRows>(product, Decoded(), columns, kept, first + row, here, totals + row);
        }
      }
    });
    for (int64_t row = 0; row < num_rows; ++row) {
      Codes::finish(product, first + row, totals[row]);
      finish_row(product, first + row, block, totals[row]);
    }
  }
}

template <class Codes, class Decoded, typename T>
inline void multiply_codes(const Product<T>& product, int64_t begin, int64_t end) {
  const Codes codes(product.weight.grouped);
  constexpr int kFew = Codes::kDirectRows < kScaledTileRows ? Codes::kDirectRows : kScaledTileRows;
  if (product.num_rows <= kFew) {
    return multiply_grouped_tile<kFew>(product, codes, product.num_rows, begin, end);
  }
  // More rows than that share decoded columns: it costs less than decoding them for each tile.
  if constexpr (Codes::kDirectRows > kFew) {
    if (product.num_rows <= Codes::kDirectRows) {
      for (; begin < end; ++begin) multiply_many_grouped_rows<Codes, Decoded, false>(product, codes, begin);
      return;
    }
  }
  if constexpr (Codes::kHasPanels) {
    multiply_codes_in_panels(product, codes, begin, end);
  } else {
    for (; begin < end; ++begin) multiply_many_grouped_rows<Codes, Decoded, true>(product, codes, begin);
  }
}

// Codes as numbers, in which inputs are multiplied as they are.
template <typename T>
struct NumbersOf {
  using Nibbles = FloatNibbles<T>;
  using Int8 = FloatBytes<T, CodeKind::kInt8>;
  using Float8 = FloatBytes<T, CodeKind::kFloat8>;
  using FiveBits = FloatPlanes<T, 5>;
  using SixBits = FloatPlanes<T, 6>;
  using Decoded = DecodedFloats<T>;
};

#if defined(TOKENYARD_BF16_DOT)
template <>
struct NumbersOf<Bf16> {
  using Nibbles = PairNibbles;
  using Int8 = PairBytes;
  using Float8 = PairBytes;
  using FiveBits = PairPlanes<5>;
  using SixBits = PairPlanes<6>;
  using Decoded = DecodedPairs;
};
#endif

template <typename T>
inline void multiply_whole_inputs(const Product<T>& product, int64_t begin, int64_t end) {
  switch (product.weight.grouped.kind) {
    case CodeKind::kNibbles: return multiply_codes<ByteNibbles, DecodedBytes>(product, begin, end);
    case CodeKind::kFiveBits: return multiply_codes<BytePlanes<5>, DecodedWords>(product, begin, end);
    case CodeKind::kSixBits: return multiply_codes<BytePlanes<6>, DecodedWords>(product, begin, end);
    default: return multiply_codes<ByteBytes, DecodedWords>(product, begin, end);
  }
}

template <typename T>
inline void multiply_grouped(const Product<T>& product, int64_t begin, int64_t end) {
  if (product.weight.grouped.takes_bytes) return multiply_whole_inputs(product, begin, end);
  using Numbers = NumbersOf<T>;
  using Decoded = typename Numbers::Decoded;
  switch (product.weight.grouped.kind) {
    case CodeKind::kNibbles: return multiply_codes<typename Numbers::Nibbles, Decoded>(product, begin, end);
    case CodeKind::kInt8: return multiply_codes<typename Numbers::Int8, Decoded>(product, begin, end);
    case CodeKind::kFloat8: return multiply_codes<typename Numbers::Float8, Decoded>(product, begin, end);
    case CodeKind::kFiveBits: return multiply_codes<typename Numbers::FiveBits, Decoded>(product, begin, end);
    case CodeKind::kSixBits: return multiply_codes<typename Numbers::SixBits, Decoded>(product, begin, end);
  }
}

// The sum of one run of a row.
template <typename T>
inline float sum_of_run(const T* x, int64_t size) {
  Floats total = {};
  for (int64_t k = 0; k < size; k += kV) total += load(x + k);
  return sum(total);
}

template <typename T>
void prepare(const Product<T>& product, const Prepared<T>& memory, int64_t begin, int64_t end) {
  const PackedWeight<T>& weight = product.weight;
  const GroupedCodes& grouped = weight.grouped;
  const int64_t size = weight.num_inputs;
  const T* input = product.input;
  if (memory.permuted != nullptr) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < size; ++k) {
        memory.permuted[row * size + k] = product.input[row * size + grouped.permutation[k]];
      }
    }
    input = memory.permuted;
  }
  if (grouped.takes_bytes) {
    for (int64_t row = begin; row < end; ++row) quantize_runs(input, product, memory, row);
    return;
  }
  for (int64_t row = begin; row < end && memory.run_sums != nullptr; ++row) {
    float* sums = memory.run_sums + row;
    for_each_run(weight, 0, [&](const Run& run) { sums[run.index * product.num_rows] = sum_of_run(input + row * size + run.first, run.size); });
  }
}
