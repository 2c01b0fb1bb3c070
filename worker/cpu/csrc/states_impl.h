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

// kV channels of one sequence.
template <typename T>
inline void convolve_some(const Convolution<T>& given, int64_t seq, int64_t channel) {
  const StateStep& step = given.step;
  const int64_t num_columns = given.num_columns;
  const StateRun& run = run_of(given.runs, channel);
  T* kept = reinterpret_cast<T*>(place_of(step, seq, run)) + (channel - run.first);
  Floats earlier[kMostColumns] = {}, weights[kMostColumns + 1];
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

template <typename T>
void convolve(const Convolution<T>& given, int64_t begin, int64_t end) {
  const int64_t num_parts = given.num_parts();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % num_parts * kChannelsTogether, last = first + kChannelsTogether;
    for (int64_t channel = first; channel < last; channel += kV) convolve_some(given, item / num_parts, channel);
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
void prepare_keys(const Recurrence<T>& given, float* keys, float* queries, int64_t begin, int64_t end) {
  unite(given, given.keys, given.key_stride, 1, keys, begin, end);
  unite(given, given.queries, given.query_stride, given.scaling, queries, begin, end);
}

// What one token brings to one head.
struct HeadInputs {
  const float* key;
  const float* query;
  const float* log_decay;  // one number, or one for each of the key
  const float* beta;   // null: no delta rule
};

// One token's change of M rows of a state [M][K], and what it reads: M numbers.
template <int M, bool kByNumber>
inline void advance(float* const* rows, const HeadInputs& head, int64_t dim, const float* values, float* out) {
  const Floats whole = exponential(splat(*head.log_decay));
  float added[M];
  if (head.beta != nullptr) {
    Floats parts[M] = {};
    for (int64_t i = 0; i < dim; i += kV) {
      const Floats decay = kByNumber ? exponential(load(head.log_decay + i)) : whole;
      const Floats key = load(head.key + i) * decay;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) parts[m] = fused(load(rows[m] + i), key, parts[m]);
    }
    if constexpr (M == kV) {
      store(added, (load(values) - sums_of_rows(parts)) * splat(*head.beta));
    } else {
      for (int m = 0; m < M; ++m) added[m] = (values[m] - sum(parts[m])) * *head.beta;
    }
  } else {
    for (int m = 0; m < M; ++m) added[m] = values[m];
  }
  Floats read[M] = {};
  for (int64_t i = 0; i < dim; i += kV) {
    const Floats decay = kByNumber ? exponential(load(head.log_decay + i)) : whole;
    const Floats key = load(head.key + i), query = load(head.query + i);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Floats now = fused(splat(added[m]), key, load(rows[m] + i) * decay);
      store(rows[m] + i, now);
      read[m] = fused(now, query, read[m]);
    }
  }
  if constexpr (M == kV) {
    store(out, sums_of_rows(read));
  } else {
    for (int m = 0; m < M; ++m) out[m] = sum(read[m]);
  }
}

// M rows of one head over all tokens of a sequence, from number `value` of its values on.
template <int M, bool kByNumber, typename T>
inline void recur_rows(const Recurrence<T>& given, const float* keys, const float* queries, int64_t seq, int64_t head,
                       int64_t value) {
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
    const HeadInputs inputs = {keys + at, queries + at, given.log_decay + (kByNumber ? place * dim : place),
                               given.beta == nullptr ? nullptr : given.beta + place};
    float values[M];
    for (int m = 0; m < M; ++m) values[m] = load_one(given.values + t * given.value_stride + head * given.value_dim + value + m);
    advance<M, kByNumber>(rows, inputs, dim, values, given.output + place * given.value_dim + value);
  }
}

template <bool kByNumber, typename T>
inline void recur_heads(const Recurrence<T>& given, const float* keys, const float* queries, int64_t begin, int64_t end) {
  const int64_t num_parts = given.num_parts();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t seq = item / num_parts / given.num_heads, head = item / num_parts % given.num_heads;
    const int64_t first = item % num_parts * kRowsTogether;
    const int64_t last = first + kRowsTogether < given.value_dim ? first + kRowsTogether : given.value_dim;
    int64_t value = first;
    for (; value + kV <= last; value += kV) recur_rows<kV, kByNumber>(given, keys, queries, seq, head, value);
    for (; value < last; ++value) recur_rows<1, kByNumber>(given, keys, queries, seq, head, value);
  }
}

template <typename T>
void recur(const Recurrence<T>& given, const float* keys, const float* queries, int64_t begin, int64_t end) {
  if (given.decays_by_number) {
    recur_heads<true>(given, keys, queries, begin, end);
  } else {
    recur_heads<false>(given, keys, queries, begin, end);
  }
}
