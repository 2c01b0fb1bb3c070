// The products of a decode step in one kernel: vectors are exchanged between blocks, weights come through a ring in
// shared memory. Then what it is made of, alone: barriers, exchanges, a stream of weights, prefetches into L2.
// For sm_90a, or with -DREHEARSAL for the host (rehearsal.h). No other header is needed: nvcc and NVRTC take it.
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16;
#ifdef REHEARSAL
#include "rehearsal.h"
#else
#define DEV __device__ __forceinline__
#define SHARED_BYTES(name) extern __shared__ __align__(128) char name[];
#define SHARED_PARTS(name) __shared__ float name[2][8][16][9]
// ---------- shared memory, asynchronous copies ----------
DEV u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void mbar_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n)); }
DEV void mbar_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory"); }
DEV void mbar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory"); }
// A wait that lasts for seconds is a fault: the launch then fails, and does not hang.
DEV void give_up(u32& turns) { if (++turns > 1u << 22) asm volatile("trap;"); }
DEV void mbar_wait(u32 b, u32 parity) {
  for (u32 done = 0, turns = 0; !done; give_up(turns))
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(b), "r"(parity) : "memory");
}
DEV void bulk_copy(u32 to, const void* from, u32 n, u32 b, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(n), "r"(b), "l"(policy) : "memory");
}
DEV u64 evict_first() { u64 p; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
DEV void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void bulk_prefetch(const void* from, u32 n) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(n)); }

// ---------- between blocks ----------
DEV void red_release(u32* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEV u32 ld_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV void put(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
DEV void get2(const u64* p, u64& a, u64& b) { asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory"); }
DEV void bar(u32 name, u32 n) { asm volatile("bar.sync %0, %1;" :: "r"(name), "r"(n) : "memory"); }
DEV void st_shared2(u32 to, u32 a, u32 b) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(to), "r"(a), "r"(b) : "memory"); }
DEV void ldmatrix4(u32 p, u32 (&a)[4]) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(p) : "memory"); }
DEV void ldmatrix2(u32 p, u32 (&b)[2]) { asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(p) : "memory"); }
DEV void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEV u32 pack(float lo, float hi) { u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo)); return w; }
DEV void pause() {}
#endif
// A word and the number of the exchange are one number of 64 bits: by PTX's memory model it arrives as a whole.
DEV float number(u32 bits) { union { u32 u; float f; } v; v.u = bits; return v.f; }
DEV float low(u32 word) { return number(word << 16); }
DEV float high(u32 word) { return number(word & 0xffff0000u); }
DEV u64 tagged(u32 word, u32 tag) { return (u64)tag << 32 | word; }
// ---------- the ring ----------
// A tile is 16 outputs by STEP inputs of 16 bits; a row of it is one copy, and 16 bytes lie between rows (banks).
constexpr int STEP = 512, ROW = STEP * 2 + 16, TILE = 16 * ROW, COMPUTE_WARPS = 8;
struct Ring {
  u32 base, full, empty, stages, at, parity;
  DEV void next() { if (++at == stages) { at = 0; parity ^= 1; } }
  DEV u32 tile() const { return base + at * TILE; }
};
DEV Ring make_ring(char* memory, u32 stages) { u32 b = smem(memory); return {b + stages * 16 + 112 & ~127u, b, b + stages * 8, stages, 0, 0}; }
DEV void init_ring(const Ring& r) {
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < r.stages; i++) { mbar_init(r.full + 8 * i, 1); mbar_init(r.empty + 8 * i, COMPUTE_WARPS); }
    fence_init();
  }
  __syncthreads();
}
// One warp: lane l of 16 copies row l.
DEV void produce(Ring& r, const u16* weight, u32 row, u32 num_inputs, u32 input, u64 policy) {
  u32 lane = threadIdx.x & 31;
  mbar_wait(r.empty + 8 * r.at, r.parity ^ 1);
  if (lane == 0) mbar_expect(r.full + 8 * r.at, 16 * STEP * 2);
  __syncwarp();
  if (lane < 16) bulk_copy(r.tile() + lane * ROW, weight + (u64)(row + lane) * num_inputs + input, STEP * 2, r.full + 8 * r.at, policy);
  r.next();
}
// A warp multiplies its eighth of a tile's inputs: sums of 16 outputs by 8 rows.
DEV void consume(Ring& r, u32 x /* [8][inputs + 8] of 16 bits */, u32 x_stride, u32 input, u32 rows, float (&sums)[4]) {
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, from = warp * (STEP / COMPUTE_WARPS);
  mbar_wait(r.full + 8 * r.at, r.parity);
#pragma unroll
  for (int k = 0; k < STEP / COMPUTE_WARPS; k += 16) {
    u32 a[4], b[2];
    ldmatrix4(r.tile() + (lane & 15) * ROW + (from + k + (lane >> 4) * 8) * 2, a);
    // Of rows that are not there the last is read again: their sums are not looked at.
    u32 row = (lane & 7) < rows ? lane & 7 : rows - 1;
    ldmatrix2(x + row * x_stride + (input + from + k + ((lane >> 3) & 1) * 8) * 2, b);
    mma(sums, a, b);
  }
  __syncwarp();
  if (lane == 0) mbar_arrive(r.empty + 8 * r.at);
  r.next();
}
// ---------- one layer's products, 28 times: x -> qkv -> (stand-in for attention) -> o -> gates -> down ----------
struct Phase { const u16* weight; u32 outputs, inputs, splits; };  // of a part: 16 outputs by inputs / splits
struct Chain { Phase phases[4]; u64 layer_stride; u32 layers, rows, stages; u64* exchange; u32 exchange_stride; u32 epoch; };
extern "C" __global__ void __launch_bounds__(288, 1) chain(const __grid_constant__ Chain c) {
  SHARED_BYTES(memory)
  SHARED_PARTS(parts);
  Ring ring = make_ring(memory, c.stages); init_ring(ring);
  u32 x = ring.base + c.stages * TILE;
  if (threadIdx.x >= COMPUTE_WARPS * 32) {                  // runs ahead as far as the ring is free, over all layers
    u64 policy = evict_first();
    for (u32 layer = 0; layer < c.layers; layer++)
      for (int p = 0; p < 4; p++) {
        const Phase& f = c.phases[p];
        u32 units = f.outputs / 16 * f.splits, steps = f.inputs / f.splits / STEP;
        const u16* weight = f.weight + layer * c.layer_stride;
        for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x)
          for (u32 s = 0; s < steps; s++)
            produce(ring, weight, unit / f.splits * 16, f.inputs, (unit % f.splits * steps + s) * STEP, policy);
      }
    return;
  }
  u32 tag = c.epoch, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (u32 layer = 0; layer < c.layers; layer++)
    for (int p = 0; p < 4; p++) {
      const Phase& f = c.phases[p];
      u32 units = f.outputs / 16 * f.splits, steps = f.inputs / f.splits / STEP, x_stride = f.inputs * 2 + 16;
      // Take x, four numbers at a time: the sum of the parts that the phase before left, always in their order.
      const Phase& before = c.phases[(p + 3) & 3];
      u32 parts_of_x = layer + p ? before.splits : 1, line = layer + p ? before.outputs : f.inputs;
      const u64* from = c.exchange + (u64)(tag & 3) * c.exchange_stride;
      for (u32 i = threadIdx.x; i < c.rows * f.inputs / 4; i += 256) {
        u32 row = i * 4 / f.inputs, k = i * 4 % f.inputs;
        float n[4] = {};
        for (u32 s = 0; s < parts_of_x; s++) {
          u64 a, b; u32 turns = 0;
          do { get2(from + ((u64)(s * c.rows + row) * line + k) / 2, a, b); pause(); give_up(turns); } while ((u32)(a >> 32) != tag || (u32)(b >> 32) != tag);
          n[0] += low((u32)a); n[1] += high((u32)a); n[2] += low((u32)b); n[3] += high((u32)b);
        }
        st_shared2(x + row * x_stride + k * 2, pack(n[0], n[1]), pack(n[2], n[3]));
      }
      bar(1, 256);
      ++tag;
      u64* to = c.exchange + (u64)(tag & 3) * c.exchange_stride;
      u32 turn = 0;
      for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
        float sums[4] = {};
        for (u32 s = 0; s < steps; s++) consume(ring, x, x_stride, (unit % f.splits * steps + s) * STEP, c.rows, sums);
        float (*mine)[9] = parts[turn][warp];
        mine[lane >> 2][(lane & 3) * 2] = sums[0]; mine[lane >> 2][(lane & 3) * 2 + 1] = sums[1];
        mine[(lane >> 2) + 8][(lane & 3) * 2] = sums[2]; mine[(lane >> 2) + 8][(lane & 3) * 2 + 1] = sums[3];
        bar(1, 256);
        if (threadIdx.x < 8 * c.rows) {                      // a thread: two outputs of one row
          u32 row = threadIdx.x >> 3, n = (threadIdx.x & 7) * 2; float lo = 0, hi = 0;
#pragma unroll
          for (int w = 0; w < COMPUTE_WARPS; w++) { lo += parts[turn][w][n][row]; hi += parts[turn][w][n + 1][row]; }
          put(to + ((unit % f.splits * c.rows + row) * f.outputs + unit / f.splits * 16 + n) / 2, tagged(pack(lo, hi), tag));
        }
      }
    }
}

#ifndef REHEARSAL
// ---------- barriers of all blocks, to compare: `n` of them ----------
DEV void wait_for(const u32* counter, u32 count) { u32 turns = 0; while (ld_acquire(counter) < count) give_up(turns); }
extern "C" __global__ void __launch_bounds__(288, 1) one_counter(u32* counters, u32 n) {
  for (u32 i = 1; i <= n; i++) {
    __syncthreads();
    if (threadIdx.x == 0) { red_release(counters, 1); wait_for(counters, i * gridDim.x); }
    __syncthreads();
  }
}
extern "C" __global__ void __launch_bounds__(288, 1) flag_of_each(u32* counters, u32 n) {
  for (u32 i = 1; i <= n; i++) {
    __syncthreads();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(counters + 32 * blockIdx.x), "r"(i) : "memory");
      for (u32 block = threadIdx.x; block < gridDim.x; block += 32) wait_for(counters + 32 * block, i);
    }
    __syncthreads();
  }
}
extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(288, 1) cluster_barriers(u32 n) {
  for (u32 i = 0; i < n; i++) asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Each block writes its part of `numbers` words and takes all of them: a barrier, and the load that follows one.
// A block without a part may be overtaken, and then finds words of the next exchange.
extern "C" __global__ void __launch_bounds__(288, 1) exchanges(u64* buffers, u32 numbers, u32 n, u32* out) {
  u32 sum = 0, share = (numbers / 2 + gridDim.x - 1) / gridDim.x;
  for (u32 i = 1; i <= n; i++) {
    u64* buffer = buffers + (u64)(i & 1) * numbers;
    for (u32 j = threadIdx.x; j < share; j += 288) {
      u32 k = blockIdx.x * share + j;
      if (k < numbers / 2) { put(buffer + 2 * k, tagged(k, i)); put(buffer + 2 * k + 1, tagged(k + i, i)); }
    }
    for (u32 k = threadIdx.x; k < numbers / 2; k += 288) {
      u64 a, b; u32 turns = 0;
      do { get2(buffer + 2 * k, a, b); give_up(turns); } while ((u32)(a >> 32) < i || (u32)(b >> 32) < i);
      sum += (u32)a ^ (u32)b;
    }
    __syncthreads();
  }
  out[blockIdx.x * 288 + threadIdx.x] = sum;
}
// Streaming alone: what a ring of `stages` reads, with a barrier every `between` tiles (0: none).
extern "C" __global__ void __launch_bounds__(288, 1) stream(const u16* weight, u32 num_inputs, u32 tiles_each, u32 between, u32 stages, u32* counters, float* out) {
  SHARED_BYTES(memory)
  Ring ring = make_ring(memory, stages); init_ring(ring);
  u32 steps = num_inputs / STEP, x = ring.base + stages * TILE;
  if (threadIdx.x >= COMPUTE_WARPS * 32) {
    u64 policy = evict_first();
    for (u32 i = 0; i < tiles_each; i++) produce(ring, weight, (blockIdx.x + i / steps * gridDim.x) * 16, num_inputs, i % steps * STEP, policy);
    return;
  }
  float sums[4] = {};
  u32 round = 0;
  for (u32 i = 0; i < tiles_each; i++) {
    consume(ring, x, STEP * 2 + 16, 0, 8, sums);
    if (between && (i + 1) % between == 0) {
      bar(1, 256);
      if (threadIdx.x == 0) { red_release(counters, 1); wait_for(counters, ++round * gridDim.x); }
      bar(1, 256);
    }
  }
  out[blockIdx.x * 256 + threadIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
}
// Brings a weight into L2, each block its part; then `stream` of the same weight shows what that gains.
extern "C" __global__ void __launch_bounds__(32, 1) warm(const char* weight, u64 bytes, u32 piece) {
  u64 each = (bytes / gridDim.x + 127) & ~127ull, from = blockIdx.x * each, to = from + each < bytes ? from + each : bytes;
  if (threadIdx.x == 0) for (u64 at = from; at < to; at += piece) bulk_prefetch(weight + at, at + piece < to ? piece : (u32)(to - at));
}
#endif
