// Tiles of a processor with AMX: eight registers of up to 16 rows of 64 bytes, which are loaded and multiplied whole.
//
// Owns: the instructions, and the permission that the system gives a process to use them.
// Never: rows, columns or weights (amx.cpp). Tests have plain functions in the place of this file.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, "Programming with Intel AMX".
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tokenyard::amx {

// As `ldtilecfg` reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

// Asks the system, whose answer holds for all threads. It refuses if it is older than tiles (Linux 5.16), or if a thread
// has a stack for signals that is too small for them.
inline bool has_tiles() {
  constexpr int kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}

// Tiles are the thread's own; all of them become zero.
inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

// A thread without tiles is stored and restored as fast as ever.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Sums += Left @ Right, for rows of pairs of bf16. In Right, the two inputs of a pair lie side by side for each column.
template <int Sums, int Left, int Right>
inline void add_bf16_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right));
}

// The same for four bytes in the place of a pair: without a sign in Left, with one in Right.
template <int Sums, int Left, int Right>
inline void add_byte_product() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right));
}

}  // namespace tokenyard::amx
