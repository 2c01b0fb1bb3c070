// Stand-ins for the device: each thread of a block is a fiber, copies arrive late and in any order, and a seed draws
// which fiber goes on next.
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <cmath>
#define DEV inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
struct Dim { u32 x; };
constexpr u32 THREADS = 288;
struct Block; struct Warp { u64 sleeps_until = 0; u32 arrived = 0, generation = 0; u32 address[32]; u32 in[32][10]; float acc[32][4]; };
struct Bar { u32 arrived = 0, generation = 0; };
struct Mbar { u32 count = 0, pending = 0, phase = 0; long tx = 0; };
struct Block { std::vector<char> shared; Bar bars[4]; Warp warps[9]; float parts[2][8][16][9]; };
struct Fiber { ucontext_t at; std::vector<char> stack; Block* block; u32 bx, tx; bool done = false; };
struct Copy { Block* block; u32 to; const void* from; u32 n; u32 bar; };
static std::vector<Fiber> fibers; static std::vector<Copy> copies; static ucontext_t main_at; static Fiber* me; static u32 num_blocks; static u64 seed = 1, turns = 0;
static u32 draw() { seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17; return (u32)(seed >> 11); }
static void yield() { swapcontext(&me->at, &main_at); }
static void pause() { yield(); }
struct TX { operator Dim() const; u32 get() const { return me->tx; } };
#define threadIdx (Dim{me->tx})
#define blockIdx (Dim{me->bx})
#define gridDim (Dim{num_blocks})
#define SHARED_BYTES(name) char* name = me->block->shared.data();
#define SHARED_PARTS(name) auto& name = me->block->parts
static u32 smem(const void* p) { return (u32)((const char*)p - me->block->shared.data()); }
template <class T> static T& at(Block* b, u32 a) { if (a + sizeof(T) > b->shared.size()) { printf("beyond shared memory: %u\n", a); abort(); } return *(T*)(b->shared.data() + a); }
// A barrier's words are kept elsewhere: eight bytes hold an index.
static std::vector<Mbar> mbars;
static Mbar& mbar(Block* b, u32 a) { u64& i = at<u64>(b, a); if (i == 0 || i >= mbars.size()) { printf("no barrier there\n"); abort(); } return mbars[i]; }
static void mbar_settle(Mbar& m) { if (m.pending == 0 && m.tx == 0) { m.phase ^= 1; m.pending = m.count; } }
static void mbar_init(u32 b, u32 n) { if (mbars.empty()) mbars.emplace_back(); mbars.push_back({n, n, 0, 0}); at<u64>(me->block, b) = mbars.size() - 1; }
static void mbar_expect(u32 b, u32 n) { Mbar& m = mbar(me->block, b); m.tx += n; m.pending--; mbar_settle(m); }
static void mbar_arrive(u32 b) { Mbar& m = mbar(me->block, b); if (!m.pending) { printf("one arrival too many\n"); abort(); } m.pending--; mbar_settle(m); }
static void mbar_wait(u32 b, u32 parity) { while (mbar(me->block, b).phase == parity) yield(); }   // as try_wait.parity: until that phase has ended
static void bulk_copy(u32 to, const void* from, u32 n, u32 b, u64) { if ((to | n | (u64)from) & 15) { printf("a copy is not aligned\n"); abort(); } copies.push_back({me->block, to, from, n, b}); }
static void deliver(size_t i) { Copy c = copies[i]; copies[i] = copies.back(); copies.pop_back(); memcpy(&at<char>(c.block, c.to), c.from, c.n); Mbar& m = mbar(c.block, c.bar); m.tx -= c.n; mbar_settle(m); }
static u64 evict_first() { return 0; }
static void fence_init() {}
static void give_up(u32&) {}
static void put(u64* p, u64 v) { *p = v; yield(); }
static void get2(const u64* p, u64& a, u64& b) { a = p[0]; b = p[1]; }
static void arrive(Bar& b, u32 n) { u32 g = b.generation; if (++b.arrived == n) { b.arrived = 0; b.generation++; } else while (b.generation == g) yield(); }
// A warp that leaves a barrier may be late, now and then.
static void late() { while (turns < me->block->warps[me->tx / 32].sleeps_until) yield(); }
static void bar(u32 name, u32 n) { Bar& b = me->block->bars[name]; if (b.arrived + 1 == n && draw() % 4 == 0) me->block->warps[draw() % 2 ? 0 : draw() % 9].sleeps_until = turns + 60000; arrive(b, n); late(); }
static void __syncthreads() { arrive(me->block->bars[0], THREADS); }
static Warp& warp() { return me->block->warps[me->tx / 32]; }
// All lanes of a warp put down what they have; the last does the work of all.
template <class F> static void together(F work) { Warp& w = warp(); u32 g = w.generation; if (++w.arrived == 32) { work(w); w.arrived = 0; w.generation++; } else while (w.generation == g) yield(); }
static void __syncwarp() { together([](Warp&) {}); }
static void st_shared2(u32 to, u32 a, u32 b) { if (to & 7) abort(); at<u32>(me->block, to) = a; at<u32>(me->block, to + 4) = b; }
template <int N> static void ldmatrix(u32 p, u32* out) {
  u32 lane = me->tx % 32; warp().address[lane] = p; Block* block = me->block;
  together([block](Warp& w) { for (u32 l = 0; l < 32; l++) for (int m = 0; m < N; m++) w.in[l][m] = at<u32>(block, w.address[m * 8 + l / 4] + l % 4 * 4); });
  for (int m = 0; m < N; m++) out[m] = warp().in[lane][m];
  __syncwarp();
}
static void ldmatrix4(u32 p, u32 (&a)[4]) { ldmatrix<4>(p, a); }
static void ldmatrix2(u32 p, u32 (&b)[2]) { ldmatrix<2>(p, b); }
static float bf(u32 word, int high) { u32 u = high ? word & 0xffff0000u : word << 16; float f; memcpy(&f, &u, 4); return f; }
static void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  u32 lane = me->tx % 32; Warp& mine = warp();
  for (int i = 0; i < 4; i++) mine.in[lane][i] = a[i], mine.acc[lane][i] = d[i];
  for (int i = 0; i < 2; i++) mine.in[lane][4 + i] = b[i];
  together([](Warp& w) {
    float A[16][16], B[16][8];
    for (u32 l = 0; l < 32; l++) for (int h = 0; h < 2; h++) {
      u32 g = l / 4, t = l % 4 * 2 + h;
      A[g][t] = bf(w.in[l][0], h); A[g + 8][t] = bf(w.in[l][1], h); A[g][t + 8] = bf(w.in[l][2], h); A[g + 8][t + 8] = bf(w.in[l][3], h);
      B[t][g] = bf(w.in[l][4], h); B[t + 8][g] = bf(w.in[l][5], h);
    }
    for (u32 l = 0; l < 32; l++) for (int i = 0; i < 4; i++) { u32 r = l / 4 + i / 2 * 8, c = l % 4 * 2 + i % 2; float s = 0; for (int k = 0; k < 16; k++) s += A[r][k] * B[k][c]; w.acc[l][i] += s; }
  });
  for (int i = 0; i < 4; i++) d[i] = mine.acc[lane][i];
  __syncwarp();
}
static u32 rounded(float f) { u32 u; memcpy(&u, &f, 4); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
static u32 pack(float lo, float hi) { return rounded(lo) | rounded(hi) << 16; }
template <class F> static void rehearse(u32 blocks, size_t shared, u64 with_seed, F kernel) {
  static F* now; now = &kernel; num_blocks = blocks; seed = with_seed; mbars.clear(); copies.clear(); turns = 0;
  std::vector<Block> all(blocks); for (auto& b : all) b.shared.assign(shared, (char)0x7f);
  fibers.clear(); fibers.resize(blocks * THREADS);
  for (u32 i = 0; i < fibers.size(); i++) {
    Fiber& f = fibers[i]; f.block = &all[i / THREADS]; f.bx = i / THREADS; f.tx = i % THREADS; f.stack.resize(48 << 10);
    getcontext(&f.at); f.at.uc_stack.ss_sp = f.stack.data(); f.at.uc_stack.ss_size = f.stack.size(); f.at.uc_link = &main_at;
    makecontext(&f.at, (void (*)())+[] { (*now)(); me->done = true; }, 0);
  }
  u64 idle = 0; size_t left = fibers.size();
  size_t asleep = 0, asleep_n = 0; u64 wakes = 0, next_sleep = 2000;   // a warp or a block that others run ahead of
  while (left) {
    if (turns >= next_sleep) {
      bool whole = draw() % 2; asleep_n = whole ? THREADS : 32; asleep = draw() % (fibers.size() / asleep_n) * asleep_n;
      wakes = turns + 1000 + draw() % 400000; next_sleep = wakes + draw() % 40000;
    }
    // A few of a random warp's or block's neighbours in a row, and now and then a copy.
    u32 first = draw() % fibers.size(), n = 1 + draw() % 64;
    for (u32 j = 0; j < n; j++) { Fiber& f = fibers[(first + j) % fibers.size()]; if (f.done || (turns < wakes && (first + j) % fibers.size() - asleep < asleep_n)) { turns += f.done == 0; continue; } me = &f; swapcontext(&main_at, &f.at); if (f.done) left--; turns++; }
    if (!copies.empty() && draw() % 3 == 0) deliver(draw() % copies.size());
    if (++idle > 40000000) { printf("no fiber goes on\n"); abort(); }
  }
}
