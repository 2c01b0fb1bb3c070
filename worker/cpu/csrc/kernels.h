// What the computing files offer and what they are told: plain pointers and sizes, no torch.
//
// Owns: the arguments of every kernel, and the table of one instruction set's kernels for one dtype.
// Never: memory, threads, or the order of a layer (layer.cpp).
//
// Shapes: T tokens, R sequences, K inputs and N outputs of a product, H numbers of a hidden state, Hq query
// and Hk KV heads, D size of a key, V size of a value, S block size.
#pragma once

#include <cstdint>

// Instructions of x86 are known to be compiled right by GCC alone. Sets that the processor does not take are left out.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(TOKENYARD_LEFT_OUT)
#define TOKENYARD_X86
#endif

namespace tokenyard {

struct Bf16 {
  uint16_t bits;
};

// Columns of a packed weight that stand together: two of the widest vectors.
constexpr int kColumns = 32;

enum class Activation : int { kNone, kSilu, kGeluTanh };

// Sums over inputs of more than so many are cut: decoded columns of one run fit into the nearest cache.
constexpr int64_t kRunInputs = 256;

enum class CodeKind : int { kNibbles, kInt8, kFloat8, kFiveBits, kSixBits };

// Bytes are multiples of a unit of so many inputs.
constexpr int64_t kUnitInputs = 256;

// Numbers by output and group in one of several forms, so that those of a checkpoint take no more memory than there.
enum class NumberForm : int { kFloat, kHalf, kBf16, kBytes, kTimesScale };

struct GroupNumbers {
  const void* data;  // [N / 32][K / group_size][32]; null: there are none
  NumberForm form;
  const uint16_t* units;  // of bytes: half [N / 32][K / kUnitInputs][32], by which they are multiplied
};

// A weight as codes with scales of groups of inputs: of output n and input k it is
// number(code[n, k]) * scales[n, k / group_size] - offsets[n, k / group_size].
//
// Codes are packed for what they are multiplied by, see packing/grouped_packing.py. Nibbles stand for the 16
// numbers of `table`, int8 and float8 (e4m3) for themselves, codes of 5 and 6 bits for numbers that are `shift` less.
struct GroupedCodes {
  const uint8_t* data;  // null: the weight has no codes
  CodeKind kind;
  bool takes_bytes;  // inputs are whole numbers, as `prepare` makes them
  int64_t group_size;
  const float* table;  // [16], nibbles only
  // How instructions for bytes look up: for bf16 inputs the 16 numbers twice as bf16, or the lower bytes of the
  // 256 (or 64) numbers as bf16, then the upper ones. For whole inputs 16 bytes, which are `shift` too large.
  const uint8_t* lookup;
  int32_t shift;
  GroupNumbers scales;
  GroupNumbers offsets;        // or none; kTimesScale: bytes times the scale
  const int32_t* permutation;  // [K]: where input k of the codes is in a row; or null

  int64_t runs_in_group() const { return (group_size + kRunInputs - 1) / kRunInputs; }
};

// Of a run of whole inputs: where its sums begin, and the float that those bits are for a sum of 0. One unit in the
// last place of that float is what a unit of the run is worth, so that subtracting it converts and scales a sum.
struct RunStart {
  int32_t bits;
  float zero;
};

// Half a block of outputs: where the part of `up` for them begins, and the ranks that they have numbers of.
struct AdapterUnit {
  int64_t offset;
  int32_t begin;
  int32_t end;
};

constexpr int kUnitColumns = 16;

// The updates of one adapter for a weight, side by side: input @ down^T, each rank times its scale, @ up^T.
template <typename T>
struct AdapterSlot {
  const T* down;             // [R, K]; null: this adapter has no update of this weight
  const T* up;               // of each unit [end - begin, 16]
  const AdapterUnit* units;  // [N / 16]
  const float* scales;       // [R]
  int64_t num_ranks;
};

struct StepAdapters {
  const int32_t* slots;  // [T], -1 standing for no adapter; null: no token of the step has one
};

template <typename T>
struct Adapters {
  const StepAdapters* step;
  const AdapterSlot<T>* slots;
  int64_t max_ranks;  // of any slot
};

// A weight [N, K], packed as [N / 32][K / step][32][step], step being 2 for bf16 and 1 for float32; what is
// missing to 32 columns is zero. With an activation, of each 32 columns the first 16 are gates and the others
// the ups that they weigh.
template <typename T>
struct PackedWeight {
  const T* data;
  const float* bias;  // [N to the next 32], or null
  int64_t num_inputs;
  int64_t num_outputs;
  Activation activation;
  // Instead of `data`, whole numbers [N / 32][K / 4][32][4], each column's scale, and 128 times its sum: inputs
  // are whole numbers too, shifted by 128 so that they are not negative. Null: the weight is not quantized.
  const int8_t* bytes;
  const float* scales;
  const int32_t* offsets;
  GroupedCodes grouped;  // instead of `data` and `bytes`
  const Adapters<T>* adapters;  // or null

  bool takes_bytes() const { return bytes != nullptr || (grouped.data != nullptr && grouped.takes_bytes); }
  int64_t num_runs() const { return num_inputs / grouped.group_size * grouped.runs_in_group(); }
  int64_t num_blocks() const { return (num_outputs + kColumns - 1) / kColumns; }
  bool is_adapted() const { return adapters != nullptr && adapters->step->slots != nullptr && adapters->max_ranks > 0; }
};

// x @ weight^T for all rows. Each output is summed in the order of K, however many rows there are: no row's
// result depends on its neighbours.
template <typename T>
struct Product {
  const T* input;  // [T, K]
  int64_t num_rows;
  PackedWeight<T> weight;
  const T* residual;    // [T, N], added; or null. May be the output itself
  T* output;            // [T, N], or [T, N / 2] with an activation; or null
  float* float_output;  // [T, N], where the output is not to be rounded; or null
  // The input as `quantize` makes it, or `prepare` for grouped codes: then with a sign. Read if the weight takes bytes.
  const uint8_t* bytes;  // [T, K], rows `bytes_stride` apart
  const float* scales;   // [T]
  float multiplier = 1;  // of the sums, before the residual is added; not with an activation
  const float* run_sums = nullptr;  // [num_runs, T] of the input; read where grouped codes have offsets
  const float* shrunk = nullptr;    // [T, max_ranks], as `shrink` makes them; null: the step has no adapters
  const RunStart* run_starts = nullptr;  // [num_runs, T]; read where grouped codes take bytes
  // Numbers from one row of `input`, or of `bytes`, to the next: K, or more where rows are spread. The engine says.
  int64_t input_stride = 0;
  int64_t bytes_stride = 0;
};

// Groups of up to so many inputs are scaled so often that fewer rows are multiplied side by side.
constexpr int64_t kSmallGroup = 256;

// Bytes from one row to the next, for rows of so many bytes. Those that are a multiple of a way of the nearest cache apart
// fall on the same few lines of it, and push one another out while more are multiplied side by side than it has ways.
constexpr int64_t kLineBytes = 64, kWayBytes = 4096, kWays = 8;
constexpr int64_t spread(int64_t row_bytes) { return row_bytes % kWayBytes == 0 ? row_bytes + kLineBytes : row_bytes; }

// Memory for a product's input in another form.
template <typename T>
struct Prepared {
  T* permuted;     // [T, K]
  uint8_t* bytes;  // [T, K], rows `bytes_stride` apart
  int64_t bytes_stride;
  float* scales;  // [T]
  T* copy;        // of the input [T, K], rows `copy_stride` apart
  int64_t copy_stride;
  float* run_sums;
  float* shrunk;  // [T, max_ranks]
  RunStart* run_starts;
};

// x * rsqrt(mean(x^2) + epsilon) * weight, over the last dimension; with a bias, of x - mean(x), and plus bias.
struct Norm {
  const float* weight;  // null: there is no such norm
  float epsilon;
  const float* bias;  // or null
};

struct HeadShape {
  int64_t num_query_heads;
  int64_t num_kv_heads;
  int64_t key_dim;
  int64_t value_dim;  // with gates, as large as keys
  bool is_gated;      // behind all queries stand as many gates, which weigh what attention gives

  int64_t queries_size() const { return num_query_heads * key_dim * (is_gated ? 2 : 1); }
  // Numbers of a token's queries, keys and values, side by side.
  int64_t row_size() const { return queries_size() + num_kv_heads * (key_dim + value_dim); }
};

// Of a step's positions.
struct Angles {
  const float* cosines;  // [T, rotated_dim], or [P, rotated_dim] of all positions; null: no rotation
  const float* sines;
  const int64_t* positions;  // [T]; null: there is a row for each token

  int64_t row_of(int64_t token) const { return positions == nullptr ? token : positions[token]; }
};

// What happens to queries and keys between their product and attention.
struct Rotation {
  Norm query_norm;  // per head
  Norm key_norm;    // per head
  Angles angles;
  int64_t rotated_dim;  // the first so many numbers of a head are rotated, by halves
};

// Neighbouring rows of a state, or channels of a convolution, in one block of a sequence.
struct StateRun {
  int64_t first;
  int64_t length;
  int64_t stripe;  // which of the sequence's blocks
  int64_t offset;  // bytes
};

// The pages of one layer's keys or values: block b and head h at data + b * block_stride + h * S * row_stride.
template <typename T>
struct Pages {
  T* data;
  int64_t block_stride;
  int64_t row_stride;  // from one token to the next: D, or that of keys where values are a part of them
};

template <typename T>
struct Cache {
  Pages<T> keys;
  Pages<T> values;
  int64_t stripe;  // the table of blocks that the layer's tokens are in
  const StateRun* channels;  // of a recurrent layer, the places of its state
  const StateRun* rows;
};

// One step, as recurrent layers see it.
struct StateStep {
  uint8_t* pool;
  int64_t block_bytes;
  const int64_t* block_ids;  // [R, num_stripes]
  int64_t num_stripes;
  const int64_t* query_starts;  // [R + 1]
  const bool* is_first;         // [R]: the sequence begins, whatever its blocks contain
  int64_t num_seqs;
  bool keeps_states;  // else blocks stay as they are
};

// One step, as attention sees it.
struct Step {
  const int64_t* query_starts;  // [R + 1]
  const int64_t* seq_lens;      // [R], after this step
  const int32_t* block_tables;  // [stripes, num_rows, table_size]
  const int64_t* table_rows;    // [R]
  int64_t num_rows;
  int64_t table_size;
  const int64_t* token_blocks;   // [stripes, T]
  const int64_t* token_offsets;  // [T]
  int64_t num_seqs;
  int64_t num_tokens;
  int64_t block_size;
  const int64_t* ends_seen;  // [T], or null: where a token sees later ones of its picture, the end of what it sees
  int64_t ends_in_windows_only;
  StateStep states;

  const int64_t* ends_seen_by(int64_t window) const { return window || !ends_in_windows_only ? ends_seen : nullptr; }
  const int32_t* table_of(int64_t stripe, int64_t seq) const {
    return block_tables + (stripe * num_rows + table_rows[seq]) * table_size;
  }
};

struct AttentionOptions {
  float scaling;
  int64_t window;      // 0: none; else a token sees itself and the window - 1 before it
  float softcap;       // 0: none
  const float* sinks;  // [Hq], or null
};

template <typename T>
struct Attention {
  HeadShape heads;
  AttentionOptions options;
  Step step;
  Cache<T> cache;
  const float* queries;  // of token t and head h at queries + t * query_stride + h * D
  int64_t query_stride;
  T* output;  // [T, Hq, V]
};

// Consecutive queries of one sequence, for some KV heads.
struct AttentionTile {
  int64_t seq;
  int64_t first_token;  // of the step
  int64_t num_tokens;
  int64_t kv_head;
  int64_t num_kv_heads;
  int64_t first_query_head;  // of those of a KV head: all of them, unless the tile has one KV head
  int64_t num_query_heads;
};

// More queries of a tile share the loads of a page; fewer fit the cache better. Of a few tokens a tile has several
// heads, whose pages lie side by side: as many as there are tokens in others.
constexpr int64_t kTileTokens = 8;

// Query heads of one KV head that share its loads; more are divided among tiles. Rows are tokens times heads.
constexpr int64_t kTileHeads = 16, kTileRows = 64, kHeadsTogether = 4;

// Keys between two looks at how high the scores are: many, for that look is a chain of waits.
constexpr int64_t kSpanKeys = 64;

// Floats that `attend` needs for itself.
template <typename T>
int64_t attention_scratch_size(const Attention<T>& attention) {
  const int64_t keys = (attention.step.block_size + 15) / 16 * 16;
  const HeadShape& heads = attention.heads;
  const int64_t group = heads.num_query_heads / heads.num_kv_heads;
  const int64_t rows = kTileTokens * (group < kTileHeads ? group : kTileHeads);
  return rows * ((keys > kSpanKeys ? keys : kSpanKeys) + heads.value_dim + 2) + keys * heads.key_dim;
}

// Channels and rows of an item of work, and the most earlier inputs of a convolution.
constexpr int64_t kChannelsTogether = 16, kRowsTogether = 32, kMostColumns = 8;

// Each channel by itself over its last inputs, of which those of earlier steps are kept: [columns][channels] of a run.
template <typename T>
struct Convolution {
  StateStep step;
  const StateRun* runs;
  int64_t num_channels;  // a multiple of kChannelsTogether
  int64_t num_columns;   // of earlier inputs
  const T* input;        // of token t from t * input_stride on
  int64_t input_stride;
  const float* weight;  // [num_columns + 1, C]
  const float* bias;    // [C], or null
  bool is_activated;    // by SiLU
  T* output;            // [T, C]

  int64_t num_parts() const { return num_channels / kChannelsTogether; }
  int64_t num_items() const { return step.num_seqs * num_parts(); }
};

constexpr float kLengthEpsilon = 1e-6f;

// Of each head a state [V][K], which a token changes and reads. Heads of a group have one key and one query.
template <typename T>
struct Recurrence {
  StateStep step;
  const StateRun* runs;
  int64_t num_heads;
  int64_t num_groups;
  int64_t key_dim;
  int64_t value_dim;
  const T* queries;  // [T, G, K], tokens `query_stride` apart
  int64_t query_stride;
  const T* keys;
  int64_t key_stride;
  const T* values;  // [T, H, V]
  int64_t value_stride;
  const float* log_decay;  // [T, H], or [T, H, K]
  bool decays_by_number;  // of the key
  const float* beta;      // [T, H]; null: no delta rule
  bool has_unit_keys;
  float scaling;  // of queries
  float* output;  // [T, H, V]

  int64_t num_tokens() const { return step.query_starts[step.num_seqs]; }
  int64_t num_keys() const { return num_tokens() * num_groups * key_dim; }
  int64_t num_decays() const { return num_tokens() * num_heads * (decays_by_number ? key_dim : 1); }
  int64_t num_parts() const { return (value_dim + kRowsTogether - 1) / kRowsTogether; }
  int64_t num_items() const { return step.num_seqs * num_heads * num_parts(); }
};

// Inputs of a recurrence as every row of a state takes them.
struct HeadsOfTokens {
  float* keys;  // [T, G, K]
  float* queries;
  float* decays;  // as the logarithms
};

// Heads [T, H, V] that are normed each by itself, then weighed by the SiLU of gates.
template <typename T>
struct GatedHeads {
  const float* heads;
  Norm norm;
  const T* gates;  // of a token side by side, tokens `gate_stride` apart
  int64_t gate_stride;
  int64_t num_heads;
  int64_t dim;
  T* output;  // [T, H, V]
};

// Ranks that are computed together: their sums share the loads of the row.
constexpr int64_t kRanksTogether = 8;

template <typename T>
int64_t shrink_items(const PackedWeight<T>& weight) {
  return (weight.adapters->max_ranks + kRanksTogether - 1) / kRanksTogether;
}

template <typename T>
struct Kernels {
  int most_rows;  // that are read where they lie, side by side; 0: they are brought together before
  // Rows [begin, end) of x [T, K] as whole numbers from 1 to 255, 128 standing for 0, times a scale for each row.
  void (*quantize)(const T* x, const Prepared<T>&, int64_t size, int64_t begin, int64_t end);
  // Rows [begin, end) of a product's input as its grouped codes take it.
  void (*prepare)(const Product<T>&, const Prepared<T>&, int64_t begin, int64_t end);
  // Items [begin, end) of T * shrink_items: some ranks of a row's input times the `down` of its adapter.
  void (*shrink)(const Product<T>&, float* shrunk, int64_t begin, int64_t end);
  // Blocks [begin, end) of 32 columns.
  void (*multiply)(const Product<T>&, int64_t begin, int64_t end);
  // Rows [begin, end) of x [T, H]; `out` may be `x`.
  void (*normalize)(const T* x, T* out, const Norm&, int64_t size, int64_t begin, int64_t end);
  // residual += norm(x), for x [T, H] float32.
  void (*add_normalized)(const float* x, T* residual, const Norm&, int64_t size, int64_t begin, int64_t end);
  // residual += x * multiplier, for x [T, H] float32.
  void (*add)(const float* x, T* residual, float multiplier, int64_t size, int64_t begin, int64_t end);
  // Norms that take all heads of a token as one; one without a weight does nothing. Items [begin, end) of 2 T:
  // a token's queries, then its keys.
  void (*normalize_all_heads)(float* rows, const HeadShape&, const Norm& queries, const Norm& keys, int64_t begin,
                              int64_t end);
  // Heads [begin, end) of all T * (Hq + 2 Hk): queries are changed in place, keys and values go to the cache.
  void (*rotate_and_write)(float* rows, const Attention<T>&, const Rotation&, int64_t begin, int64_t end);
  void (*attend)(const Attention<T>&, const AttentionTile&, float* scratch);
  // Tokens [begin, end) of what attention gave, weighed by the gates of `rows`.
  void (*weigh)(const float* rows, const HeadShape&, T* attended, int64_t begin, int64_t end);
  // Heads [begin, end) of all T * H of what a recurrence gave.
  void (*normalize_gated)(const GatedHeads<T>&, int64_t begin, int64_t end);
  // Items [begin, end) of a convolution: some channels of a sequence.
  void (*convolve)(const Convolution<T>&, int64_t begin, int64_t end);
  // Items [begin, end) of all T * G.
  void (*prepare_heads)(const Recurrence<T>&, const HeadsOfTokens&, int64_t begin, int64_t end);
  // Items [begin, end) of a recurrence: some rows of one head of a sequence.
  void (*recur)(const Recurrence<T>&, const HeadsOfTokens&, int64_t begin, int64_t end);
};

struct AllKernels {
  const char* name;
  Kernels<Bf16> bf16;
  Kernels<float> float32;
};

// The same kernels under another name, with other products in bf16.
inline AllKernels with_products(AllKernels kernels, const char* name, void (*multiply)(const Product<Bf16>&, int64_t, int64_t)) {
  kernels.name = name;
  kernels.bf16.multiply = multiply;
  return kernels;
}

// Null where this build or this processor has no such instructions.
const AllKernels* avx512_kernels();
const AllKernels* avx512_expanded_kernels();  // taken by name only
const AllKernels* amx_kernels();              // taken by name only
const AllKernels* avx512_vnni_kernels();
const AllKernels* avx_vnni_kernels();
const AllKernels* avx2_kernels();
const AllKernels* plain_kernels();

}  // namespace tokenyard
