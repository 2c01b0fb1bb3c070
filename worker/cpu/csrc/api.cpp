// The door for Python (worker/cpu/native.py, ctypes): C functions over the structs of kernels.h and layer.h.
//
// Nothing is checked here; native.py does. No exception leaves: 0 is success, 1 is memory that ran out.
#include <new>

#include "layer.h"
#include "ranks.h"

using namespace tokenyard;

namespace {

template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

const AllKernels* find_kernels(const char* name) {
  // One after the other: asking for the last ones asks the system for a permission.
  for (const auto find : {avx512_kernels, avx512_vnni_kernels, avx_vnni_kernels, avx2_kernels, plain_kernels,
                          avx512_expanded_kernels, amx_kernels}) {
    const AllKernels* all = find();
    if (all != nullptr && (*name == '\0' || __builtin_strcmp(name, all->name) == 0)) return all;
  }
  return nullptr;
}

}  // namespace

extern "C" {

// `name` is that of an instruction set, or empty for the best. Null if this processor lacks it.
Engine* tokenyard_open(const char* name, int num_threads) {
  const AllKernels* kernels = find_kernels(name);
  return kernels == nullptr ? nullptr : new (std::nothrow) Engine(*kernels, num_threads);
}

void tokenyard_close(Engine* engine) { delete engine; }

const char* tokenyard_name(const Engine* engine) { return engine->name(); }

// Shards of layers are summed by `reduce` from now on.
void tokenyard_divide(Engine* engine, Reduce reduce, void* context) { engine->divide(reduce, context); }

// Null if memory ran out. The page must outlive the ranks.
Ranks* tokenyard_ranks_open(void* page, int64_t page_bytes, int rank, int size) {
  return new (std::nothrow) Ranks(page, page_bytes, rank, size);
}

void tokenyard_ranks_close(Ranks* ranks) { delete ranks; }

// A Reduce.
void tokenyard_ranks_reduce(void* ranks, float* sums, int64_t count) {
  static_cast<Ranks*>(ranks)->reduce(sums, count);
}

void tokenyard_ranks_gather(Ranks* ranks, const char* own, int64_t num_rows, int64_t row_bytes, char* all) {
  ranks->gather(own, num_rows, row_bytes, all);
}

// Seconds since the ranks were opened: of all exchanges, and of waiting in them.
void tokenyard_ranks_times(const Ranks* ranks, double* exchanged_and_waited_s) {
  exchanged_and_waited_s[0] = ranks->exchanged_s();
  exchanged_and_waited_s[1] = ranks->waited_s();
}

#define TOKENYARD_API(suffix, T)                                                                              \
  int tokenyard_multiply_##suffix(Engine* engine, const Product<T>* product) {                                \
    return guarded([&] { engine->multiply(*product); });                                                      \
  }                                                                                                           \
  int tokenyard_attend_##suffix(Engine* engine, const Attention<T>* attention) {                              \
    return guarded([&] { engine->attend(*attention); });                                                      \
  }                                                                                                           \
  int tokenyard_convolve_##suffix(Engine* engine, const Convolution<T>* given) {                              \
    return guarded([&] { engine->convolve(*given); });                                                        \
  }                                                                                                           \
  int tokenyard_recur_##suffix(Engine* engine, const Recurrence<T>* given) {                                  \
    return guarded([&] { engine->recur(*given); });                                                           \
  }                                                                                                           \
  int tokenyard_run_##suffix(Engine* engine, const Layer<T>* layer, const Step* step, const Angles* angles,    \
                             const Cache<T>* cache, T* hidden, T* mlp_input, const Halves<T>* halves) {       \
    return guarded([&] { engine->run(*layer, *step, *angles, *cache, hidden, mlp_input, halves); });          \
  }                                                                                                           \
  int tokenyard_run_all_##suffix(Engine* engine, const Stack<T>* stack, const Step* step, const Angles* angles, \
                                 const Cache<T>* caches, T* hidden) {                                         \
    return guarded([&] { engine->run_all(*stack, *step, *angles, caches, hidden); });                         \
  }

TOKENYARD_API(bf16, Bf16)
TOKENYARD_API(float32, float)
}
