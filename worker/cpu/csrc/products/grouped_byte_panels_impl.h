// Codes times whole inputs in panels: rows are bytes already, and so are columns. Included by grouped_panels_impl.h.

#if defined(TOKENYARD_BYTE_DOT)
// Adds some inputs of M rows times a slice of bytes to their sums.
template <int M, class Codes>
inline void add_byte_products(const Codes&, const uint8_t* x, int64_t stride, const uint8_t* columns, int64_t size,
                              Ints (*totals)[kSliceParts]) {
  Ints here[M][kSliceParts];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) here[m][0] = totals[m][0], here[m][1] = totals[m][1];
#pragma GCC unroll 2
  for (int64_t k = 0; k < size; k += 4, columns += 2 * sizeof(Words)) {
    const Words a = (Words)load_bits(columns), b = (Words)load_bits(columns + sizeof(Words));
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const Words four = (Words)splat(four_of(x + m * stride + k));
      here[m][0] = with_byte_products(here[m][0], a, four);
      here[m][1] = with_byte_products(here[m][1], b, four);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) totals[m][0] = here[m][0], totals[m][1] = here[m][1];
}
#else
// The next product is begun behind this sum: all products at once would leave no registers for sums.
inline __m256i in_register(__m256i sum) {
  asm volatile("" : "+x"(sum));
  return sum;
}

// Adds a few inputs of M rows times bytes of a slice: sums of pairs have room in 16 bits until the end.
template <int M>
[[gnu::noinline]] void add_short_sums(const uint8_t* x, int64_t stride, const uint8_t* columns, int64_t size,
                                      Ints (*totals)[kSliceParts]) {
  __m256i here[M][kSliceParts];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) here[m][0] = here[m][1] = _mm256_setzero_si256();
  for (int64_t k = 0; k < size; k += 4, columns += 2 * sizeof(Words)) {
    const __m256i a = load_bits(columns), b = load_bits(columns + sizeof(Words));
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m256i four = _mm256_set1_epi32(four_of(x + m * stride + k));
      here[m][0] = in_register(_mm256_add_epi16(here[m][0], _mm256_maddubs_epi16(a, four)));
      here[m][1] = in_register(_mm256_add_epi16(here[m][1], _mm256_maddubs_epi16(b, four)));
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    totals[m][0] += (Ints)_mm256_madd_epi16(here[m][0], _mm256_set1_epi16(1));
    totals[m][1] += (Ints)_mm256_madd_epi16(here[m][1], _mm256_set1_epi16(1));
  }
}

// Adds some inputs of M rows times a slice of bytes to their sums, as many at once as have room.
template <int M, class Codes>
inline void add_byte_products(const Codes& codes, const uint8_t* x, int64_t stride, const uint8_t* columns, int64_t size,
                              Ints (*totals)[kSliceParts]) {
  for (int64_t k = 0; k < size; k += codes.inputs_at_once) {
    const int64_t left = size - k, here = left < codes.inputs_at_once ? left : codes.inputs_at_once;
    add_short_sums<M>(x + k, stride, columns + k * kSliceColumns, here, totals);
  }
}
#endif

template <class Codes, typename T>
  requires(sizeof(typename Codes::Input) == 1)
struct CodePanels<Codes, T> {
  static uint8_t* columns(Panel& panel, int slice) { return reinterpret_cast<uint8_t*>(panel.columns[slice]); }

  static PanelRows fill(Panel& panel, const Product<T>&, const Codes& codes, const uint8_t* data, const KeptRuns& kept,
                        int64_t, int64_t) {
    for (int64_t k = 0; k < kept.size; k += Codes::kInputs, data += Codes::kInputs * Codes::kBytesPerInput) {
      Words found[1][kParts];
      codes.read(data, found);
      for (int part = 0; part < kParts; ++part) {
        uint8_t* to = columns(panel, part / kSliceParts) + k * kSliceColumns + part % kSliceParts * sizeof(Words);
        __builtin_memcpy(to, &found[0][part], sizeof(Words));
      }
    }
    return {};
  }

  template <int M>
  static void sum(Panel& panel, const PanelRows&, const Codes& codes, const Product<T>& product, int64_t first_row,
                  const Run& run, int64_t place, int slice, int64_t row, Floats (*sums)[kSliceParts]) {
    const int64_t stride = product.bytes_stride, first = run.index * product.num_rows + first_row + row;
    const uint8_t* x = product.bytes + (first_row + row) * stride + run.first;
    Ints totals[M][kSliceParts];
    for (int m = 0; m < M; ++m) totals[m][0] = totals[m][1] = Codes::begin(product, first + m);
    add_byte_products<M>(codes, x, stride, columns(panel, slice) + place * kSliceColumns, run.size, totals);
    for (int m = 0; m < M; ++m) {
      const float zero = Codes::zero(product, first + m);
      for (int i = 0; i < kSliceParts; ++i) sums[m][i] = Codes::end(totals[m][i], zero);
    }
  }
};
