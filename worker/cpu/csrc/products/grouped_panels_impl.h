// Grouped codes in panels: see panels_impl.h. Included by grouped_impl.h for instruction sets without products of bf16.

// Adds what M rows have summed of a run to their totals.
template <int M, typename T>
inline void add_run_of_panel(const Product<T>& product, Panel& panel, const Run& run, int slice, int64_t first_row,
                             int64_t row, const Floats (*sums)[kSliceParts], const Floats* scales,
                             const Floats* offsets) {
  const bool has_offsets = product.weight.grouped.offsets.data != nullptr;
  const float* inputs = has_offsets ? product.run_sums + run.index * product.num_rows + first_row + row : nullptr;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int i = 0; i < kSliceParts; ++i) {
      const int part = slice * kSliceParts + i;
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
    const T* rows = product.input + first_row * product.input_stride + kept.runs[0].first;
    return rows_of_panel(panel, rows, product.input_stride, num_rows, kept.size);
  }

  template <int M>
  static void sum(Panel& panel, const PanelRows& rows, const Codes&, const Product<T>&, int64_t, const Run& run,
                  int64_t place, int slice, int64_t row, Floats (*sums)[kSliceParts]) {
    for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = Floats{};
    add_products<M>(rows.first + row * rows.stride + place, rows.stride, panel.columns[slice] + place, run.size, sums);
  }
};

#if TOKENYARD_LANES == 8
#include "products/grouped_byte_panels_impl.h"
#endif

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
      for_tiles(num_rows, from + num_bytes, num_bytes, [&]<int M>(int slice, int64_t row) {
        kept.for_each([&](const Run& run, const Floats* scales, const Floats* offsets) {
          Floats sums[M][kSliceParts];
          Panels::template sum<M>(panel, rows, codes, product, first_row, run, run.first - first, slice, row, sums);
          add_run_of_panel<M>(product, panel, run, slice, first_row, row, sums, scales, offsets);
        });
      });
    });
  });
}
