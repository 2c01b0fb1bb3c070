// One decoder layer over one step, and the parts of it that other layers call alone.
//
// Owns: the order of the kernels, how each is cut into items, and the memory between them.
// Never: weights, the cache or the step: all of those are the caller's.
#pragma once

#include <cstdlib>
#include <new>

#include "kernels.h"
#include "team.h"

namespace tokenyard {

// The mixer of a layer that recurs: a convolution over queries, keys and values, and the delta rule, whose outputs are
// normed by head and weighed by gates.
template <typename T>
struct RecurrentMixer {
  PackedWeight<T> steps;  // of each head how much it takes in, then how much it forgets
  const float* convolution;  // [num_columns + 1, C]
  const float* convolution_bias;  // [C], or null
  int64_t num_columns;
  bool is_activated;
  const float* decay_factors;  // [H]
  const float* decay_biases;   // [H]
  int64_t num_heads;  // 0: there is no such mixer
  int64_t num_groups;
  int64_t key_dim;
  int64_t value_dim;
  float scaling;
  Norm norm;

  int64_t num_channels() const { return 2 * num_groups * key_dim + num_heads * value_dim; }
};

// A layer in two halves, where what is between them is the caller's.
template <typename T>
struct Halves {
  bool is_first;
  T* projected;      // [T, C + H * V]: inputs of the convolution, and gates
  float* log_decay;  // [T, H]
  float* beta;       // [T, H]
  const float* recurred;  // [T, H, V], for the second half
};

// Attention or a recurrence, then a gated MLP, each added to the residual stream. A norm whose weight is null is not
// there.
template <typename T>
struct Layer {
  int64_t hidden_size;
  Norm attention_norm;
  PackedWeight<T> query_key_value;
  HeadShape heads;
  Norm all_queries_norm;  // over all heads of a token as one, before they are rotated
  Norm all_keys_norm;
  Rotation rotation;  // its angles come with the step
  AttentionOptions attention;
  PackedWeight<T> attention_output;
  Norm after_attention_norm;  // of what is added to the residual
  Norm mlp_norm;
  PackedWeight<T> gate_up;  // of no outputs: the MLP is the caller's, who adds what it gives
  PackedWeight<T> down;
  Norm after_mlp_norm;        // as after_attention_norm
  float residual_multiplier;  // of what is added to the residual and not normed
  bool mlp_is_parallel;       // it is given what attention is given
  bool is_shard;              // what it adds to the residual is a part of the sum over all ranks
  RecurrentMixer<T> recurrent;  // instead of attention, between the products of `query_key_value` and `attention_output`

  bool has_mlp() const { return gate_up.num_outputs != 0; }
};

// All layers of a model, one after another, and the norm behind the last one.
template <typename T>
struct Stack {
  const Layer<T>* const* layers;  // each with its MLP
  int64_t num_layers;
  int64_t hidden_size;
  Norm norm;
  int64_t* num_begun;  // grows with each layer, for whoever watches a long step
};

// Memory that grows to the largest use and stays: a fresh one costs page faults in every layer.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  template <typename T>
  T* of(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size_);
      if (data_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// What the phases of a layer that recurs read and write; it must outlive them.
template <typename T>
struct Recurring {
  Product<T> to_steps;
  Convolution<T> convolution;
  Recurrence<T> recurrence;
  GatedHeads<T> gated;
  const RecurrentMixer<T>* mixer;
  float* log_decay;
  float* beta;
};

// Replaces sums by those over all ranks.
using Reduce = void (*)(void* context, float* sums, int64_t count);

class Engine {
 public:
  Engine(const AllKernels& kernels, int num_threads) : kernels_(kernels), team_(num_threads) {}

  const char* name() const { return kernels_.name; }

  // Shards of layers are summed by `reduce` from now on.
  void divide(Reduce reduce, void* context) {
    reduce_ = reduce;
    context_ = context;
  }

  template <typename T>
  void multiply(Product<T> product);

  // Over queries as they are; the cache is written already.
  template <typename T>
  void attend(const Attention<T>& attention);

  template <typename T>
  void convolve(const Convolution<T>& given);

  template <typename T>
  void recur(const Recurrence<T>& given);

  // Changes `hidden` [T, H] in place. Of a layer without MLP, what the MLP is to be given comes to `mlp_input` [T, H].
  // With `halves`, one half of a layer that recurs.
  template <typename T>
  void run(const Layer<T>& layer, const Step& step, const Angles& angles, const Cache<T>& cache, T* hidden,
           T* mlp_input, const Halves<T>* halves);

  // Runs all layers, each over its own cache, and the norm. Changes `hidden` [T, H] in place.
  template <typename T>
  void run_all(const Stack<T>& stack, const Step& step, const Angles& angles, const Cache<T>* caches, T* hidden);

 private:
  template <typename T>
  const Kernels<T>& kernels() const;

  // Memory for the input of a product by this weight, as far as it needs another form.
  template <typename T>
  Prepared<T> prepared(const PackedWeight<T>& weight, int64_t num_rows);

  // The same for every product of a layer: it must not move between them.
  template <typename T>
  void reserve(const Layer<T>& layer, int64_t num_tokens);

  // Appends what a product consists of. It must outlive the phases, and it is completed here.
  template <typename T>
  void add_product(std::vector<Phase>& phases, Product<T>& product);

  template <typename T>
  Phase attending(const Attention<T>& attention);

  // Appends a recurrence. It must outlive the phases.
  template <typename T>
  void add_recurring(std::vector<Phase>& phases, const Recurrence<T>& recurrence);

  // Appends what is between the two products of a layer that recurs.
  template <typename T>
  void add_recurrence(std::vector<Phase>& phases, Recurring<T>& recurring, const Halves<T>* halves);

  // A product whose sums are added to `hidden`, by itself where nothing norms or reduces them before.
  template <typename T>
  Product<T> adding(const Layer<T>& layer, const PackedWeight<T>& weight, const Norm& after_norm, const T* input,
                    int64_t num_tokens, T* hidden);

  const AllKernels& kernels_;
  Team team_;
  Reduce reduce_ = nullptr;
  void* context_ = nullptr;
  std::vector<AttentionTile> tiles_;
  Buffer normed_, rows_, attended_, activated_, added_, scratch_, bytes_, scales_, permuted_, run_sums_, shrunk_;
  Buffer run_starts_, copy_, keys_, projected_, steps_, convolved_, recurred_;
};

}  // namespace tokenyard
