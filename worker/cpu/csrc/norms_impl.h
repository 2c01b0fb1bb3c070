// Norms: a part of kernels_impl.h, in the same namespace.
//
// Source: RMSNorm, arXiv:1910.07467; layer normalization, arXiv:1607.06450.

struct Moments {
  float mean;   // 0 where it is not to be subtracted
  float scale;
};

template <typename In>
inline Moments moments_of(const In* x, const Norm& norm, int64_t size) {
  float mean = 0;
  if (norm.bias != nullptr) {
    Floats total = {};
    for (int64_t i = 0; i < size; i += kV) total += load(x + i);
    mean = sum(total) / static_cast<float>(size);
  }
  Floats total = {};
  for (int64_t i = 0; i < size; i += kV) {
    const Floats value = load(x + i) - mean;
    total += value * value;
  }
  return {mean, 1.0f / __builtin_sqrtf(sum(total) / static_cast<float>(size) + norm.epsilon)};
}

template <typename In>
inline Floats normed(const In* x, const Moments& moments, const Norm& norm, int64_t i) {
  const Floats value = (load(x + i) - moments.mean) * moments.scale * load(norm.weight + i);
  return norm.bias == nullptr ? value : value + load(norm.bias + i);
}

template <typename T>
void normalize(const T* x, T* out, const Norm& norm, int64_t size, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = x + row * size;
    const Moments moments = moments_of(from, norm, size);
    for (int64_t i = 0; i < size; i += kV) store(out + row * size + i, normed(from, moments, norm, i));
  }
}

template <typename T>
void add_normalized(const float* x, T* residual, const Norm& norm, int64_t size, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* from = x + row * size;
    T* to = residual + row * size;
    const Moments moments = moments_of(from, norm, size);
    for (int64_t i = 0; i < size; i += kV) store(to + i, load(to + i) + normed(from, moments, norm, i));
  }
}

template <typename T>
void add(const float* x, T* residual, float multiplier, int64_t size, int64_t begin, int64_t end) {
  for (int64_t i = begin * size; i < end * size; i += kV) {
    store(residual + i, load(residual + i) + load(x + i) * multiplier);
  }
}

// The queries of a token as one row, and its keys as another, in place: items [begin, end) of 2 T.
inline void normalize_all_heads(float* rows, const HeadShape& heads, const Norm& queries, const Norm& keys,
                                int64_t begin, int64_t end) {
  const int64_t num_queries = heads.queries_size();
  for (int64_t item = begin; item < end; ++item) {
    const bool is_key = item % 2;
    const Norm& norm = is_key ? keys : queries;
    if (norm.weight == nullptr) continue;
    float* row = rows + item / 2 * heads.row_size() + (is_key ? num_queries : 0);
    normalize(row, row, norm, is_key ? heads.num_kv_heads * heads.key_dim : num_queries, 0, 1);
  }
}

template <typename T>
void normalize_gated(const GatedHeads<T>& given, int64_t begin, int64_t end) {
  for (int64_t head = begin; head < end; ++head) {
    const float* from = given.heads + head * given.dim;
    const T* gates = given.gates + head / given.num_heads * given.gate_stride + head % given.num_heads * given.dim;
    const Moments moments = moments_of(from, given.norm, given.dim);
    for (int64_t i = 0; i < given.dim; i += kV) {
      const Floats gate = load(gates + i);
      store(given.output + head * given.dim + i, normed(from, moments, given.norm, i) * gate * sigmoid(gate));
    }
  }
}
