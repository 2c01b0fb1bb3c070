// The kernels, once for each instruction set: see simd.h for why this is included inside of a namespace.
//
// Source: paged attention, arXiv:2309.06180, with the running softmax of FlashAttention, arXiv:2205.14135.

#include "products_impl.h"

#include "norms_impl.h"

// Norm and rotation of one head, in place.
inline void rotate(float* head, int64_t dim, const Norm& norm, const Rotation& rotation, int64_t token) {
  if (norm.weight != nullptr) normalize(head, head, norm, dim, 0, 1);
  if (rotation.angles.cosines == nullptr) return;
  const float* cosines = rotation.angles.cosines + token * rotation.rotated_dim;
  const float* sines = rotation.angles.sines + token * rotation.rotated_dim;
  const int64_t half = rotation.rotated_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

template <typename T>
inline void write_row(const Pages<T>& pages, const Step& step, int64_t token, int64_t head, const float* from,
                      int64_t dim) {
  T* to = pages.data + step.token_blocks[token] * pages.block_stride +
          (head * step.block_size + step.token_offsets[token]) * dim;
  for (int64_t i = 0; i < dim; i += kV) store(to + i, load(from + i));
}

template <typename T>
void rotate_and_write(float* rows, const Attention<T>& attention, const Rotation& rotation, int64_t begin,
                      int64_t end) {
  const HeadShape& heads = attention.heads;
  const int64_t dim = heads.key_dim;
  const int64_t num_heads = heads.num_query_heads + 2 * heads.num_kv_heads;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t token = item / num_heads;
    int64_t head = item % num_heads;
    float* row = rows + token * heads.row_size();
    if (head < heads.num_query_heads) {
      rotate(row + head * dim, dim, rotation.query_norm, rotation, token);
      continue;
    }
    row += heads.num_query_heads * dim;
    head -= heads.num_query_heads;
    if (head < heads.num_kv_heads) {
      rotate(row + head * dim, dim, rotation.key_norm, rotation, token);
      write_row(attention.cache.keys, attention.step, token, head, row + head * dim, dim);
      continue;
    }
    row += heads.num_kv_heads * dim;
    head -= heads.num_kv_heads;
    write_row(attention.cache.values, attention.step, token, head, row + head * heads.value_dim, heads.value_dim);
  }
}

// One tile's state between pages: `rows` are the tile's tokens times the query heads of its KV head.
struct TileState {
  float* keys;     // [S to the next vector, D] of the current page
  float* values;   // [S to the next vector, V]
  float* weights;  // [rows, S to the next 16]
  float* totals;   // [rows, V], not divided yet
  float* highest;  // [rows]
  float* sums;     // [rows]
};

template <typename T>
inline void convert_page(const T* page, int64_t num_keys, int64_t padded, int64_t dim, float* to) {
  for (int64_t i = 0; i < num_keys * dim; i += kV) store(to + i, load(page + i));
  // What lies beyond may be anything, and 0 times that must be 0.
  for (int64_t i = num_keys * dim; i < padded * dim; i += kV) store(to + i, Floats{});
}

// What comes next is on its way while a page is attended to: pages lie anywhere, so that no processor foresees it.
template <typename T>
inline void fetch_page(const T* page, int64_t count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(page);
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// Scores of M queries with all keys of a page. The more queries share the load of a key, the better; each score
// is summed in the same order for any M.
template <int M>
inline void score_rows(const float* const* queries, const float* keys, int64_t dim, int64_t num_keys,
                       float* const* scores) {
  constexpr int kKeys = kV / M;
  for (int64_t s = 0; s < num_keys; s += kKeys) {
    Floats parts[kV] = {};
    for (int64_t d = 0; d < dim; d += kV) {
      Floats values[M];
      for (int m = 0; m < M; ++m) values[m] = load(queries[m] + d);
      for (int k = 0; k < kKeys; ++k) {
        const Floats key = load(keys + (s + k) * dim + d);
        for (int m = 0; m < M; ++m) parts[m * kKeys + k] += values[m] * key;
      }
    }
    float sums[kV];
    store(sums, sums_of_rows(parts));
    for (int m = 0; m < M; ++m) __builtin_memcpy(scores[m] + s, sums + m * kKeys, kKeys * sizeof(float));
  }
}

// The part of a page that one row sees: keys [first, last).
struct Sight {
  int64_t first;
  int64_t last;
  bool is_empty() const { return first >= last; }
};

// Turns one row's scores with a page into weights, and returns by how much what it summed before shrinks.
inline float weigh(const TileState& state, int64_t row, const AttentionOptions& options, int64_t num_keys,
                   Sight sight) {
  const Floats hidden = splat(-__builtin_inff());
  float* weights = state.weights + row * num_keys;
  if (sight.is_empty()) {
    for (int64_t s = 0; s < num_keys; s += kV) store(weights + s, Floats{});
    return 1;
  }
  Floats best = hidden;
  for (int64_t s = 0; s < num_keys; s += kV) {
    Floats scores = load(weights + s) * options.scaling;
    if (options.softcap != 0) scores = options.softcap * hyperbolic_tangent(scores / options.softcap);
    const Ints place = kLanes + static_cast<int32_t>(s);
    const Ints is_seen =
        (place >= static_cast<int32_t>(sight.first)) & (place < static_cast<int32_t>(sight.last));
    scores = is_seen ? scores : hidden;
    best = larger(scores, best);
    store(weights + s, scores);
  }
  const float highest = state.highest[row], now = largest(best);
  const float top = now > highest || now != now ? now : highest;
  const float shrink = highest == top ? 1.0f : exponential(splat(highest - top))[0];
  Floats total = {};
  for (int64_t s = 0; s < num_keys; s += kV) {
    const Floats weight = exponential(load(weights + s) - top);
    total += weight;
    store(weights + s, weight);
  }
  state.sums[row] = state.sums[row] * shrink + sum(total);
  state.highest[row] = top;
  return shrink;
}

// totals * shrinks + the weighed sums of values [first, last), for M rows and N vectors of their numbers. A row
// that sees fewer of them has weights of 0 there.
template <int M, int N>
inline void add_some_values(float* const* totals, const float* shrinks, const float* const* weights,
                            const float* values, int64_t dim, Sight sight) {
  Floats sums[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sums[m][n] = load(totals[m] + n * kV) * shrinks[m];
  }
  for (int64_t s = sight.first; s < sight.last; ++s) {
    Floats value[N];
    for (int n = 0; n < N; ++n) value[n] = load(values + s * dim + n * kV);
    for (int m = 0; m < M; ++m) {
      const Floats weight = splat(weights[m][s]);
      for (int n = 0; n < N; ++n) sums[m][n] += weight * value[n];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) store(totals[m] + n * kV, sums[m][n]);
  }
}

// Takes one page into the running softmax of rows [row, row + M), of which at least one sees some of it.
template <int M>
inline void take_page(const TileState& state, int64_t row, const float* const* queries, const HeadShape& heads,
                      const AttentionOptions& options, int64_t num_keys, const Sight* sights) {
  constexpr int kMany = kV == 16 ? 4 : M == 1 ? 8 : 2;
  float *weights[M], *totals[M], shrinks[M];
  Sight all = {num_keys, 0};
  for (int m = 0; m < M; ++m) {
    weights[m] = state.weights + (row + m) * num_keys;
    totals[m] = state.totals + (row + m) * heads.value_dim;
  }
  score_rows<M>(queries, state.keys, heads.key_dim, num_keys, weights);
  for (int m = 0; m < M; ++m) {
    shrinks[m] = weigh(state, row + m, options, num_keys, sights[m]);
    if (sights[m].is_empty()) continue;
    all.first = sights[m].first < all.first ? sights[m].first : all.first;
    all.last = sights[m].last > all.last ? sights[m].last : all.last;
  }
  int64_t d = 0;
  for (; d + kMany * kV <= heads.value_dim; d += kMany * kV) {
    add_some_values<M, kMany>(totals, shrinks, weights, state.values + d, heads.value_dim, all);
    for (int m = 0; m < M; ++m) totals[m] += kMany * kV;
  }
  for (; d < heads.value_dim; d += kV) {
    add_some_values<M, 1>(totals, shrinks, weights, state.values + d, heads.value_dim, all);
    for (int m = 0; m < M; ++m) totals[m] += kV;
  }
}

template <typename T>
void attend(const Attention<T>& attention, const AttentionTile& tile, float* scratch) {
  const HeadShape& heads = attention.heads;
  const Step& step = attention.step;
  const AttentionOptions& options = attention.options;
  const int64_t group = heads.num_query_heads / heads.num_kv_heads;
  const int64_t num_rows = tile.num_tokens * group;
  const int64_t padded = (step.block_size + kV - 1) / kV * kV;
  TileState state;
  state.keys = scratch;
  state.values = state.keys + padded * heads.key_dim;
  state.weights = state.values + padded * heads.value_dim;
  state.totals = state.weights + num_rows * padded;
  state.highest = state.totals + num_rows * heads.value_dim;
  state.sums = state.highest + num_rows;
  for (int64_t i = 0; i < num_rows * heads.value_dim; i += kV) store(state.totals + i, Floats{});
  for (int64_t row = 0; row < num_rows; ++row) state.highest[row] = -__builtin_inff(), state.sums[row] = 0;

  const int64_t first_position = step.seq_lens[tile.seq] - step.query_starts[tile.seq + 1] + tile.first_token;
  const int64_t end = first_position + tile.num_tokens;
  const int64_t begin = options.window && first_position >= options.window ? first_position - options.window + 1 : 0;
  const auto page_of = [&](const Pages<T>& pages, int64_t page, int64_t dim) {
    const int64_t block = step.block_tables[tile.seq * step.table_size + page];
    return pages.data + block * pages.block_stride + tile.kv_head * step.block_size * dim;
  };
  for (int64_t page = begin / step.block_size; page * step.block_size < end; ++page) {
    const int64_t start = page * step.block_size;
    const int64_t num_keys = end - start < step.block_size ? end - start : step.block_size;
    if (end - start > step.block_size) {
      fetch_page(page_of(attention.cache.keys, page + 1, heads.key_dim), step.block_size * heads.key_dim);
      fetch_page(page_of(attention.cache.values, page + 1, heads.value_dim), step.block_size * heads.value_dim);
    }
    convert_page(page_of(attention.cache.keys, page, heads.key_dim), num_keys, padded, heads.key_dim, state.keys);
    convert_page(page_of(attention.cache.values, page, heads.value_dim), num_keys, padded, heads.value_dim, state.values);
    const auto sight_of = [&](int64_t row) {
      const int64_t position = first_position + row / group;
      const int64_t last = position + 1 - start < num_keys ? position + 1 - start : num_keys;
      const int64_t left = options.window ? position - options.window + 1 - start : 0;
      return Sight{left > 0 ? left : 0, last};
    };
    const auto query_of = [&](int64_t row) {
      return attention.queries + (tile.first_token + row / group) * attention.query_stride +
             (tile.kv_head * group + row % group) * heads.key_dim;
    };
    const auto take = [&]<int M>(int64_t row) {
      const float* queries[M];
      Sight sights[M];
      bool is_seen = false;
      for (int m = 0; m < M; ++m) {
        queries[m] = query_of(row + m);
        sights[m] = sight_of(row + m);
        is_seen |= !sights[m].is_empty();
      }
      if (is_seen) take_page<M>(state, row, queries, heads, options, padded, sights);
    };
    int64_t row = 0;
    for (; row + 4 <= num_rows; row += 4) take.template operator()<4>(row);
    if (row + 2 <= num_rows) {
      take.template operator()<2>(row);
      row += 2;
    }
    if (row < num_rows) take.template operator()<1>(row);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t head = tile.kv_head * group + row % group;
    float total = state.sums[row];
    float shrink = 1;
    if (options.sinks != nullptr) {
      const float sink = options.sinks[head], highest = state.highest[row];
      const float top = sink > highest ? sink : highest;
      shrink = exponential(splat(highest - top))[0];
      total = total * shrink + exponential(splat(sink - top))[0];
    }
    T* out = attention.output + ((tile.first_token + row / group) * heads.num_query_heads + head) * heads.value_dim;
    for (int64_t d = 0; d < heads.value_dim; d += kV) {
      store(out + d, load(state.totals + row * heads.value_dim + d) * (shrink / total));
    }
  }
}

template <typename T>
constexpr Kernels<T> kernels_of() {
  return {quantize<T>, prepare<T>, shrink<T>, multiply<T>, normalize<T>, add_normalized<T>, add<T>, normalize_all_heads, rotate_and_write<T>, attend<T>};
}
