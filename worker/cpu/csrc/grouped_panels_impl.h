// Grouped codes in panels: see panels_impl.h. Included by grouped_impl.h for instruction sets with vectors of eight.

// Adds what M rows have summed of a run to their totals.
template <int M, typename T>
inline void add_run_of_panel(const Product<T>& product, Panel& panel, const Run& run, int half, int64_t first_row,
                             int64_t row, const Floats (*sums)[kHalfParts], const Floats* scales,
                             const Floats* offsets) {
  const bool has_offsets = product.weight.grouped.offsets.data != nullptr;
  const float* inputs = has_offsets ? product.run_sums + run.index * product.num_rows + first_row + row : nullptr;
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int i = 0; i < kHalfParts; ++i) {
      const int part = half * kHalfParts + i;
      Floats& total = panel.totals[row + m][part];
      total = fused(scales[part], sums[m][i], total);
      if (has_offsets) total = fused(-offsets[part], splat(inputs[m]), total);
    }
  }
}

// Codes whose columns become floats, and rows as well.
template <class Codes, typename T>
struct CodePanels {
  static PanelRows fill(Panel& panel, const Product<T>& product, const Codes& codes, const uint8_t* data,
                        const KeptRuns& kept, int64_t first_row, int64_t num_rows) {
    for (int64_t k = 0; k < kept.size; k += Codes::kInputs, data += Codes::kInputs * Codes::kBytesPerInput) {
      Floats columns[Codes::kInputs][kParts];
      codes.read(data, columns);
#pragma GCC unroll 4
      for (int i = 0; i < Codes::kInputs; ++i) put_in_panel(panel, k + i, columns[i]);
    }
    const int64_t num_inputs = product.weight.num_inputs;
    const T* rows = product.input + first_row * num_inputs + kept.runs[0].first;
    return rows_of_panel(panel, rows, num_inputs, num_rows, kept.size);
  }

  template <int M>
  static void sum(Panel& panel, const PanelRows& rows, const Codes&, const Product<T>&, int64_t, const Run& run,
                  int64_t place, int half, int64_t row, Floats (*sums)[kHalfParts]) {
    for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = Floats{};
    add_products<M>(rows.first + row * rows.stride + place, rows.stride, panel.columns[half] + place, run.size, sums);
  }
};

// The next product is begun behind this sum: all products at once would leave no registers for sums.
inline __m256i in_register(__m256i sum) {
  asm volatile("" : "+x"(sum));
  return sum;
}

// Adds a few inputs of M rows times bytes of half a block: sums of pairs have room in 16 bits until the end.
template <int M>
[[gnu::noinline]] void add_short_sums(const uint8_t* x, int64_t stride, const uint8_t* columns, int64_t size,
                                      Ints (*totals)[kHalfParts]) {
  __m256i here[M][kHalfParts];
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

// Codes of 4 bits that are multiplied by whole inputs: rows are bytes already, and so are columns.
template <typename T>
struct CodePanels<ByteNibbles, T> {
  static constexpr int64_t kBytes = kColumns / 2;  // of an input, in half a block

  static uint8_t* columns(Panel& panel, int half) { return reinterpret_cast<uint8_t*>(panel.columns[half]); }

  static PanelRows fill(Panel& panel, const Product<T>&, const ByteNibbles& codes, const uint8_t* data,
                        const KeptRuns& kept, int64_t, int64_t) {
    for (int64_t k = 0; k < kept.size; k += ByteNibbles::kInputs, data += ByteNibbles::kInputs * ByteNibbles::kBytesPerInput) {
      Words found[1][kParts];
      codes.read(data, found);
      for (int part = 0; part < kParts; ++part) {
        uint8_t* to = columns(panel, part / kHalfParts) + k * kBytes + part % kHalfParts * sizeof(Words);
        __builtin_memcpy(to, &found[0][part], sizeof(Words));
      }
    }
    return {};
  }

  template <int M>
  static void sum(Panel& panel, const PanelRows&, const ByteNibbles& codes, const Product<T>& product,
                  int64_t first_row, const Run& run, int64_t place, int half, int64_t row, Floats (*sums)[kHalfParts]) {
    const int64_t num_inputs = product.weight.num_inputs, first = run.index * product.num_rows + first_row + row;
    const uint8_t* x = product.bytes + (first_row + row) * num_inputs + run.first;
    const uint8_t* from = columns(panel, half) + place * kBytes;
    Ints totals[M][kHalfParts];
    for (int m = 0; m < M; ++m) totals[m][0] = totals[m][1] = ByteNibbles::begin(product, first + m);
    for (int64_t k = 0; k < run.size; k += codes.inputs_at_once) {
      const int64_t left = run.size - k, size = left < codes.inputs_at_once ? left : codes.inputs_at_once;
      add_short_sums<M>(x + k, num_inputs, from + k * kBytes, size, totals);
    }
    for (int m = 0; m < M; ++m) {
      const float zero = ByteNibbles::zero(product, first + m);
      for (int i = 0; i < kHalfParts; ++i) sums[m][i] = ByteNibbles::end(totals[m][i], zero);
    }
  }
};

template <class Codes, typename T>
inline void multiply_codes_in_panels(const Product<T>& product, const Codes& codes, int64_t begin, int64_t end) {
  using Panels = CodePanels<Codes, T>;
  const PackedWeight<T>& weight = product.weight;
  const auto finish = [&](int64_t row, Floats* totals) { Codes::finish(product, row, totals); };
  for_panels(product, begin, end, finish, [&](Panel& panel, int64_t block, int64_t first_row, int64_t num_rows) {
    const uint8_t* const data = weight.grouped.data + block * weight.num_inputs * Codes::kBytesPerInput;
    for_some_runs(weight, block, [&](const KeptRuns& kept) {
      const int64_t first = kept.runs[0].first;
      const uint8_t* const from = data + first * Codes::kBytesPerInput;
      const PanelRows rows = Panels::fill(panel, product, codes, from, kept, first_row, num_rows);
      const int64_t num_bytes = kept.size * Codes::kBytesPerInput;
      for_tiles(num_rows, from + num_bytes, num_bytes, [&]<int M>(int half, int64_t row) {
        kept.for_each([&](const Run& run, const Floats* scales, const Floats* offsets) {
          Floats sums[M][kHalfParts];
          Panels::template sum<M>(panel, rows, codes, product, first_row, run, run.first - first, half, row, sums);
          add_run_of_panel<M>(product, panel, run, half, first_row, row, sums, scales, offsets);
        });
      });
    });
  });
}
