// Tiles as csrc/instruction_sets/tiles.h has them, in plain functions: what the manual says of each instruction, for any processor.
//
// A use that a processor refuses ends the program. What it says of TDPBF16PS: products of the first and of the second
// numbers of all pairs are added up apart, each by one rounding, from 0; then both sums are added, and that is added to the
// tile. Numbers too small to be normal are 0, before and after.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace tokenyard::amx {
namespace {

struct TileShapes {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

struct Tile {
  int row_bytes = 0;
  int num_rows = 0;
  uint8_t rows[16][64];
};

thread_local Tile tiles[8];

void expect(bool is_true) {
  if (!is_true) std::abort();
}

bool has_tiles() { return true; }

void configure_tiles(const TileShapes& shapes) {
  expect(shapes.palette == 1 && shapes.first_row == 0);
  for (int tile = 0; tile < 8; ++tile) {
    expect(shapes.num_rows[tile] <= 16 && shapes.row_bytes[tile] <= 64 && shapes.row_bytes[tile] % 4 == 0);
    expect((shapes.num_rows[tile] == 0) == (shapes.row_bytes[tile] == 0));
    tiles[tile] = {shapes.row_bytes[tile], shapes.num_rows[tile], {}};
  }
}

void release_tiles() { configure_tiles({}); }

Tile& configured(int tile) {
  expect(tiles[tile].num_rows > 0 && tiles[tile].row_bytes > 0);
  return tiles[tile];
}

template <int T>
void zero_tile() {
  __builtin_memset(configured(T).rows, 0, sizeof tiles[T].rows);
}

template <int T>
void load_tile(const void* from, int64_t stride) {
  zero_tile<T>();
  for (int row = 0; row < tiles[T].num_rows; ++row) {
    __builtin_memcpy(tiles[T].rows[row], static_cast<const char*>(from) + row * stride, tiles[T].row_bytes);
  }
}

template <int T>
void store_tile(void* to, int64_t stride) {
  for (int row = 0; row < configured(T).num_rows; ++row) {
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tiles[T].rows[row], tiles[T].row_bytes);
  }
}

float normal(float value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value; }

float number(const Tile& tile, int row, int index) {
  uint16_t half;
  __builtin_memcpy(&half, tile.rows[row] + 2 * index, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return normal(value);
}

// Calls `add` with each number of the tile of sums, and the rows of it.
template <typename Sum, typename Add>
void for_each_sum(int of_sums, int of_left, int of_right, const Add& add) {
  Tile &sums = configured(of_sums), &left = configured(of_left), &right = configured(of_right);
  expect(of_sums != of_left && of_sums != of_right && of_left != of_right);
  expect(sums.num_rows == left.num_rows && sums.row_bytes == right.row_bytes && left.row_bytes == 4 * right.num_rows);
  for (int m = 0; m < sums.num_rows; ++m) {
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      Sum sum;
      __builtin_memcpy(&sum, sums.rows[m] + 4 * n, sizeof sum);
      sum = add(sum, left, right, m, n);
      __builtin_memcpy(sums.rows[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

template <int S, int L, int R>
void add_bf16_product() {
  for_each_sum<float>(S, L, R, [](float sum, const Tile& left, const Tile& right, int m, int n) {
    float even = 0, odd = 0;
    for (int k = 0; k < right.num_rows; ++k) {
      even = normal(std::fma(number(left, m, 2 * k), number(right, k, 2 * n), even));
      odd = normal(std::fma(number(left, m, 2 * k + 1), number(right, k, 2 * n + 1), odd));
    }
    return normal(normal(sum) + normal(even + odd));
  });
}

template <int S, int L, int R>
void add_byte_product() {
  for_each_sum<int32_t>(S, L, R, [](int32_t sum, const Tile& left, const Tile& right, int m, int n) {
    for (int k = 0; k < right.num_rows; ++k) {
      for (int i = 0; i < 4; ++i) sum += left.rows[m][4 * k + i] * static_cast<int8_t>(right.rows[k][4 * n + i]);
    }
    return sum;
  });
}

}  // namespace
}  // namespace tokenyard::amx
