// Paged attention with a running softmax. Keys and values are read where they lie, and become floats in registers.
//
// Included by kernels_impl.h, once for each instruction set. Keys are taken in spans, which begin at the same positions
// for every tile, so that no row's sums depend on how its prompt was cut or on what else the tile holds.
//
// Source: paged attention, arXiv:2309.06180, with the running softmax of FlashAttention, arXiv:2205.14135.

// One tile's state between spans of keys: `rows` are the tile's tokens times the query heads of its KV head.
struct TileState {
  float* weights;  // [rows, keys of a span]
  float* totals;   // [rows, V], not divided yet
  float* highest;  // [rows]
  float* sums;     // [rows]
};

// A page that is read later is on its way while as much of another is read: pages lie anywhere, so that no processor
// foresees them. One that is read next would come too late.
constexpr int64_t kPagesAhead = 2;

template <typename T>
inline void fetch_line(const T* later, int64_t place) {
  constexpr int64_t kNumbers = 64 / sizeof(T);
  if (later != nullptr && place % kNumbers == 0) __builtin_prefetch(later + place, 0, 2);
}

// Scores of M queries with all keys of a page. The more queries share the load of a key, the better; each score
// is summed in the same order for any M.
template <int M, typename T>
inline void score_rows(const float* const* queries, const T* keys, const T* later, int64_t dim, int64_t num_keys,
                       float* const* scores) {
  constexpr int kKeys = kV / M;
  for (int64_t s = 0; s < num_keys; s += kKeys) {
    Floats parts[kV] = {};
    for (int64_t d = 0; d < dim; d += kV) {
      Floats values[M];
      for (int m = 0; m < M; ++m) values[m] = load(queries[m] + d);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        fetch_line(later, (s + k) * dim + d);
        const Floats key = load(keys + (s + k) * dim + d);
        for (int m = 0; m < M; ++m) parts[m * kKeys + k] += values[m] * key;
      }
    }
    float sums[kV];
    store(sums, sums_of_rows(parts));
    for (int m = 0; m < M; ++m) __builtin_memcpy(scores[m] + s, sums + m * kKeys, kKeys * sizeof(float));
  }
}

// The part of a page or a span that one row sees: keys [first, last).
struct Sight {
  int64_t first;
  int64_t last;
  bool is_empty() const { return first >= last; }
};

// Turns one row's scores with a span into weights, and shrinks what it summed before as far as these are higher.
inline void weigh(const TileState& state, int64_t row, const AttentionOptions& options, int64_t dim, int64_t num_keys,
                  Sight sight) {
  const Floats hidden = splat(-__builtin_inff());
  float* weights = state.weights + row * num_keys;
  if (sight.is_empty()) {
    for (int64_t s = 0; s < num_keys; s += kV) store(weights + s, Floats{});
    return;
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
  Floats total = {};
  for (int64_t s = 0; s < num_keys; s += kV) {
    const Floats weight = exponential(load(weights + s) - top);
    total += weight;
    store(weights + s, weight);
  }
  state.highest[row] = top;
  if (highest != top) {
    const Floats shrink = exponential(splat(highest - top));
    float* totals = state.totals + row * dim;
    for (int64_t d = 0; d < dim; d += kV) store(totals + d, load(totals + d) * shrink);
    state.sums[row] *= shrink[0];
  }
  state.sums[row] += sum(total);
}

// Adds the weighed values [first, last) of a page to the totals of M rows, from number d on N vectors. A row that
// sees fewer of them has weights of 0 there.
template <int M, int N, typename T>
inline void add_some_values(float* const* totals, const float* const* weights, const T* values, const T* later,
                            int64_t stride, int64_t d, Sight sight) {
  Floats sums[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sums[m][n] = load(totals[m] + d + n * kV);
  }
  for (int64_t s = sight.first; s < sight.last; ++s) {
    Floats value[N];
    for (int n = 0; n < N; ++n) {
      fetch_line(later, s * stride + d + n * kV);
      value[n] = load(values + s * stride + d + n * kV);
    }
    for (int m = 0; m < M; ++m) {
      const Floats weight = splat(weights[m][s]);
      for (int n = 0; n < N; ++n) sums[m][n] += weight * value[n];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) store(totals[m] + d + n * kV, sums[m][n]);
  }
}

template <int M, typename T>
inline void add_values(float* const* totals, const float* const* weights, const T* values, const T* later, int64_t dim,
                       int64_t stride, Sight sight) {
  constexpr int kMany = kV == 16 ? 4 : M == 1 ? 8 : 2;
  int64_t d = 0;
  for (; d + kMany * kV <= dim; d += kMany * kV) {
    add_some_values<M, kMany>(totals, weights, values, later, stride, d, sight);
  }
  for (; d < dim; d += kV) add_some_values<M, 1>(totals, weights, values, later, stride, d, sight);
}

// Does `work` for all rows, as many at a time as share the loads of keys and values.
template <class Work>
inline void for_some_rows(int64_t num_rows, const Work& work) {
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) work.template operator()<4>(row);
  if (row + 2 <= num_rows) {
    work.template operator()<2>(row);
    row += 2;
  }
  if (row < num_rows) work.template operator()<1>(row);
}

// A tile of queries, the keys that they see, and the sums of each row: for each KV head its tokens times its queries.
template <typename T>
struct Tile {
  const Attention<T>& attention;
  const AttentionTile& tile;
  const HeadShape& heads = attention.heads;
  const int64_t all_heads = heads.num_query_heads / heads.num_kv_heads;
  const int64_t group = tile.num_query_heads;
  const int64_t num_rows = tile.num_tokens * group;  // of each head
  const int64_t page_size = attention.step.block_size;
  const int32_t* table = attention.step.table_of(attention.cache.stripe, tile.seq);
  const int64_t padded_size = (page_size + kV - 1) / kV * kV;
  // A page that is no whole number of vectors is a span of its own, and its keys are copied.
  const bool is_copied = padded_size != page_size;
  const int64_t span_pages = !is_copied && page_size < kSpanKeys ? kSpanKeys / page_size : 1;
  const int64_t span = span_pages * padded_size;
  const int64_t first_position =
      attention.step.seq_lens[tile.seq] - attention.step.query_starts[tile.seq + 1] + tile.first_token;
  const int64_t window = attention.options.window;
  const int64_t begin_page = window && first_position >= window ? (first_position - window + 1) / page_size : 0;
  const int64_t* ends_seen = attention.step.ends_seen_by(window);  // or null: no token sees a later one
  const int64_t end_page = (last_end() + page_size - 1) / page_size;

  int64_t end_seen(int64_t token) const {
    const int64_t end = first_position + token + 1;
    if (ends_seen == nullptr) return end;
    const int64_t further = ends_seen[tile.first_token + token];
    return further > end ? further : end;
  }
  int64_t last_end() const {
    int64_t last = first_position + tile.num_tokens;
    for (int64_t token = 0; ends_seen != nullptr && token < tile.num_tokens; ++token) {
      last = end_seen(token) > last ? end_seen(token) : last;
    }
    return last;
  }

  const T* page_of(const Pages<T>& pages, int64_t page, int64_t head) const {
    if (page >= end_page) return nullptr;
    const int64_t block = table[page];
    return pages.data + block * pages.block_stride + (tile.kv_head + head) * page_size * pages.row_stride;
  }
  const T* keys_of(int64_t page, int64_t head) const {
    return page_of(attention.cache.keys, page, head);
  }
  const T* values_of(int64_t page, int64_t head) const {
    return page_of(attention.cache.values, page, head);
  }

  // Of all query heads, that of a row of a KV head.
  int64_t query_head_of(int64_t head, int64_t row) const {
    return (tile.kv_head + head) * all_heads + tile.first_query_head + row % group;
  }
  const float* query_of(int64_t head, int64_t row) const {
    return attention.queries + (tile.first_token + row / group) * attention.query_stride +
           query_head_of(head, row) * heads.key_dim;
  }

  // Of keys [start, start + count), those that a row sees.
  Sight sight_of(int64_t row, int64_t start, int64_t count) const {
    const int64_t position = first_position + row / group;
    const int64_t end = end_seen(row / group), last = end - start < count ? end - start : count;
    const int64_t left = window ? position - window + 1 - start : 0;
    return Sight{left > 0 ? left : 0, last};
  }

  // Of a page, those that some of M rows see.
  template <int M>
  Sight sight_of_rows(int64_t row, int64_t page) const {
    Sight all = {page_size, 0};
    for (int m = 0; m < M; ++m) {
      const Sight sight = sight_of(row + m, page * page_size, page_size);
      if (sight.is_empty()) continue;
      all.first = sight.first < all.first ? sight.first : all.first;
      all.last = sight.last > all.last ? sight.last : all.last;
    }
    return all;
  }

  // Pages of a span [begin, end) in the order in which they are read: all keys, all values, then the next span's keys.
  const T* page_at(int64_t begin, int64_t end, int64_t index) const {
    const int64_t num_heads = tile.num_kv_heads, count = (end - begin) * num_heads;
    if (index < count) return keys_of(begin + index / num_heads, index % num_heads);
    index -= count;
    if (index < count) return values_of(begin + index / num_heads, index % num_heads);
    index -= count;
    return keys_of(end + index / num_heads, index % num_heads);
  }

  // Does `work` for as many rows at a time as share the loads of a page, with the part of it that some of them see,
  // where their weights are and what is fetched beside it.
  template <class Work>
  void for_each_page(const TileState& state, int64_t begin, int64_t end, int64_t index, const Work& work) const {
    for (int64_t page = begin; page < end; ++page) {
      for (int64_t head = 0; head < tile.num_kv_heads; ++head, ++index) {
        const T* here = page_at(begin, end, index);
        const T* later = page_at(begin, end, index + kPagesAhead);
        for_some_rows(num_rows, [&]<int M>(int64_t row) {
          const Sight sight = sight_of_rows<M>(row, page);
          if (sight.is_empty()) return;
          float* weights[M];
          for (int m = 0; m < M; ++m) {
            weights[m] = state.weights + (head * num_rows + row + m) * span + page % span_pages * page_size;
          }
          work.template operator()<M>(head, row, here, row == 0 ? later : nullptr, weights, sight);
        });
      }
    }
  }

  // Takes keys and values of pages [begin, end), at most a span, into the running softmax of all rows.
  void take(const TileState& state, int64_t begin, int64_t end, T* copied) const {
    const T* held = nullptr;  // the page in `copied`: all rows of a head come to it one after the other
    for_each_page(state, begin, end, 0, [&]<int M>(int64_t head, int64_t row, const T* keys, const T* later,
                                                   float** scores, Sight) {
      const float* queries[M];
      for (int m = 0; m < M; ++m) queries[m] = query_of(head, row + m);
      if (is_copied) {
        if (keys != held) {
          __builtin_memcpy(copied, keys, sizeof(T) * static_cast<uint64_t>(page_size * heads.key_dim));
        }
        held = keys;
        keys = copied;
      }
      score_rows<M>(queries, keys, later, heads.key_dim, padded_size, scores);
    });
    const int64_t start = begin / span_pages * span_pages * page_size, count = span_pages * page_size;
    for (int64_t row = 0; row < num_rows * tile.num_kv_heads; ++row) {
      weigh(state, row, attention.options, heads.value_dim, span, sight_of(row % num_rows, start, count));
    }
    const int64_t num_keys_pages = (end - begin) * tile.num_kv_heads;
    for_each_page(state, begin, end, num_keys_pages, [&]<int M>(int64_t head, int64_t row, const T* values, const T* later,
                                                       float** weights, Sight sight) {
      float* totals[M];
      for (int m = 0; m < M; ++m) totals[m] = state.totals + (head * num_rows + row + m) * heads.value_dim;
      add_values<M>(totals, weights, values, later, heads.value_dim, attention.cache.values.row_stride, sight);
    });
  }
};

template <typename T>
void attend(const Attention<T>& attention, const AttentionTile& tile, float* scratch) {
  const HeadShape& heads = attention.heads;
  const AttentionOptions& options = attention.options;
  const Tile<T> here{attention, tile};
  const int64_t num_rows = here.num_rows * tile.num_kv_heads, num_pages = here.span_pages;
  TileState state;
  state.weights = scratch;
  state.totals = state.weights + num_rows * here.span;
  state.highest = state.totals + num_rows * heads.value_dim;
  state.sums = state.highest + num_rows;
  T* copied = reinterpret_cast<T*>(state.sums + num_rows);
  for (int64_t i = 0; i < num_rows * heads.value_dim; i += kV) store(state.totals + i, Floats{});
  for (int64_t row = 0; row < num_rows; ++row) state.highest[row] = -__builtin_inff(), state.sums[row] = 0;

  for (int64_t begin = here.begin_page; begin < here.end_page;) {
    const int64_t next = (begin / num_pages + 1) * num_pages, end = next < here.end_page ? next : here.end_page;
    here.take(state, begin, end, copied);
    begin = end;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = tile.first_token + row % here.num_rows / here.group;
    const int64_t head = here.query_head_of(row / here.num_rows, row % here.num_rows);
    float total = state.sums[row];
    float shrink = 1;
    if (options.sinks != nullptr) {
      const float sink = options.sinks[head], highest = state.highest[row];
      const float top = sink > highest ? sink : highest;
      shrink = exponential(splat(highest - top))[0];
      total = total * shrink + exponential(splat(sink - top))[0];
    }
    T* out = attention.output + (token * heads.num_query_heads + head) * heads.value_dim;
    for (int64_t d = 0; d < heads.value_dim; d += kV) {
      store(out + d, load(state.totals + row * heads.value_dim + d) * (shrink / total));
    }
  }
}
