// Products of many rows as multiply-adds of floats: columns become floats in the nearest cache, and two vectors of them are
// multiplied at a time by as many rows as have registers for their sums.
//
// Included by products_impl.h for instruction sets without products of bf16, or with slow ones. Each output is summed as it
// is for few rows.

constexpr int kPanelRows = 96;                 // that share columns
constexpr int kPanelTile = kV == 16 ? 12 : 6;  // rows whose sums with a slice have registers
constexpr int kSliceParts = 2;
constexpr int kSlices = kParts / kSliceParts;  // of a block
constexpr int kSliceColumns = kColumns / kSlices;
constexpr int64_t kPanelInputs = kRunInputs;
constexpr int64_t kDenseInputs = 128;  // at once: their panel leaves room in the nearest cache

using Slice = float[kSliceColumns];

struct Panel {
  alignas(64) Slice columns[kSlices][kPanelInputs];
  alignas(64) float rows[kPanelRows][kPanelInputs];
  Floats totals[kPanelRows][kParts];
};

// Too large for the stacks that some systems give to threads. Not inline: the linker would make one of all libraries'.
[[gnu::noinline]] static Panel& own_panel() {
  thread_local Panel panel;
  return panel;
}

// Rows of some inputs as floats.
struct PanelRows {
  const float* first;
  int64_t stride;
};

inline PanelRows rows_of_panel(Panel&, const float* x, int64_t row_stride, int64_t, int64_t) { return {x, row_stride}; }

inline PanelRows rows_of_panel(Panel& panel, const Bf16* x, int64_t row_stride, int64_t num_rows, int64_t size) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t k = 0; k < size; k += kV) store(panel.rows[row] + k, load(x + row * row_stride + k));
  }
  return {panel.rows[0], kPanelInputs};
}

inline void put_in_panel(Panel& panel, int64_t k, const Floats* parts) {
  for (int part = 0; part < kParts; ++part) store(panel.columns[part / kSliceParts][k] + part % kSliceParts * kV, parts[part]);
}

inline void fill_panel(Panel& panel, const float* weight, int64_t size) {
  for (int64_t k = 0; k < size; ++k, weight += kColumns) {
    Floats parts[kParts];
    for (int part = 0; part < kParts; ++part) parts[part] = load(weight + part * kV);
    put_in_panel(panel, k, parts);
  }
}

inline void fill_panel(Panel& panel, const Bf16* weight, int64_t size) {
  for (int64_t k = 0; k < size; k += 2, weight += 2 * kColumns) {
    Floats even[kParts], odd[kParts];
    for (int part = 0; part < kParts; ++part) {
      Words pairs;
      __builtin_memcpy(&pairs, weight + part * 2 * kV, sizeof pairs);
      even[part] = (Floats)(pairs << 16), odd[part] = (Floats)(pairs & 0xffff0000u);
    }
    put_in_panel(panel, k, even);
    put_in_panel(panel, k + 1, odd);
  }
}

// Adds some inputs of M rows times a slice to their sums, in the order of K.
template <int M>
inline void add_products(const float* x, int64_t stride, const Slice* columns, int64_t size,
                         Floats (*sums)[kSliceParts]) {
  Floats here[M][kSliceParts];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) here[m][0] = sums[m][0], here[m][1] = sums[m][1];
#pragma GCC unroll 4
  for (int64_t k = 0; k < size; ++k) {
    const Floats a = load(columns[k]), b = load(columns[k] + kV);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const Floats value = splat(x[m * stride + k]);
      here[m][0] = fused(value, a, here[m][0]);
      here[m][1] = fused(value, b, here[m][1]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) sums[m][0] = here[m][0], sums[m][1] = here[m][1];
}

template <int M, class Work>
inline void call_with_rows(int64_t num_rows, const Work& work) {
  if constexpr (M > 1) {
    if (num_rows < M) return call_with_rows<M - 1>(num_rows, work);
  }
  work.template operator()<M>();
}

// Calls `work` for all slices of a panel with each tile's first row. Tiles are as equal as can be: two of four rows, not
// one of six and one of two. `next` is what the panel after this is made of: it is on its way while these are
// multiplied, a share for each tile, since all at once would have to wait for one another.
template <class Work>
inline void for_tiles(int64_t num_rows, const uint8_t* next, int64_t num_bytes, const Work& work) {
  const int64_t num_tiles = (num_rows + kPanelTile - 1) / kPanelTile;
  const int64_t size = num_rows / num_tiles, num_larger = num_rows % num_tiles;
  const int64_t share = num_bytes / (kSlices * num_tiles) + 1;
  for (int slice = 0; slice < kSlices; ++slice) {
    for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
      for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i, 0, 2);
      next += share;
      const int64_t here = size + (tile < num_larger ? 1 : 0);
      call_with_rows<kPanelTile>(here, [&]<int M>() { work.template operator()<M>(slice, row); });
      row += here;
    }
  }
}

// Calls `work` for every block with each of the passes that its rows are cut into, and finishes what it has summed.
template <typename T, class Finish, class Work>
inline void for_panels(const Product<T>& product, int64_t begin, int64_t end, const Finish& finish, const Work& work) {
  Panel& panel = own_panel();
  const int64_t num_passes = (product.num_rows + kPanelRows - 1) / kPanelRows;
  for (int64_t block = begin; block < end; ++block) {
    for (int64_t pass = 0; pass < num_passes; ++pass) {
      const int64_t first = product.num_rows * pass / num_passes;
      const int64_t num_rows = product.num_rows * (pass + 1) / num_passes - first;
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int part = 0; part < kParts; ++part) panel.totals[row][part] = Floats{};
      }
      work(panel, block, first, num_rows);
      for (int64_t row = 0; row < num_rows; ++row) {
        finish(first + row, panel.totals[row]);
        finish_row(product, first + row, block, panel.totals[row]);
      }
    }
  }
}

template <typename T>
void multiply_in_panels(const Product<T>& product, int64_t begin, int64_t end) {
  const int64_t num_inputs = product.weight.num_inputs;
  const auto finish = [](int64_t, Floats*) {};
  for_panels(product, begin, end, finish, [&](Panel& panel, int64_t block, int64_t first_row, int64_t num_rows) {
    for (int64_t first = 0; first < num_inputs; first += kDenseInputs) {
      const int64_t left = num_inputs - first, size = left < kDenseInputs ? left : kDenseInputs;
      const T* const weight = product.weight.data + (block * num_inputs + first) * kColumns;
      fill_panel(panel, weight, size);
      const T* const from = product.input + first_row * product.input_stride + first;
      const PanelRows rows = rows_of_panel(panel, from, product.input_stride, num_rows, size);
      const uint8_t* next = reinterpret_cast<const uint8_t*>(weight + size * kColumns);
      for_tiles(num_rows, next, size * kColumns * static_cast<int64_t>(sizeof(T)), [&]<int M>(int slice, int64_t row) {
        Floats sums[M][kSliceParts];
        for (int m = 0; m < M; ++m) {
          for (int i = 0; i < kSliceParts; ++i) sums[m][i] = panel.totals[row + m][slice * kSliceParts + i];
        }
        add_products<M>(rows.first + row * rows.stride, rows.stride, panel.columns[slice], size, sums);
        for (int m = 0; m < M; ++m) {
          for (int i = 0; i < kSliceParts; ++i) panel.totals[row + m][slice * kSliceParts + i] = sums[m][i];
        }
      });
    }
  });
}
