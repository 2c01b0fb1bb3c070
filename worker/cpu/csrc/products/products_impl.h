// Products of rows by packed weights of dense numbers, and by whole numbers with one scale a column.
//
// Included by kernels_impl.h, once for each instruction set. Weights with scales of groups: grouped_impl.h.

// Without products of bf16, or where those are slow, many rows are multiplied as floats that lie in panels.
#if TOKENYARD_LANES == 8 || (TOKENYARD_LANES == 16 && (!defined(TOKENYARD_BF16_DOT) || defined(TOKENYARD_EXPANDED)))
#define TOKENYARD_PANELS
constexpr bool kPanels = true;
#else
constexpr bool kPanels = false;
#endif

// A block's 32 columns, in vectors; and the rows of a product that share the loads of the weight: as many as
// there are registers for their sums.
constexpr int kParts = kColumns / kV;
constexpr int kTileRows = kV == 16 ? 12 : kV == 8 ? 3 : 1;

// Blocks that M rows multiply at once. A sum waits for the sum before it: few rows want several blocks, so that
// there is something else to add meanwhile. No output is summed in another order for it.
constexpr int blocks_at_once(int num_rows) {
  if (kV == 16) return num_rows <= 2 ? 4 : num_rows <= 6 ? 2 : 1;
  return kV == 8 && num_rows == 1 ? 2 : 1;
}

// A product's inner loop: M rows times B blocks of 32 columns, in order of K. Blocks lie `stride` apart, rows `row_stride`.
template <int M, int B>
inline void multiply_tile(const float* x, int64_t row_stride, int64_t num_inputs, const float* weight, int64_t stride,
                          Floats (*sums)[B * kParts]) {
  Floats total[M][B * kParts] = {};
  for (int64_t k = 0; k < num_inputs; ++k, weight += kColumns) {
    for (int part = 0; part < B * kParts; ++part) {
      const Floats columns = load(weight + part / kParts * stride + part % kParts * kV);
      for (int m = 0; m < M; ++m) total[m][part] = fused(splat(x[m * row_stride + k]), columns, total[m][part]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < B * kParts; ++part) sums[m][part] = total[m][part];
  }
}

#if defined(TOKENYARD_BF16_DOT) && !defined(TOKENYARD_EXPANDED)
template <int M, int B>
inline void multiply_tile(const Bf16* x, int64_t row_stride, int64_t num_inputs, const Bf16* weight, int64_t stride,
                          Floats (*sums)[B * kParts]) {
  __m512 total[M][B * kParts] = {};
  for (int64_t k = 0; k < num_inputs; k += 2, weight += 2 * kColumns) {
    __m512bh columns[B * kParts];
    for (int part = 0; part < B * kParts; ++part) {
      columns[part] = (__m512bh)_mm512_loadu_si512(weight + part / kParts * stride + part % kParts * kColumns);
    }
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      __builtin_memcpy(&pair, x + m * row_stride + k, sizeof pair);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
      for (int part = 0; part < B * kParts; ++part) {
        total[m][part] = _mm512_dpbf16_ps(total[m][part], value, columns[part]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < B * kParts; ++part) sums[m][part] = (Floats)total[m][part];
  }
}
#else
// Rows are expanded some inputs at a time: a float is loaded into all lanes at once, which half of a pair is not.
constexpr int64_t kExpandedInputs = 256;

template <int M, int B>
inline void multiply_tile(const Bf16* x, int64_t row_stride, int64_t num_inputs, const Bf16* weight, int64_t stride,
                          Floats (*sums)[B * kParts]) {
  Floats total[M][B * kParts] = {};
  alignas(64) float rows[M][kExpandedInputs];
  for (int64_t first = 0; first < num_inputs; first += kExpandedInputs) {
    const int64_t left = num_inputs - first, size = left < kExpandedInputs ? left : kExpandedInputs;
    for (int m = 0; m < M; ++m) {
      for (int64_t k = 0; k < size; k += kV) store(rows[m] + k, load(x + m * row_stride + first + k));
    }
    for (int64_t k = 0; k < size; k += 2, weight += 2 * kColumns) {
      for (int part = 0; part < B * kParts; ++part) {
        Words pairs;
        __builtin_memcpy(&pairs, weight + part / kParts * stride + part % kParts * 2 * kV, sizeof pairs);
        const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000u);
        for (int m = 0; m < M; ++m) {
          total[m][part] = fused(splat(rows[m][k]), even, total[m][part]);
          total[m][part] = fused(splat(rows[m][k + 1]), odd, total[m][part]);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < B * kParts; ++part) sums[m][part] = total[m][part];
  }
}
#endif

// Four numbers of each column of a vector.
struct FourNumbers {
  void read(const int8_t* from) {
    __builtin_memcpy(&numbers, from, sizeof numbers);
#if TOKENYARD_LANES == 8 && !defined(TOKENYARD_BYTE_DOT)
    // Two products of a byte with a sign and one without have no room in 16 bits.
    odd = _mm256_srai_epi16((__m256i)numbers, 8);
    numbers = (Ints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)numbers, 8), 8);
#endif
  }

  // Adds their products with four inputs, which have no sign.
  Ints added_to(Ints total, const uint8_t* four) const {
#if defined(TOKENYARD_BYTE_DOT)
    return with_byte_products(total, (Words)splat(four_of(four)), (Words)numbers);
#elif TOKENYARD_LANES == 8
    const __m256i inputs = _mm256_set1_epi32(four_of(four));
    total += (Ints)_mm256_madd_epi16((__m256i)numbers, _mm256_and_si256(inputs, _mm256_set1_epi16(255)));
    return total + (Ints)_mm256_madd_epi16(odd, _mm256_srli_epi16(inputs, 8));
#else
    for (int i = 0; i < 4; ++i) total += (numbers << (24 - 8 * i) >> 24) * static_cast<int32_t>(four[i]);
    return total;
#endif
  }

  Ints numbers;
#if TOKENYARD_LANES == 8 && !defined(TOKENYARD_BYTE_DOT)
  __m256i odd;
#endif
};

// The same for whole numbers: exact, so that no order matters. With many registers a row's inputs are loaded once for all
// columns: loaded for each vector of them, those of all rows would be kept in registers that sums need.
template <int M, int B>
inline void multiply_tile(const uint8_t* x, int64_t row_stride, int64_t num_inputs, const int8_t* weight, int64_t stride,
                          Ints (*sums)[B * kParts]) {
  constexpr int kTogether = kV == 16 ? B * kParts : 1;
  Ints total[M][B * kParts] = {};
  for (int64_t k = 0; k < num_inputs; k += 4, weight += 4 * kColumns) {
    for (int first = 0; first < B * kParts; first += kTogether) {
      FourNumbers columns[kTogether];
      for (int i = 0; i < kTogether; ++i) {
        const int part = first + i;
        columns[i].read(weight + part / kParts * stride + part % kParts * 4 * kV);
      }
      for (int m = 0; m < M; ++m) {
        for (int i = 0; i < kTogether; ++i) {
          total[m][first + i] = columns[i].added_to(total[m][first + i], x + m * row_stride + k);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int part = 0; part < B * kParts; ++part) sums[m][part] = total[m][part];
  }
}

template <typename T>
void quantize(const T* x, const Prepared<T>& memory, int64_t size, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = x + row * size;
    uint8_t* bytes = memory.bytes + row * memory.bytes_stride;
    Floats most = {}, poison = {};  // 0, or not a number if one of the row is not finite
    for (int64_t i = 0; i < size; i += kV) {
      const Floats value = load(from + i);
      most = larger(value < 0 ? -value : value, most);
      poison += value * 0.0f;
    }
    const float highest = largest(most);
    memory.scales[row] = highest / 127 + sum(poison);
    const float inverse = highest > 0 ? 127 / highest : 0;
    for (int64_t i = 0; i < size; i += kV) {
      const Floats shift = splat(12582912.0f);  // as in `exponential`: rounds to the nearest whole number
      const Floats whole = (load(from + i) * inverse + shift) - shift + 128;
      const Ints values = __builtin_convertvector(whole, Ints);
      for (int lane = 0; lane < kV; ++lane) bytes[i + lane] = static_cast<uint8_t>(values[lane]);
    }
  }
}

inline Floats activate(Floats gate, Activation activation) {
  if (activation == Activation::kSilu) return gate * sigmoid(gate);
  const Floats inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + hyperbolic_tangent(inner));
}

// Stores one vector of columns; the last ones of a row may be fewer.
template <typename Out, typename T>
inline void store_columns(Out* row, const T* residual, int64_t column, int64_t num_columns, Floats value) {
  const int64_t left = num_columns - column;
  if (left >= kV) {
    store(row + column, residual == nullptr ? value : value + load(residual + column));
    return;
  }
  for (int64_t i = 0; i < left && residual != nullptr; ++i) value[i] += load_one(residual + column + i);
  Out edge[kV];
  store(edge, value);
  for (int64_t i = 0; i < left; ++i) row[column + i] = edge[i];
}

#include "products/adapters_impl.h"

template <typename T>
inline void finish_row(const Product<T>& product, int64_t row, int64_t block, Floats* sums) {
  const PackedWeight<T>& weight = product.weight;
  const int64_t width = weight.num_outputs;
  if (product.shrunk != nullptr) add_update(product, row, block, sums);
  if (weight.bias != nullptr) {
    for (int part = 0; part < kParts; ++part) sums[part] += load(weight.bias + block * kColumns + part * kV);
  }
  if (weight.activation != Activation::kNone) {
    T* out = product.output + row * (width / 2) + block * (kColumns / 2);
    for (int part = 0; part < kParts / 2; ++part) {
      store(out + part * kV, activate(sums[part], weight.activation) * sums[part + kParts / 2]);
    }
    return;
  }
  for (int part = 0; part < kParts; ++part) {
    const int64_t column = block * kColumns + part * kV;
    if (column >= width) return;
    const Floats value = sums[part] * product.multiplier;
    if (product.float_output != nullptr) {
      store_columns(product.float_output + row * width, static_cast<T*>(nullptr), column, width, value);
    } else {
      const T* residual = product.residual == nullptr ? nullptr : product.residual + row * width;
      store_columns(product.output + row * width, residual, column, width, value);
    }
  }
}

// Outputs, from sums of whole numbers, in one vector of columns.
template <typename T>
inline Floats scaled(const Product<T>& product, int64_t row, int64_t column, Ints sums) {
  Ints offset;
  __builtin_memcpy(&offset, product.weight.offsets + column, sizeof offset);
  const Floats total = __builtin_convertvector(sums - offset, Floats);
  return total * (load(product.weight.scales + column) * product.scales[row]);
}

// M rows times B blocks.
template <int M, int B, typename T>
inline void multiply_blocks(const Product<T>& product, int64_t row, int64_t block) {
  const PackedWeight<T>& weight = product.weight;
  Floats sums[M][B * kParts];
  fetch_updates<M, B>(product, row, block);
  const int64_t num_inputs = weight.num_inputs, stride = num_inputs * kColumns;
  if (weight.bytes == nullptr) {
    const T* input = product.input + row * product.input_stride;
    multiply_tile<M, B>(input, product.input_stride, num_inputs, weight.data + block * stride, stride, sums);
  } else {
    Ints totals[M][B * kParts];
    const uint8_t* bytes = product.bytes + row * product.bytes_stride;
    multiply_tile<M, B>(bytes, product.bytes_stride, num_inputs, weight.bytes + block * stride, stride, totals);
    for (int part = 0; part < B * kParts; ++part) {
      const int64_t column = block * kColumns + part * kV;
      for (int m = 0; m < M; ++m) sums[m][part] = scaled(product, row + m, column, totals[m][part]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < B; ++b) finish_row(product, row + m, block + b, sums[m] + b * kParts);
  }
}

// The same for blocks [begin, end), B at once, and for those that are left over fewer at once.
template <int M, int B, typename T>
inline void multiply_rows(const Product<T>& product, int64_t row, int64_t begin, int64_t end) {
  for (; begin + B <= end; begin += B) multiply_blocks<M, B>(product, row, begin);
  if constexpr (B > 1) multiply_rows<M, B / 2>(product, row, begin, end);
}

// The rows that are left over, fewer than a tile: M of them or fewer.
template <int M, typename T>
inline void multiply_last_rows(const Product<T>& product, int64_t row, int64_t begin, int64_t end) {
  if constexpr (M > 0) {
    if (product.num_rows - row == M) {
      multiply_rows<M, blocks_at_once(M)>(product, row, begin, end);
    } else {
      multiply_last_rows<M - 1>(product, row, begin, end);
    }
  }
}

#if defined(TOKENYARD_PANELS)
#include "products/panels_impl.h"
#endif

#include "products/grouped_impl.h"

template <typename T>
void multiply(const Product<T>& product, int64_t begin, int64_t end) {
#if defined(TOKENYARD_EXPANDED)
  // Codes are multiplied as they are without: what is expanded here is weights of bf16.
  if (product.weight.grouped.data != nullptr) return avx512_kernels()->bf16.multiply(product, begin, end);
#elif defined(TOKENYARD_BYTES_ALONE)
  if (!product.weight.takes_bytes()) return avx2_kernels()->bf16.multiply(product, begin, end);
  if (product.weight.grouped.data != nullptr) return multiply_whole_inputs(product, begin, end);
#else
  if (product.weight.grouped.data != nullptr) return multiply_grouped(product, begin, end);
#endif
#if defined(TOKENYARD_PANELS) && !defined(TOKENYARD_BYTES_ALONE)
  if (product.weight.bytes == nullptr && product.num_rows > kTileRows) return multiply_in_panels(product, begin, end);
#endif
  if (product.num_rows < kTileRows) return multiply_last_rows<kTileRows - 1>(product, 0, begin, end);
  // Block by block: it stays in a near cache until the last row has read it.
  for (int64_t block = begin; block < end; ++block) {
    int64_t row = 0;
    for (; row + kTileRows <= product.num_rows; row += kTileRows) {
      multiply_rows<kTileRows, 1>(product, row, block, block + 1);
    }
    multiply_last_rows<kTileRows - 1>(product, row, block, block + 1);
  }
}
