#include "layer.h"

namespace tokenyard {

template <>
const Kernels<Bf16>& Engine::kernels<Bf16>() const {
  return kernels_.bf16;
}

template <>
const Kernels<float>& Engine::kernels<float>() const {
  return kernels_.float32;
}

template <typename T>
void Engine::reserve_bytes(const Layer<T>& layer, int64_t num_tokens) {
  int64_t most = 0;
  for (const PackedWeight<T>* weight : {&layer.query_key_value, &layer.attention_output, &layer.gate_up, &layer.down}) {
    if (weight->bytes != nullptr && weight->num_inputs > most) most = weight->num_inputs;
  }
  bytes_.of<uint8_t>(num_tokens * most);
}

template <typename T>
void Engine::add_product(std::vector<Phase>& phases, Product<T>& product) {
  const PackedWeight<T>& weight = product.weight;
  if (weight.bytes != nullptr) {
    // One pair of buffers for all products: each is read to its end before the next is written.
    uint8_t* bytes = bytes_.of<uint8_t>(product.num_rows * weight.num_inputs);
    float* scales = scales_.of<float>(product.num_rows);
    product.bytes = bytes;
    product.scales = scales;
    phases.push_back({product.num_rows, [this, &product, bytes, scales](int64_t begin, int64_t end, int) {
                        kernels<T>().quantize(product.input, bytes, scales, product.weight.num_inputs, begin, end);
                      }});
  }
  phases.push_back({weight.num_blocks(), [this, &product](int64_t begin, int64_t end, int) {
                      kernels<T>().multiply(product, begin, end);
                    }});
}

template <typename T>
void Engine::multiply(Product<T> product) {
  std::vector<Phase> phases;
  add_product(phases, product);
  team_.run(phases);
}

template <typename T>
Phase Engine::attending(const Attention<T>& attention) {
  const Step& step = attention.step;
  tiles_.clear();
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    for (int64_t first = step.query_starts[seq]; first < step.query_starts[seq + 1]; first += kTileTokens) {
      const int64_t left = step.query_starts[seq + 1] - first;
      for (int64_t head = 0; head < attention.heads.num_kv_heads; ++head) {
        tiles_.push_back({seq, first, left < kTileTokens ? left : kTileTokens, head});
      }
    }
  }
  const int64_t size = attention_scratch_size(attention);
  float* scratch = scratch_.of<float>(size * team_.num_threads());
  return {static_cast<int64_t>(tiles_.size()), [&, size, scratch](int64_t begin, int64_t end, int thread) {
            for (int64_t tile = begin; tile < end; ++tile) {
              kernels<T>().attend(attention, tiles_[static_cast<size_t>(tile)], scratch + size * thread);
            }
          }};
}

template <typename T>
void Engine::attend(const Attention<T>& attention) {
  team_.run({attending(attention)});
}

template <typename T>
void Engine::run(const Layer<T>& layer, const Step& step, const Angles& angles, const Cache<T>& cache,
                 T* hidden) {
  const Kernels<T>& kernel = kernels<T>();
  const HeadShape& heads = layer.heads;
  Rotation rotation = layer.rotation;
  rotation.angles = angles;
  const int64_t num_tokens = step.num_tokens, size = layer.hidden_size;
  const int64_t mlp_size = layer.gate_up.num_outputs / 2;
  const bool adds_normed_attention = layer.after_attention_norm.weight != nullptr;
  const bool adds_normed_mlp = layer.after_mlp_norm.weight != nullptr;

  T* normed = normed_.of<T>(num_tokens * size);
  float* rows = rows_.of<float>(num_tokens * heads.row_size());
  T* attended = attended_.of<T>(num_tokens * heads.num_query_heads * heads.value_dim);
  T* activated = activated_.of<T>(num_tokens * mlp_size);
  float* added = adds_normed_attention || adds_normed_mlp ? added_.of<float>(num_tokens * size) : nullptr;

  const Attention<T> attention = {heads, layer.attention, step, cache, rows, heads.row_size(), attended};
  Product<T> to_rows = {normed, num_tokens, layer.query_key_value, nullptr, nullptr, rows, nullptr, nullptr};
  Product<T> from_attention =
      adds_normed_attention
          ? Product<T>{attended, num_tokens, layer.attention_output, nullptr, nullptr, added, nullptr, nullptr}
          : Product<T>{attended, num_tokens, layer.attention_output, hidden, hidden, nullptr, nullptr, nullptr};
  Product<T> to_mlp = {normed, num_tokens, layer.gate_up, nullptr, activated, nullptr, nullptr, nullptr};
  Product<T> from_mlp = adds_normed_mlp
                                  ? Product<T>{activated, num_tokens, layer.down, nullptr, nullptr, added, nullptr, nullptr}
                                  : Product<T>{activated, num_tokens, layer.down, hidden, hidden, nullptr, nullptr, nullptr};
  const int64_t num_heads = num_tokens * (heads.num_query_heads + 2 * heads.num_kv_heads);

  reserve_bytes(layer, num_tokens);
  std::vector<Phase> phases;
  phases.reserve(Team::kMostPhases);
  phases.push_back({num_tokens, [&](int64_t begin, int64_t end, int) {
                      kernel.normalize(hidden, normed, layer.attention_norm, size, begin, end);
                    }});
  add_product(phases, to_rows);
  phases.push_back({num_heads, [&](int64_t begin, int64_t end, int) {
                      kernel.rotate_and_write(rows, attention, rotation, begin, end);
                    }});
  phases.push_back(attending(attention));
  add_product(phases, from_attention);
  phases.push_back({num_tokens, [&](int64_t begin, int64_t end, int) {
                      if (adds_normed_attention) {
                        kernel.add_normalized(added, hidden, layer.after_attention_norm, size, begin, end);
                      }
                      kernel.normalize(hidden, normed, layer.mlp_norm, size, begin, end);
                    }});
  add_product(phases, to_mlp);
  add_product(phases, from_mlp);
  if (adds_normed_mlp) {
    phases.push_back({num_tokens, [&](int64_t begin, int64_t end, int) {
                        kernel.add_normalized(added, hidden, layer.after_mlp_norm, size, begin, end);
                      }});
  }
  team_.run(phases);
}

template void Engine::multiply(Product<Bf16>);
template void Engine::multiply(Product<float>);
template void Engine::attend(const Attention<Bf16>&);
template void Engine::attend(const Attention<float>&);
template void Engine::run(const Layer<Bf16>&, const Step&, const Angles&, const Cache<Bf16>&, Bf16*);
template void Engine::run(const Layer<float>&, const Step&, const Angles&, const Cache<float>&, float*);

}  // namespace tokenyard
