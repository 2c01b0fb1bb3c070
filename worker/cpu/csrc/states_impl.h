// Convolutions and recurrences that continue the sequences of a step, one token after the other.
//
// Included by kernels_impl.h, once for each instruction set. A sequence's state is cut into rows, and its inputs of a
// convolution into channels; nothing is summed over a cut. So every sum is the same however a prompt is cut and however
// many threads share the work.

inline uint8_t* place_of(const StateStep& step, int64_t seq, const StateRun& run) {
  return step.pool + step.block_ids[seq * step.num_stripes + run.stripe] * step.block_bytes + run.offset;
}

// The run that has an item; runs are in the order of items.
inline const StateRun& run_of(const StateRun* runs, int64_t item) {
  while (item >= runs->first + runs->length) ++runs;
  return *runs;
}

// kV channels of one sequence, each with its earlier columns, which stay in registers where kColumns is not 0.
template <int kColumns, typename T>
inline void convolve_some(const Convolution<T>& given, int64_t seq, int64_t channel) {
  const StateStep& step = given.step;
  const int64_t num_columns = kColumns != 0 ? kColumns : given.num_columns;
  const StateRun& run = run_of(given.runs, channel);
  T* kept = reinterpret_cast<T*>(place_of(step, seq, run)) + (channel - run.first);
  constexpr int kMost = kColumns != 0 ? kColumns : kMostColumns;
  Floats earlier[kMost] = {}, weights[kMost + 1];
  if (!step.is_first[seq]) {
    for (int64_t j = 0; j < num_columns; ++j) earlier[j] = load(kept + j * run.length);
  }
  for (int64_t j = 0; j <= num_columns; ++j) weights[j] = load(given.weight + j * given.num_channels + channel);
  const Floats bias = given.bias == nullptr ? Floats{} : load(given.bias + channel);
  for (int64_t t = step.query_starts[seq]; t < step.query_starts[seq + 1]; ++t) {
    const Floats now = load(given.input + t * given.input_stride + channel);
    Floats total = bias;
    for (int64_t j = 0; j < num_columns; ++j) total = fused(weights[j], earlier[j], total);
    total = fused(weights[num_columns], now, total);
    T* out = given.output + t * given.num_channels + channel;
    store(out, total);
    if (given.is_activated) {  // of what the model would have rounded before
      const Floats rounded = load(out);
      store(out, rounded * sigmoid(rounded));
    }
    for (int64_t j = 1; j < num_columns; ++j) earlier[j - 1] = earlier[j];
    if (num_columns != 0) earlier[num_columns - 1] = now;
  }
  if (!step.keeps_states) return;
  for (int64_t j = 0; j < num_columns; ++j) store(kept + j * run.length, earlier[j]);
}

template <int kColumns, typename T>
inline void convolve_items(const Convolution<T>& given, int64_t begin, int64_t end) {
  const int64_t num_parts = given.num_parts();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % num_parts * kChannelsTogether, last = first + kChannelsTogether;
    for (int64_t channel = first; channel < last; channel += kV) convolve_some<kColumns>(given, item / num_parts, channel);
  }
}

template <typename T>
void convolve(const Convolution<T>& given, int64_t begin, int64_t end) {
  constexpr int kUsual = 3;  // of nearly all families
  if (given.num_columns == kUsual) {
    convolve_items<kUsual>(given, begin, end);
  } else {
    convolve_items<0>(given, begin, end);
  }
}

// Keys or queries of groups [begin, end) of all T * G as floats, of length one where the recurrence asks for it.
template <typename T>
inline void unite(const Recurrence<T>& given, const T* from, int64_t stride, float scaling, float* to, int64_t begin,
                  int64_t end) {
  const int64_t dim = given.key_dim;
  for (int64_t item = begin; item < end; ++item) {
    const T* x = from + item / given.num_groups * stride + item % given.num_groups * dim;
    float* out = to + item * dim;
    float factor = scaling;
    if (given.has_unit_keys) {
      Floats squares = {};
      for (int64_t i = 0; i < dim; i += kV) squares = fused(load(x + i), load(x + i), squares);
      factor = scaling / __builtin_sqrtf(sum(squares) + kLengthEpsilon);
    }
    for (int64_t i = 0; i < dim; i += kV) store(out + i, load(x + i) * factor);
  }
}

template <typename T>
void prepare_heads(const Recurrence<T>& given, const HeadsOfTokens& heads, int64_t begin, int64_t end) {
  unite(given, given.keys, given.key_stride, 1, heads.keys, begin, end);
  unite(given, given.queries, given.query_stride, given.scaling, heads.queries, begin, end);
  const int64_t num_decays = given.num_heads / given.num_groups * (given.decays_by_number ? given.key_dim : 1);
  int64_t i = begin * num_decays;
  for (; i + kV <= end * num_decays; i += kV) store(heads.decays + i, exponential(load(given.log_decay + i)));
  for (; i < end * num_decays; ++i) heads.decays[i] = exponential(splat(given.log_decay[i]))[0];
}

constexpr int64_t kUsualKey = 128;

// What one token brings to one head.
struct HeadInputs {
  const float* key;
  const float* query;
  const float* decay;  // one number, or one for each of the key
  const float* beta;   // null: no delta rule
};

// One token's change of M rows of a state [M][K], and what it reads: M numbers. Row by row, so that memory is read and
// written in its order. Keys are of N vectors, which stay in registers meanwhile, or with 0 of any number.
template <int M, int N, bool kByNumber>
inline void advance(float* const* rows, const HeadInputs& head, int64_t dim, const float* values, float* out) {
  constexpr int kKept = N != 0 ? N : 1;
  const int64_t num_vectors = N != 0 ? N : dim / kV;
  const Floats whole = splat(*head.decay);
  const auto decay_of = [&](int64_t i) { return kByNumber ? load(head.decay + i * kV) : whole; };
  Floats kept_keys[kKept], kept_queries[kKept], kept_faded[kKept];
  if constexpr (N != 0) {
    for (int i = 0; i < N; ++i) {
      kept_keys[i] = load(head.key + i * kV);
      kept_queries[i] = load(head.query + i * kV);
      kept_faded[i] = kept_keys[i] * decay_of(i);
    }
  }
  const auto key = [&](int64_t i) { return N != 0 ? kept_keys[i] : load(head.key + i * kV); };
  const auto query = [&](int64_t i) { return N != 0 ? kept_queries[i] : load(head.query + i * kV); };
  const auto faded = [&](int64_t i) { return N != 0 ? kept_faded[i] : load(head.key + i * kV) * decay_of(i); };
  float added[M];
  if (head.beta != nullptr) {
    Floats parts[M] = {};
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const float* row = rows[m];
      Floats part = {};
#pragma GCC unroll 8
      for (int64_t i = 0; i < num_vectors; ++i) part = fused(load(row + i * kV), faded(i), part);
      parts[m] = part;
    }
    if constexpr (M % kV == 0) {
      for (int m = 0; m < M; m += kV) store(added + m, (load(values + m) - sums_of_rows(parts + m)) * splat(*head.beta));
    } else {
      for (int m = 0; m < M; ++m) added[m] = (values[m] - sum(parts[m])) * *head.beta;
    }
  } else {
    for (int m = 0; m < M; ++m) added[m] = values[m];
  }
  Floats read[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    float* row = rows[m];
    const Floats gain = splat(added[m]);
    Floats part = {};
#pragma GCC unroll 8
    for (int64_t i = 0; i < num_vectors; ++i) {
      const Floats now = fused(gain, key(i), load(row + i * kV) * decay_of(i));
      store(row + i * kV, now);
      part = fused(now, query(i), part);
    }
    read[m] = part;
  }
  if constexpr (M % kV == 0) {
    for (int m = 0; m < M; m += kV) store(out + m, sums_of_rows(read + m));
  } else {
    for (int m = 0; m < M; ++m) out[m] = sum(read[m]);
  }
}

// M rows of one head over all tokens of a sequence, from number `value` of its values on.
template <int M, bool kByNumber, typename T>
inline void recur_rows(const Recurrence<T>& given, const HeadsOfTokens& heads, int64_t seq, int64_t head, int64_t value) {
  const StateStep& step = given.step;
  const int64_t dim = given.key_dim, group = head / (given.num_heads / given.num_groups);
  const uint64_t row_bytes = sizeof(float) * static_cast<uint64_t>(dim);
  float* rows[M];
  float* copy = step.keeps_states ? nullptr : static_cast<float*>(__builtin_alloca_with_align(M * row_bytes, 512));
  for (int m = 0; m < M; ++m) {
    const int64_t row = head * given.value_dim + value + m;
    const StateRun& run = run_of(given.runs, row);
    rows[m] = reinterpret_cast<float*>(place_of(step, seq, run)) + (row - run.first) * dim;
    if (copy != nullptr) {
      __builtin_memcpy(copy + m * dim, rows[m], row_bytes);
      rows[m] = copy + m * dim;
    }
    if (step.is_first[seq]) __builtin_memset(rows[m], 0, row_bytes);
  }
  for (int64_t t = step.query_starts[seq]; t < step.query_starts[seq + 1]; ++t) {
    const int64_t place = t * given.num_heads + head;
    const int64_t at = (t * given.num_groups + group) * dim;
    const HeadInputs inputs = {heads.keys + at, heads.queries + at, heads.decays + (kByNumber ? place * dim : place),
                               given.beta == nullptr ? nullptr : given.beta + place};
    float values[M];
    for (int m = 0; m < M; ++m) values[m] = load_one(given.values + t * given.value_stride + head * given.value_dim + value + m);
    float* out = given.output + place * given.value_dim + value;
    if (dim == kUsualKey) {
      advance<M, kUsualKey / kV, kByNumber>(rows, inputs, dim, values, out);
    } else {
      advance<M, 0, kByNumber>(rows, inputs, dim, values, out);
    }
  }
}

template <bool kByNumber, typename T>
inline void recur_heads(const Recurrence<T>& given, const HeadsOfTokens& heads, int64_t begin, int64_t end) {
  const int64_t num_parts = given.num_parts();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t seq = item / num_parts / given.num_heads, head = item / num_parts % given.num_heads;
    const int64_t first = item % num_parts * kRowsTogether;
    const int64_t last = first + kRowsTogether < given.value_dim ? first + kRowsTogether : given.value_dim;
    int64_t value = first;
    // The sums of a row follow one upon another, and more rows at once fill the time between. Rows that only one token
    // takes come from memory: there more at once are slower.
    if (given.step.query_starts[seq + 1] - given.step.query_starts[seq] > 1) {
      for (; value + 2 * kV <= last; value += 2 * kV) recur_rows<2 * kV, kByNumber>(given, heads, seq, head, value);
    }
    for (; value + kV <= last; value += kV) recur_rows<kV, kByNumber>(given, heads, seq, head, value);
    for (; value < last; ++value) recur_rows<1, kByNumber>(given, heads, seq, head, value);
  }
}

template <typename T>
void recur(const Recurrence<T>& given, const HeadsOfTokens& heads, int64_t begin, int64_t end) {
  if (given.decays_by_number) {
    recur_heads<true>(given, heads, begin, end);
  } else {
    recur_heads<false>(given, heads, begin, end);
  }
}
