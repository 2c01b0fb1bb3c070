// Runs of inputs in their order, with scales and offsets: loaded as they come, or kept for several tiles of rows.
//
// Included by grouped_impl.h.

// Where a run is, and the scales and offsets of its columns in the first of some blocks.
struct Run {
  int64_t index;
  int64_t first;  // of K
  int64_t size;
  int64_t place;       // of its scales
  int64_t unit_place;  // of their units
};

inline Floats load_numbers(const GroupNumbers& numbers, int64_t place, int64_t unit_place) {
  if (numbers.form == NumberForm::kHalf) return load_half(static_cast<const uint16_t*>(numbers.data) + place);
  switch (numbers.form) {
    case NumberForm::kFloat: return load(static_cast<const float*>(numbers.data) + place);
    case NumberForm::kBf16: return load(static_cast<const Bf16*>(numbers.data) + place);
    case NumberForm::kBytes:
      return load_bytes(static_cast<const int8_t*>(numbers.data) + place) * load_half(numbers.units + unit_place);
    case NumberForm::kHalf:
    case NumberForm::kTimesScale: break;
  }
  return load_bytes(static_cast<const int8_t*>(numbers.data) + place);
}

template <typename T, class Work>
inline void for_each_run(const PackedWeight<T>& weight, int64_t block, const Work& work) {
  const GroupedCodes& grouped = weight.grouped;
  const int64_t num_groups = weight.num_inputs / grouped.group_size;
  const int64_t num_units = weight.num_inputs / kUnitInputs;
  int64_t index = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t place = (block * num_groups + group) * kColumns;
    const int64_t unit_place = (block * num_units + group * grouped.group_size / kUnitInputs) * kColumns;
    for (int64_t first = 0; first < grouped.group_size; first += kRunInputs, ++index) {
      const int64_t left = grouped.group_size - first;
      work(Run{index, group * grouped.group_size + first, left < kRunInputs ? left : kRunInputs, place, unit_place});
    }
  }
}

// Scales and offsets of all columns of B blocks, in whatever form. A function of its own: inlined where they are used,
// its branches would be compiled into each loop.
template <int B, typename T>
[[gnu::noinline]] void load_any_scales(const PackedWeight<T>& weight, int64_t first_place, int64_t first_unit,
                                       Floats (*found)[B * kParts]) {
  const GroupedCodes& grouped = weight.grouped;
  if (grouped.scales.form == NumberForm::kBytes && grouped.offsets.data == nullptr) {  // the output layer of many files
    const int8_t* multiples = static_cast<const int8_t*>(grouped.scales.data);
    const int64_t num_groups = weight.num_inputs / grouped.group_size, num_units = weight.num_inputs / kUnitInputs;
    for (int b = 0; b < B; ++b) {
      const int64_t place = first_place + b * num_groups * kColumns, unit = first_unit + b * num_units * kColumns;
      for (int part = 0; part < kParts; ++part) {
        found[0][b * kParts + part] = load_bytes(multiples + place + part * kV) * load_half(grouped.scales.units + unit + part * kV);
      }
    }
    return;
  }
  for (int i = 0; i < B * kParts; ++i) {
    const int64_t block = i / kParts, column = i % kParts * kV;
    const int64_t place = first_place + block * (weight.num_inputs / grouped.group_size * kColumns) + column;
    const int64_t unit = first_unit + block * (weight.num_inputs / kUnitInputs * kColumns) + column;
    found[0][i] = load_numbers(grouped.scales, place, unit);
    if (grouped.offsets.data == nullptr) continue;
    found[1][i] = load_numbers(grouped.offsets, place, unit);
    if (grouped.offsets.form == NumberForm::kTimesScale) found[1][i] *= found[0][i];
  }
}

// The same; those of most checkpoints come straight into registers: scales of 16 bits, and bytes that are offsets in them.
template <int B, typename T>
inline void load_scales(const PackedWeight<T>& weight, const Run& run, Floats* scales, Floats* offsets) {
  const GroupedCodes& grouped = weight.grouped;
  const bool is_half = grouped.scales.form == NumberForm::kHalf, has_offsets = grouped.offsets.data != nullptr;
  const bool are_short = is_half || grouped.scales.form == NumberForm::kBf16;
  if (!are_short || (has_offsets && grouped.offsets.form != NumberForm::kTimesScale)) {
    Floats found[2][B * kParts] = {};
    load_any_scales<B>(weight, run.place, run.unit_place, found);
#pragma GCC unroll 32
    for (int i = 0; i < B * kParts; ++i) scales[i] = found[0][i], offsets[i] = found[1][i];
    return;
  }
  const int64_t stride = weight.num_inputs / grouped.group_size * kColumns;
  const auto place = [&](int i) { return run.place + i / kParts * stride + i % kParts * kV; };
  if (is_half) {
    const uint16_t* halves = static_cast<const uint16_t*>(grouped.scales.data);
#pragma GCC unroll 32
    for (int i = 0; i < B * kParts; ++i) scales[i] = load_half(halves + place(i));
  } else {
    const Bf16* numbers = static_cast<const Bf16*>(grouped.scales.data);
#pragma GCC unroll 32
    for (int i = 0; i < B * kParts; ++i) scales[i] = load(numbers + place(i));
  }
  if (!has_offsets) return;
  const int8_t* multiples = static_cast<const int8_t*>(grouped.offsets.data);
#pragma GCC unroll 32
  for (int i = 0; i < B * kParts; ++i) offsets[i] = load_bytes(multiples + place(i)) * scales[i];
}

// All runs of B blocks, whose scales are loaded as they come.
template <int B, typename T>
struct AllRuns {
  const PackedWeight<T>& weight;
  int64_t block;

  template <class Work>
  void for_each(const Work& work) const {
    for_each_run(weight, block, [&](const Run& run) {
      Floats scales[B * kParts], offsets[B * kParts];
      load_scales<B>(weight, run, scales, offsets);
      work(run, scales, offsets);
    });
  }
};

// Consecutive runs of a block with their scales: as many as columns are decoded at once.
struct KeptRuns {
  static constexpr int kMost = kSharedInputs / 16;
  Run runs[kMost];
  Floats scales[kMost][kParts];
  Floats offsets[kMost][kParts];  // written where there are some
  int64_t size = 0;                   // inputs
  int count = 0;

  template <class Work>
  void for_each(const Work& work) const {
    for (int i = 0; i < count; ++i) work(runs[i], scales[i], offsets[i]);
  }
};

// Does `work` for all runs, some at a time, in their order.
template <typename T, class Work>
inline void for_some_runs(const PackedWeight<T>& weight, int64_t block, const Work& work) {
  KeptRuns kept;
  for_each_run(weight, block, [&](const Run& run) {
    if (kept.size + run.size > kSharedInputs) {
      work(kept);
      kept.size = kept.count = 0;
    }
    kept.runs[kept.count] = run;
    load_scales<1>(weight, run, kept.scales[kept.count], kept.offsets[kept.count]);
    kept.size += run.size;
    ++kept.count;
  });
  work(kept);
}
