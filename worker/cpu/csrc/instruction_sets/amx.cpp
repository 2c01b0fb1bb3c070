// The kernels of avx512_bf16.cpp with other products of plain bf16 weights and of whole numbers: by tiles of 16 rows
// and 16 columns. They are taken where a trial and a measurement at load say so (cpu/arithmetic.py).
//
// A block of a packed weight is what tiles are loaded from: a row of it has four bytes for each of 32 columns, two bf16
// or four whole numbers. A row of a tile of sums depends on that row of the inputs alone, so that neither the rows beside
// it nor the tile that it falls into change a bit.
#include "kernels.h"

#if defined(TOKENYARD_X86) && __GNUC__ >= 11
#include <algorithm>
#include <type_traits>

#define TOKENYARD_AVX512 amx
#include "instruction_sets/avx512_impl.h"

#if !defined(TOKENYARD_TILES)
#define TOKENYARD_TILES "instruction_sets/tiles.h"
#endif
#include TOKENYARD_TILES

namespace tokenyard::amx {

constexpr int64_t kTileSize = 16;  // rows, and columns of four bytes
constexpr int64_t kTileBytes = 64;
constexpr int64_t kBlockBytes = kColumns * 4;  // of a row of a block

// Weights that rows of tiles read again and again: what a core has in its second cache, with room for the rows.
constexpr int64_t kNearBytes = 1 << 20;

// Tiles 0 to 3 are sums, 4 and 5 inputs of rows, 6 and 7 weights.
class Configured {
 public:
  explicit Configured(int64_t num_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = kTileBytes;
      shapes.num_rows[tile] = static_cast<uint8_t>(tile < 6 ? num_rows : kTileSize);
    }
    configure_tiles(shapes);
  }
  ~Configured() { release_tiles(); }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

template <typename X>
struct Operands;

template <>
struct Operands<Bf16> {
  using Sums = Floats;
  static const void* input(const Product<Bf16>& product) { return product.input; }
  static int64_t row_stride(const Product<Bf16>& product) { return product.input_stride; }
  static const void* weight(const Product<Bf16>& product) { return product.weight.data; }
  static Floats number(const Product<Bf16>&, int64_t, int64_t, Floats sums) { return sums; }

  template <int S, int Left, int Right>
  static void add() {
    add_bf16_product<S, Left, Right>();
  }
};

template <>
struct Operands<uint8_t> {
  using Sums = Ints;
  static const void* input(const Product<Bf16>& product) { return product.bytes; }
  static int64_t row_stride(const Product<Bf16>& product) { return product.bytes_stride; }
  static const void* weight(const Product<Bf16>& product) { return product.weight.bytes; }
  static Floats number(const Product<Bf16>& product, int64_t row, int64_t column, Ints sums) {
    return scaled(product, row, column, sums);
  }

  template <int S, int Left, int Right>
  static void add() {
    add_byte_product<S, Left, Right>();
  }
};

// Rows and blocks from where a step of 64 bytes of each row begins.
struct TileStep {
  const uint8_t* rows[2];  // of each tile
  int64_t row_stride;
  const uint8_t* blocks;
  int64_t block_stride;
};

// R tiles of rows times B blocks of two tiles, which are two of one of them and one of the other, or one of both.
template <typename X, int R, int B>
inline void add_step(const TileStep& step) {
  static_assert(R * B <= 2);
  load_tile<4>(step.rows[0], step.row_stride);
  if constexpr (R == 2) load_tile<5>(step.rows[1], step.row_stride);
  load_tile<6>(step.blocks, kBlockBytes);
  load_tile<7>(step.blocks + kTileBytes, kBlockBytes);
  Operands<X>::template add<0, 4, 6>();
  Operands<X>::template add<1, 4, 7>();
  if constexpr (R == 2) {
    Operands<X>::template add<2, 5, 6>();
    Operands<X>::template add<3, 5, 7>();
  }
  if constexpr (B == 2) {
    load_tile<6>(step.blocks + step.block_stride, kBlockBytes);
    load_tile<7>(step.blocks + step.block_stride + kTileBytes, kBlockBytes);
    Operands<X>::template add<2, 4, 6>();
    Operands<X>::template add<3, 4, 7>();
  }
}

// The step of the inputs that are left over: fewer than 64 bytes, and zeros.
template <typename X, int R, int B>
inline void add_last_step(const TileStep& step, int64_t size, int64_t num_rows) {
  alignas(64) uint8_t rows[R][kTileSize][kTileBytes] = {};
  alignas(64) uint8_t blocks[B][kTileSize][kBlockBytes] = {};
  for (int tile = 0; tile < R; ++tile) {
    for (int64_t m = 0; m < num_rows; ++m) {
      __builtin_memcpy(rows[tile][m], step.rows[tile] + m * step.row_stride, static_cast<size_t>(size));
    }
  }
  for (int b = 0; b < B; ++b) {
    __builtin_memcpy(blocks[b], step.blocks + b * step.block_stride, static_cast<size_t>(size / 4 * kBlockBytes));
  }
  add_step<X, R, B>({{rows[0][0], rows[R - 1][0]}, kTileBytes, blocks[0][0], sizeof blocks[0]});
}

// Rows from `row` on, as many as R tiles have or there are, times B blocks. The last tile of a product ends with its last
// row: it may begin with rows of the tile before, whose sums are not looked at again.
template <typename X, int R, int B>
inline void multiply_tiles(const Product<Bf16>& product, int64_t row, int64_t block) {
  const int64_t num_rows = product.num_rows, end = std::min(row + R * kTileSize, num_rows);
  const int64_t size = product.weight.num_inputs * static_cast<int64_t>(sizeof(X));  // bytes of a row
  const int64_t tile_rows = std::min(num_rows, kTileSize);
  const int64_t first[] = {std::min(row, num_rows - tile_rows), std::min(row + kTileSize, num_rows - tile_rows)};
  for (int64_t m = row; m < end; ++m) fetch_updates<1, B>(product, m, block);

  const uint8_t* input = static_cast<const uint8_t*>(Operands<X>::input(product));
  const uint8_t* weight = static_cast<const uint8_t*>(Operands<X>::weight(product));
  const int64_t stride = size / 4 * kBlockBytes;
  const int64_t row_stride = Operands<X>::row_stride(product) * static_cast<int64_t>(sizeof(X));
  TileStep step = {{input + first[0] * row_stride, input + first[1] * row_stride}, row_stride, weight + block * stride, stride};
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  int64_t left = size;
  for (; left >= kTileBytes; left -= kTileBytes) {
    add_step<X, R, B>(step);
    for (const uint8_t*& rows : step.rows) rows += kTileBytes;
    step.blocks += kTileSize * kBlockBytes;
  }
  if (left > 0) add_last_step<X, R, B>(step, left, tile_rows);

  typename Operands<X>::Sums sums[R * kTileSize][B * kParts];
  constexpr int64_t kStride = sizeof sums[0];
  store_tile<0>(&sums[0][0], kStride), store_tile<1>(&sums[0][1], kStride);
  if constexpr (R == 2) store_tile<2>(&sums[kTileSize][0], kStride), store_tile<3>(&sums[kTileSize][1], kStride);
  if constexpr (B == 2) store_tile<2>(&sums[0][2], kStride), store_tile<3>(&sums[0][3], kStride);
  for (int64_t m = row; m < end; ++m) {
    const int64_t tile = (m - row) / kTileSize, at = tile * kTileSize + m - first[tile];
    for (int b = 0; b < B; ++b) {
      Floats numbers[kParts];
      for (int part = 0; part < kParts; ++part) {
        numbers[part] = Operands<X>::number(product, m, (block + b) * kColumns + part * kV, sums[at][b * kParts + part]);
      }
      finish_row(product, m, block + b, numbers);
    }
  }
}

template <typename X>
void multiply_by_tiles(const Product<Bf16>& product, int64_t begin, int64_t end) {
  const int64_t num_rows = product.num_rows;
  if (num_rows == 0) return;  // there are no tiles of no rows
  const Configured configured(std::min(num_rows, kTileSize));
  if (num_rows <= kTileSize) {
    for (; begin + 2 <= end; begin += 2) multiply_tiles<X, 1, 2>(product, 0, begin);
    if (begin < end) multiply_tiles<X, 1, 1>(product, 0, begin);
    return;
  }
  const int64_t block_bytes = product.weight.num_inputs * static_cast<int64_t>(sizeof(X)) * kColumns;
  const int64_t together = std::max<int64_t>(kNearBytes / block_bytes, 1);
  for (; begin < end; begin += together) {
    const int64_t near_end = std::min(begin + together, end);
    for (int64_t row = 0; row < num_rows; row += 2 * kTileSize) {
      for (int64_t block = begin; block < near_end; ++block) {
        if (num_rows - row > kTileSize) {
          multiply_tiles<X, 2, 1>(product, row, block);
        } else {
          multiply_tiles<X, 1, 1>(product, row, block);
        }
      }
    }
  }
}

void multiply_plain_or_whole(const Product<Bf16>& product, int64_t begin, int64_t end) {
  if (product.weight.grouped.data != nullptr) return avx512_kernels()->bf16.multiply(product, begin, end);
  if (product.weight.bytes != nullptr) return multiply_by_tiles<uint8_t>(product, begin, end);
  multiply_by_tiles<Bf16>(product, begin, end);
}

}  // namespace tokenyard::amx

#pragma GCC pop_options

namespace tokenyard {
const AllKernels* amx_kernels() {
  static const bool can = avx512_kernels() != nullptr && amx::has_tiles();
  if (!can) return nullptr;
  static const AllKernels all = with_products(*avx512_kernels(), "amx", amx::multiply_plain_or_whole);
  return &all;
}
}  // namespace tokenyard
#else
namespace tokenyard {
const AllKernels* amx_kernels() { return nullptr; }
}  // namespace tokenyard
#endif
