// Updates of a product by adapters, one for each row: a few ranks of the input, then as many columns more.
//
// Included by products_impl.h, once for each instruction set. A row's sums are in one order, whatever adapters
// its neighbours have; a row without an adapter is not touched.
//
// Source: S-LoRA, arXiv:2311.03285, and Punica, arXiv:2310.18547, for the two phases.

// Sums of a row's input times N ranks of `down`.
template <int N, typename T>
inline void dot_ranks(const T* x, const T* down, int64_t size, float* sums) {
  Floats totals[N] = {};
  for (int64_t k = 0; k < size; k += kV) {
    const Floats value = load(x + k);
    for (int rank = 0; rank < N; ++rank) totals[rank] += value * load(down + rank * size + k);
  }
  for (int rank = 0; rank < N; ++rank) sums[rank] = sum(totals[rank]);
}

#if defined(TOKENYARD_BF16_DOT)
template <int N>
inline void dot_ranks(const Bf16* x, const Bf16* down, int64_t size, float* sums) {
  __m512 totals[N] = {};
  int64_t k = 0;
  for (; k + 2 * kV <= size; k += 2 * kV) {
    const __m512bh value = (__m512bh)_mm512_loadu_si512(x + k);
    for (int rank = 0; rank < N; ++rank) {
      totals[rank] = _mm512_dpbf16_ps(totals[rank], value, (__m512bh)_mm512_loadu_si512(down + rank * size + k));
    }
  }
  for (int rank = 0; rank < N; ++rank) {
    Floats total = (Floats)totals[rank];
    if (k < size) total += load(x + k) * load(down + rank * size + k);
    sums[rank] = sum(total);
  }
}
#endif

// Items of a product, each of a row and `kRanksTogether` of its ranks.
template <typename T>
void shrink(const Product<T>& product, float* shrunk, int64_t begin, int64_t end) {
  const PackedWeight<T>& weight = product.weight;
  const Adapters<T>& adapters = *weight.adapters;
  const int64_t items = shrink_items(weight), size = weight.num_inputs;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / items, first = item % items * kRanksTogether;
    const int32_t slot = adapters.step->slots[row];
    if (slot < 0 || first >= adapters.slots[slot].num_ranks) continue;
    const AdapterSlot<T>& adapter = adapters.slots[slot];
    const int64_t left = adapter.num_ranks - first;
    const T* x = product.input + row * size;
    const T* down = adapter.down + first * size;
    float* out = shrunk + row * adapters.max_ranks + first;
    float sums[kRanksTogether];
    if (left >= kRanksTogether) {
      dot_ranks<kRanksTogether>(x, down, size, sums);
    } else {
      for (int64_t rank = 0; rank < left; ++rank) dot_ranks<1>(x, down + rank * size, size, sums + rank);
    }
    for (int64_t rank = 0; rank < left && rank < kRanksTogether; ++rank) out[rank] = sums[rank] * adapter.scales[first + rank];
  }
}

// Asks for the numbers that `add_update` will read, which are too few in a row for the processor to foresee: they
// come while M rows are multiplied by B blocks.
template <int M, int B, typename T>
inline void fetch_updates(const Product<T>& product, int64_t row, int64_t block) {
  if (product.shrunk == nullptr) return;
  constexpr int kUnits = kColumns / kUnitColumns;
  const Adapters<T>& adapters = *product.weight.adapters;
  for (int m = 0; m < M; ++m) {
    const int32_t slot = adapters.step->slots[row + m];
    if (slot < 0 || adapters.slots[slot].down == nullptr) continue;
    const AdapterSlot<T>& adapter = adapters.slots[slot];
    for (int64_t unit = block * kUnits; unit < (block + B) * kUnits; ++unit) {
      const AdapterUnit& of_unit = adapter.units[unit];
      const T* up = adapter.up + of_unit.offset;
      const T* end = up + (of_unit.end - of_unit.begin) * kUnitColumns;
      for (; up < end; up += 64 / sizeof(T)) __builtin_prefetch(up);
    }
  }
}

// Adds the update of one row to the sums of one block.
template <typename T>
inline void add_update(const Product<T>& product, int64_t row, int64_t block, Floats* sums) {
  constexpr int kUnits = kColumns / kUnitColumns, kParts = kUnitColumns / kV;
  const Adapters<T>& adapters = *product.weight.adapters;
  const int32_t slot = adapters.step->slots[row];
  if (slot < 0 || adapters.slots[slot].down == nullptr) return;
  const AdapterSlot<T>& adapter = adapters.slots[slot];
  const float* shrunk = product.shrunk + row * adapters.max_ranks;
  for (int unit = 0; unit < kUnits; ++unit) {
    const AdapterUnit& of_unit = adapter.units[block * kUnits + unit];
    const T* up = adapter.up + of_unit.offset;
    Floats even[kParts] = {}, odd[kParts] = {};  // two chains, since each sum waits for the one before
    int64_t rank = of_unit.begin;
    for (; rank + 2 <= of_unit.end; rank += 2, up += 2 * kUnitColumns) {
      for (int part = 0; part < kParts; ++part) {
        even[part] += splat(shrunk[rank]) * load(up + part * kV);
        odd[part] += splat(shrunk[rank + 1]) * load(up + kUnitColumns + part * kV);
      }
    }
    for (int part = 0; part < kParts; ++part) {
      if (rank < of_unit.end) even[part] += splat(shrunk[rank]) * load(up + part * kV);
      sums[unit * kParts + part] += even[part] + odd[part];
    }
  }
}
