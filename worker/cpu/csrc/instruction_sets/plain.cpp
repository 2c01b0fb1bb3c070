// The kernels for any processor.
#include "kernels.h"

#define TOKENYARD_LANES 4

namespace tokenyard::plain {
#include "instruction_sets/simd.h"

#include "instruction_sets/kernels_impl.h"
}  // namespace tokenyard::plain

namespace tokenyard {
const AllKernels* plain_kernels() {
  static constexpr AllKernels all = {"plain", plain::kernels_of<Bf16>(), plain::kernels_of<float>()};
  return &all;
}
}  // namespace tokenyard
