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

// Numbers of kAll vectors, in whatever form, which is asked for once. `place` and `unit_place` say where a vector's are.
template <int kAll, class Place, class UnitPlace>
inline void load_numbers(const GroupNumbers& numbers, const Place& place, const UnitPlace& unit_place, Floats* found) {
  const auto load_all = [&](const auto& load_at) {
    for (int i = 0; i < kAll; ++i) found[i] = load_at(i);
  };
  const auto bytes = [&](int i) { return load_bytes(static_cast<const int8_t*>(numbers.data) + place(i)); };
  switch (numbers.form) {
    case NumberForm::kFloat: return load_all([&](int i) { return load(static_cast<const float*>(numbers.data) + place(i)); });
    case NumberForm::kHalf: return load_all([&](int i) { return load_half(static_cast<const uint16_t*>(numbers.data) + place(i)); });
    case NumberForm::kBf16: return load_all([&](int i) { return load(static_cast<const Bf16*>(numbers.data) + place(i)); });
    case NumberForm::kBytes: return load_all([&](int i) { return bytes(i) * load_half(numbers.units + unit_place(i)); });
    case NumberForm::kTimesScale: return load_all(bytes);
  }
}

// Scales and offsets of all columns of B blocks, in whatever form. A function of its own: inlined where they are used,
// its branches would be compiled into each loop.
template <int B, typename T>
[[gnu::noinline]] void load_any_scales(const PackedWeight<T>& weight, int64_t first_place, int64_t first_unit,
                                       Floats (*found)[B * kParts]) {
  const GroupedCodes& grouped = weight.grouped;
  const int64_t stride = weight.num_inputs / grouped.group_size * kColumns;
  const int64_t unit_stride = weight.num_inputs / kUnitInputs * kColumns;
  const auto place = [&](int i) { return first_place + i / kParts * stride + i % kParts * kV; };
  const auto unit_place = [&](int i) { return first_unit + i / kParts * unit_stride + i % kParts * kV; };
  load_numbers<B * kParts>(grouped.scales, place, unit_place, found[0]);
  if (grouped.offsets.data == nullptr) return;
  load_numbers<B * kParts>(grouped.offsets, place, unit_place, found[1]);
  if (grouped.offsets.form != NumberForm::kTimesScale) return;
  for (int i = 0; i < B * kParts; ++i) found[1][i] *= found[0][i];
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
