// g++ -O2 -std=c++17 -DREHEARSAL -w -o rehearse rehearse.cpp && ./rehearse SEEDS: two layers of four products by six blocks, compared with sums in double.
// On a device: nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -cubin -Xptxas -v one_kernel.cu
#include "one_kernel.cu"
static float value(u16 b) { return bf(b, 0); }
int main(int argc, char** argv) {
  u32 blocks = 6, rows = 3, layers = 2, stages = 3;
  Phase p[4] = {{0, 160, 512, 1}, {0, 512, 1024, 2}, {0, 1024, 512, 1}, {0, 512, 1024, 2}};
  p[0].outputs = 1024;
  std::vector<std::vector<u16>> w(4); u64 per = 0;
  seed = 7; std::vector<u64> begins; std::vector<u16> all;
  for (u32 l = 0; l < layers; l++) for (int i = 0; i < 4; i++) { begins.push_back(all.size()); for (u64 k = 0; k < (u64)p[i].outputs * p[i].inputs; k++) all.push_back((u16)rounded(((int)(draw() % 2001) - 1000) / 1000.f / sqrtf(p[i].inputs / 3.f))); }
  per = all.size() / layers; char* aligned = (char*)(((u64)malloc(all.size() * 2 + 16) + 15) & ~15ull); memcpy(aligned, all.data(), all.size() * 2);
  for (int i = 0; i < 4; i++) p[i].weight = (u16*)aligned + begins[i];
  u32 stride = 2 * rows * 1024 / 2; 
  std::vector<float> x0(rows * p[0].inputs); for (auto& v : x0) { v = bf(rounded(((int)(draw() % 2001) - 1000) / 500.f), 0); }
  std::vector<u64> first;
  for (int run = 0; run < (argc > 1 ? atoi(argv[1]) : 3); run++) {
    std::vector<u64> exchange(4 * stride + 2, ~0ull); u64* e = (u64*)(((u64)exchange.data() + 15) & ~15ull);
    u32 epoch = 40;
    for (u32 r = 0; r < rows; r++) for (u32 k = 0; k < p[0].inputs; k += 2) e[(epoch & 3) * stride + (r * p[0].inputs + k) / 2] = tagged(pack(x0[r * p[0].inputs + k], x0[r * p[0].inputs + k + 1]), epoch);
    Chain c{{p[0], p[1], p[2], p[3]}, per, layers, rows, stages, e, stride, epoch};
    rehearse(blocks, stages * TILE + stages * 16 + 256 + rows * (1024 * 2 + 16), 1000 + run, [c] { chain(c); });
    u64* out = e + ((epoch + 4 * layers) & 3) * stride; u64 n = 2 * rows * 512 / 2;
    std::vector<u64> found(out, out + n);
    if (run == 0) {
      first = found; std::vector<float> x = x0; double err = 0, mag = 0;
      for (u32 l = 0; l < layers; l++) for (int i = 0; i < 4; i++) {
        const u16* wt = (u16*)aligned + begins[l * 4 + i]; std::vector<float> y(rows * p[i].outputs, 0.f);
        for (u32 r = 0; r < rows; r++) for (u32 o = 0; o < p[i].outputs; o++) { double s = 0; for (u32 k = 0; k < p[i].inputs; k++) s += (double)value(wt[(u64)o * p[i].inputs + k]) * x[r * p[i].inputs + k]; y[r * p[i].outputs + o] = s; }
        u32 next = i == 3 ? p[0].inputs : p[i + 1].inputs; bool last = l + 1 == layers && i == 3;
        if (last) for (u32 r = 0; r < rows; r++) for (u32 o = 0; o < p[i].outputs; o++) { float got = 0; for (u32 s = 0; s < p[i].splits; s++) { u64 v = found[((s * rows + r) * p[i].outputs + o) / 2]; got += bf((u32)v, o & 1); } err += (got - y[r * p[i].outputs + o]) * (got - y[r * p[i].outputs + o]); mag += y[r * p[i].outputs + o] * y[r * p[i].outputs + o]; }
        x.assign(rows * next, 0.f); for (u32 r = 0; r < rows; r++) for (u32 k = 0; k < next; k++) x[r * next + k] = bf(rounded(y[r * p[i].outputs + k]), 0);
      }
      printf("error %.2e of %.3f\n", sqrt(err / mag), sqrt(mag));
    }
    printf("seed %d: %llu turns, %s\n", 1000 + run, turns, found == first ? "the same bits" : "OTHER BITS");
  }
}
