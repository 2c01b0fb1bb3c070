// The kernels, once for each instruction set: see simd.h for why this is included inside of a namespace.

#include "products/products_impl.h"

#include "attention_impl.h"
#include "norms_impl.h"
#include "states_impl.h"

// Norm and rotation of one head, in place.
inline void rotate(float* head, int64_t dim, const Norm& norm, const Rotation& rotation, int64_t token) {
  if (norm.weight != nullptr) normalize(head, head, norm, dim, 0, 1);
  if (rotation.angles.cosines == nullptr) return;
  const int64_t first = rotation.angles.row_of(token) * rotation.rotated_dim;
  const float* cosines = rotation.angles.cosines + first;
  const float* sines = rotation.angles.sines + first;
  const int64_t half = rotation.rotated_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

template <typename T>
inline void write_row(const Pages<T>& pages, const int64_t* blocks, const Step& step, int64_t token, int64_t head,
                      const float* from, int64_t dim) {
  T* to = pages.data + blocks[token] * pages.block_stride +
          (head * step.block_size + step.token_offsets[token]) * dim;
  for (int64_t i = 0; i < dim; i += kV) store(to + i, load(from + i));
}

template <typename T>
void rotate_and_write(float* rows, const Attention<T>& attention, const Rotation& rotation, int64_t begin,
                      int64_t end) {
  const HeadShape& heads = attention.heads;
  const int64_t dim = heads.key_dim;
  const int64_t num_heads = heads.num_query_heads + 2 * heads.num_kv_heads;
  const int64_t* blocks = attention.step.token_blocks + attention.cache.stripe * attention.step.num_tokens;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t token = item / num_heads;
    int64_t head = item % num_heads;
    float* row = rows + token * heads.row_size();
    if (head < heads.num_query_heads) {
      rotate(row + head * dim, dim, rotation.query_norm, rotation, token);
      continue;
    }
    row += heads.queries_size();
    head -= heads.num_query_heads;
    if (head < heads.num_kv_heads) {
      rotate(row + head * dim, dim, rotation.key_norm, rotation, token);
      write_row(attention.cache.keys, blocks, attention.step, token, head, row + head * dim, dim);
      continue;
    }
    row += heads.num_kv_heads * dim;
    head -= heads.num_kv_heads;
    write_row(attention.cache.values, blocks, attention.step, token, head, row + head * heads.value_dim,
              heads.value_dim);
  }
}

template <typename T>
void weigh(const float* rows, const HeadShape& heads, T* attended, int64_t begin, int64_t end) {
  const int64_t size = heads.num_query_heads * heads.value_dim;
  for (int64_t token = begin; token < end; ++token) {
    const float* gates = rows + token * heads.row_size() + size;
    T* to = attended + token * size;
    for (int64_t i = 0; i < size; i += kV) store(to + i, load(to + i) * sigmoid(load(gates + i)));
  }
}

template <typename T>
constexpr Kernels<T> kernels_of() {
  return {kPanels ? 0 : kTileRows, quantize<T>, prepare<T>, shrink<T>, multiply<T>, normalize<T>, add_normalized<T>, add<T>, normalize_all_heads, rotate_and_write<T>, attend<T>, weigh<T>, normalize_gated<T>, convolve<T>, prepare_heads<T>, recur<T>};
}
