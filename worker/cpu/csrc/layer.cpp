#include "layer.h"

#include <algorithm>
#include <cmath>

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
Prepared<T> Engine::prepared(const PackedWeight<T>& weight, int64_t num_rows) {
  Prepared<T> memory = {};
  const GroupedCodes& grouped = weight.grouped;
  // One set of buffers for all products: each is read to its end before the next is written.
  if (weight.takes_bytes()) {
    memory.bytes_stride = spread(weight.num_inputs);
    memory.bytes = bytes_.of<uint8_t>(num_rows * memory.bytes_stride);
    memory.scales = scales_.of<float>(num_rows);
  }
  const int64_t row_bytes = weight.num_inputs * static_cast<int64_t>(sizeof(T));
  const bool has_wide_tiles = kernels<T>().most_rows > kWays && !weight.takes_bytes() &&
                              (grouped.data == nullptr || grouped.group_size > kSmallGroup);
  if (has_wide_tiles && num_rows >= kWays && spread(row_bytes) != row_bytes) {
    memory.copy_stride = spread(row_bytes) / static_cast<int64_t>(sizeof(T));
    memory.copy = copy_.of<T>(num_rows * memory.copy_stride);
  }
  if (weight.is_adapted()) memory.shrunk = shrunk_.of<float>(num_rows * weight.adapters->max_ranks);
  if (grouped.data == nullptr) return memory;
  if (grouped.permutation != nullptr) memory.permuted = permuted_.of<T>(num_rows * weight.num_inputs);
  if (grouped.takes_bytes) memory.run_starts = run_starts_.of<RunStart>(num_rows * weight.num_runs());
  if (grouped.offsets.data != nullptr) memory.run_sums = run_sums_.of<float>(num_rows * weight.num_runs());
  return memory;
}

template <typename T>
void Engine::reserve(const Layer<T>& layer, int64_t num_tokens) {
  for (const PackedWeight<T>* weight : {&layer.query_key_value, &layer.attention_output, &layer.gate_up, &layer.down,
                                        &layer.recurrent.steps}) {
    if (weight->num_outputs != 0) prepared(*weight, num_tokens);
  }
}

template <typename T>
void Engine::add_product(std::vector<Phase>& phases, Product<T>& product) {
  const PackedWeight<T>& weight = product.weight;
  const Prepared<T> memory = prepared(weight, product.num_rows);
  if (memory.shrunk != nullptr) {
    product.shrunk = memory.shrunk;
    phases.push_back({product.num_rows * shrink_items(weight), [this, product, memory](int64_t begin, int64_t end, int) {
                        kernels<T>().shrink(product, memory.shrunk, begin, end);
                      }});
  }
  if (memory.permuted != nullptr || memory.bytes != nullptr || memory.run_sums != nullptr) {
    product.bytes = memory.bytes;
    product.bytes_stride = memory.bytes_stride;
    product.scales = memory.scales;
    product.run_sums = memory.run_sums;
    product.run_starts = memory.run_starts;
    phases.push_back({product.num_rows, [this, product, memory](int64_t begin, int64_t end, int) {
                        if (product.weight.grouped.data != nullptr) {
                          kernels<T>().prepare(product, memory, begin, end);
                        } else {
                          kernels<T>().quantize(product.input, memory, product.weight.num_inputs, begin, end);
                        }
                      }});
    if (memory.permuted != nullptr) product.input = memory.permuted;
  }
  product.input_stride = weight.num_inputs;
  if (memory.copy != nullptr) {
    const T* from = product.input;
    product.input = memory.copy;
    product.input_stride = memory.copy_stride;
    phases.push_back({product.num_rows, [from, memory, size = weight.num_inputs](int64_t begin, int64_t end, int) {
                        for (int64_t row = begin; row < end; ++row) {
                          std::copy_n(from + row * size, size, memory.copy + row * memory.copy_stride);
                        }
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
  const int64_t num_heads = attention.heads.num_kv_heads, group = attention.heads.num_query_heads / num_heads;
  // Several heads in a tile, but no fewer tiles than pieces that the threads share.
  const int64_t most = step.num_seqs * num_heads / team_.most_pieces();
  // Query heads of one KV head are divided if they are many, or if some threads would have no tile.
  const int64_t some_tiles = std::max(step.num_seqs, step.num_tokens / kTileTokens);
  const int64_t parts = num_heads == 1 ? (team_.num_threads() + some_tiles - 1) / some_tiles : 1;
  const int64_t share = std::max((group + parts - 1) / parts, std::min(group, kHeadsTogether));
  tiles_.clear();
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    for (int64_t first = step.query_starts[seq]; first < step.query_starts[seq + 1]; first += kTileTokens) {
      const int64_t left = step.query_starts[seq + 1] - first, count = left < kTileTokens ? left : kTileTokens;
      const int64_t together = std::clamp<int64_t>(most, 1, kTileTokens / count);
      const int64_t queries = group <= kTileHeads ? share : std::min(share, std::min(kTileHeads, kTileRows / count));
      for (int64_t head = 0; head < num_heads; head += queries < group ? 1 : together) {
        const int64_t heads = queries < group ? 1 : std::min(together, num_heads - head);
        for (int64_t query = 0; query < group; query += queries) {
          tiles_.push_back({seq, first, count, head, heads, query, std::min(queries, group - query)});
        }
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
void Engine::convolve(const Convolution<T>& given) {
  team_.run({{given.num_items(), [&](int64_t begin, int64_t end, int) { kernels<T>().convolve(given, begin, end); }}});
}

template <typename T>
void Engine::add_recurring(std::vector<Phase>& phases, const Recurrence<T>& recurrence) {
  const Kernels<T>& kernel = kernels<T>();
  float* keys = keys_.of<float>(2 * recurrence.num_keys() + recurrence.num_decays());
  const HeadsOfTokens heads = {keys, keys + recurrence.num_keys(), keys + 2 * recurrence.num_keys()};
  phases.push_back({recurrence.num_tokens() * recurrence.num_groups, [&kernel, &recurrence, heads](int64_t begin, int64_t end, int) {
                      kernel.prepare_heads(recurrence, heads, begin, end);
                    }});
  phases.push_back({recurrence.num_items(), [&kernel, &recurrence, heads](int64_t begin, int64_t end, int) {
                      kernel.recur(recurrence, heads, begin, end);
                    }});
}

template <typename T>
void Engine::recur(const Recurrence<T>& given) {
  std::vector<Phase> phases;
  add_recurring(phases, given);
  team_.run(phases);
}

template <typename T>
Product<T> Engine::adding(const Layer<T>& layer, const PackedWeight<T>& weight, const Norm& after_norm,
                          const T* input, int64_t num_tokens, T* hidden) {
  Product<T> product = {input, num_tokens, weight, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (after_norm.weight != nullptr || layer.is_shard) {
    product.float_output = added_.of<float>(num_tokens * layer.hidden_size);
  } else {
    product.residual = product.output = hidden;
    product.multiplier = layer.residual_multiplier;
  }
  return product;
}

template <typename T>
void Engine::add_recurrence(std::vector<Phase>& phases, Recurring<T>& recurring, const Halves<T>* halves) {
  const Kernels<T>& kernel = kernels<T>();
  const int64_t num_tokens = recurring.to_steps.num_rows;
  if (halves == nullptr || halves->is_first) {
    add_product(phases, recurring.to_steps);
    phases.push_back({num_tokens, [&recurring](int64_t begin, int64_t end, int) {
                        const RecurrentMixer<T>& mixer = *recurring.mixer;
                        const int64_t num = mixer.num_heads;
                        for (int64_t item = begin * num; item < end * num; ++item) {
                          const int64_t head = item % num;
                          const float* steps = recurring.to_steps.float_output + item / num * 2 * num;
                          const float size = steps[num + head] + mixer.decay_biases[head];
                          const float softplus = size > 20 ? size : std::log1p(std::exp(size));
                          recurring.beta[item] = 1 / (1 + std::exp(-steps[head]));
                          recurring.log_decay[item] = mixer.decay_factors[head] * softplus;
                        }
                      }});
  }
  if (halves == nullptr) {
    phases.push_back({recurring.convolution.num_items(), [&](int64_t begin, int64_t end, int) {
                        kernel.convolve(recurring.convolution, begin, end);
                      }});
    add_recurring(phases, recurring.recurrence);
  }
  if (halves == nullptr || !halves->is_first) {
    phases.push_back({num_tokens * recurring.gated.num_heads, [&](int64_t begin, int64_t end, int) {
                        kernel.normalize_gated(recurring.gated, begin, end);
                      }});
  }
}

template <typename T>
void Engine::run(const Layer<T>& layer, const Step& step, const Angles& angles, const Cache<T>& cache, T* hidden,
                 T* mlp_input, const Halves<T>* halves) {
  const Kernels<T>& kernel = kernels<T>();
  const HeadShape& heads = layer.heads;
  Rotation rotation = layer.rotation;
  rotation.angles = angles;
  const int64_t num_tokens = step.num_tokens, size = layer.hidden_size;
  const int64_t num_heads = num_tokens * (heads.num_query_heads + 2 * heads.num_kv_heads);

  T* normed = normed_.of<T>(num_tokens * size);
  float* rows = rows_.of<float>(num_tokens * heads.row_size());
  const int64_t attended_size = layer.attention_output.num_inputs;
  T* attended = attended_.of<T>(num_tokens * attended_size);
  T* activated = activated_.of<T>(num_tokens * layer.gate_up.num_outputs / 2);
  if (mlp_input == nullptr) mlp_input = normed;
  T* attention_input = layer.mlp_is_parallel ? mlp_input : normed;
  const T* to_attend = layer.attention_norm.weight != nullptr ? attention_input : hidden;
  const T* to_activate = layer.mlp_is_parallel || layer.mlp_norm.weight != nullptr ? mlp_input : hidden;

  const Attention<T> attention = {heads, layer.attention, step, cache, rows, heads.row_size(), attended};
  Product<T> to_rows = {to_attend, num_tokens, layer.query_key_value, nullptr, nullptr, rows, nullptr, nullptr};
  const RecurrentMixer<T>& mixer = layer.recurrent;
  Recurring<T> recurring = {};
  if (mixer.num_heads != 0) {
    const int64_t channels = mixer.num_channels(), queries = mixer.num_groups * mixer.key_dim;
    const int64_t num_steps = num_tokens * mixer.num_heads, stride = layer.query_key_value.num_outputs;
    T* projected = halves != nullptr ? halves->projected : projected_.of<T>(num_tokens * stride);
    T* convolved = convolved_.of<T>(num_tokens * channels);
    float* steps = steps_.of<float>(4 * num_steps);
    float* recurred = recurred_.of<float>(num_tokens * attended_size);
    to_rows.output = projected;
    to_rows.float_output = nullptr;
    recurring.mixer = &mixer;
    recurring.log_decay = halves != nullptr ? halves->log_decay : steps + 2 * num_steps;
    recurring.beta = halves != nullptr ? halves->beta : steps + 3 * num_steps;
    recurring.to_steps = {to_attend, num_tokens, mixer.steps, nullptr, nullptr, steps, nullptr, nullptr};
    recurring.convolution = {step.states, cache.channels, channels, mixer.num_columns, projected, stride,
                             mixer.convolution, mixer.convolution_bias, mixer.is_activated, convolved};
    recurring.recurrence = {step.states, cache.rows, mixer.num_heads, mixer.num_groups, mixer.key_dim, mixer.value_dim,
                            convolved, channels, convolved + queries, channels, convolved + 2 * queries, channels,
                            recurring.log_decay, false, recurring.beta, true, mixer.scaling, recurred};
    recurring.gated = {halves != nullptr ? halves->recurred : recurred, mixer.norm, projected + channels, stride,
                       mixer.num_heads, mixer.value_dim, attended};
  }
  Product<T> from_attention =
      adding(layer, layer.attention_output, layer.after_attention_norm, attended, num_tokens, hidden);
  Product<T> to_mlp = {to_activate, num_tokens, layer.gate_up, nullptr, activated, nullptr, nullptr, nullptr};
  Product<T> from_mlp = adding(layer, layer.down, layer.after_mlp_norm, activated, num_tokens, hidden);

  reserve(layer, num_tokens);
  std::vector<Phase> phases;
  phases.reserve(Team::kMostPhases);
  // What is between two products: the sums of the one, unless it added them itself, and the input of the other.
  const auto add_norms = [&](const Norm& after, const float* added, const Norm& before, T* out) {
    if (added == nullptr && before.weight == nullptr) return;
    phases.push_back({num_tokens, [&kernel, &layer, &after, added, &before, hidden, out, size](int64_t begin, int64_t end, int) {
                        if (after.weight != nullptr) {
                          kernel.add_normalized(added, hidden, after, size, begin, end);
                        } else if (added != nullptr) {
                          kernel.add(added, hidden, layer.residual_multiplier, size, begin, end);
                        }
                        if (before.weight != nullptr) kernel.normalize(hidden, out, before, size, begin, end);
                      }});
  };
  const auto add_reduce = [&](float* added) {
    if (!layer.is_shard) return;
    phases.push_back({1, [this, added, num_tokens, size](int64_t, int64_t, int) {
                        reduce_(context_, added, num_tokens * size);
                      }});
  };
  const Norm none = {};
  const bool is_first_half = halves != nullptr && halves->is_first, begins = halves == nullptr || is_first_half;
  if (begins) {
    add_norms(none, nullptr, layer.attention_norm, attention_input);
    add_product(phases, to_rows);
  }
  if (mixer.num_heads != 0) add_recurrence(phases, recurring, halves);
  if (is_first_half) {
    team_.run(phases);
    return;
  }
  if (layer.all_queries_norm.weight != nullptr || layer.all_keys_norm.weight != nullptr) {
    phases.push_back({2 * num_tokens, [&](int64_t begin, int64_t end, int) {
                        kernel.normalize_all_heads(rows, heads, layer.all_queries_norm, layer.all_keys_norm, begin, end);
                      }});
  }
  if (mixer.num_heads == 0) {
    phases.push_back({num_heads, [&](int64_t begin, int64_t end, int) {
                        kernel.rotate_and_write(rows, attention, rotation, begin, end);
                      }});
    phases.push_back(attending(attention));
  }
  if (heads.is_gated) {
    phases.push_back({num_tokens, [&](int64_t begin, int64_t end, int) {
                        kernel.weigh(rows, heads, attended, begin, end);
                      }});
  }
  add_product(phases, from_attention);
  add_reduce(from_attention.float_output);
  add_norms(layer.after_attention_norm, from_attention.float_output, layer.mlp_norm, mlp_input);
  if (layer.has_mlp()) {
    add_product(phases, to_mlp);
    add_product(phases, from_mlp);
    add_reduce(from_mlp.float_output);
    add_norms(layer.after_mlp_norm, from_mlp.float_output, none, nullptr);
  }
  team_.run(phases);
}

template <typename T>
void Engine::run_all(const Stack<T>& stack, const Step& step, const Angles& angles, const Cache<T>* caches,
                     T* hidden) {
  for (int64_t i = 0; i < stack.num_layers; ++i) {
    __atomic_add_fetch(stack.num_begun, 1, __ATOMIC_RELAXED);
    run<T>(*stack.layers[i], step, angles, caches[i], hidden, nullptr, nullptr);
  }
  team_.run({{step.num_tokens, [&](int64_t begin, int64_t end, int) {
                kernels<T>().normalize(hidden, hidden, stack.norm, stack.hidden_size, begin, end);
              }}});
}

template void Engine::multiply(Product<Bf16>);
template void Engine::multiply(Product<float>);
template void Engine::attend(const Attention<Bf16>&);
template void Engine::attend(const Attention<float>&);
template void Engine::convolve(const Convolution<Bf16>&);
template void Engine::convolve(const Convolution<float>&);
template void Engine::recur(const Recurrence<Bf16>&);
template void Engine::recur(const Recurrence<float>&);
template void Engine::run(const Layer<Bf16>&, const Step&, const Angles&, const Cache<Bf16>&, Bf16*, Bf16*,
                          const Halves<Bf16>*);
template void Engine::run(const Layer<float>&, const Step&, const Angles&, const Cache<float>&, float*, float*,
                          const Halves<float>*);
template void Engine::run_all(const Stack<Bf16>&, const Step&, const Angles&, const Cache<Bf16>*, Bf16*);
template void Engine::run_all(const Stack<float>&, const Step&, const Angles&, const Cache<float>*, float*);

}  // namespace tokenyard
