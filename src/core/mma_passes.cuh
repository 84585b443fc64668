// Emulates a GPU whose tensor pipe is slower per clock (docs/emulation.md): each pass over the accumulators is repeated
// with zero operands, so that every useful mma takes CUTLASS_FMHA_MMA_PASSES times its time and the result is the same.
#pragma once

#include "registers.cuh"

#ifndef CUTLASS_FMHA_MMA_PASSES
#define CUTLASS_FMHA_MMA_PASSES 1
#endif

namespace cutlass_fmha {

constexpr int kMmaPasses = CUTLASS_FMHA_MMA_PASSES;
static_assert(kMmaPasses >= 1 && kMmaPasses % 2 == 1);

#if CUTLASS_FMHA_MMA_PASSES > 1

// Known to be zero, ptxas would write it anew to other registers for every few mma (mma can't read the zero register),
// which takes issue slots that the emulated GPU doesn't lose.
CUTE_DEVICE uint4 load_unknown_zeros() {
  uint4 zero;
  asm volatile("ld.const.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(zero.x), "=r"(zero.y), "=r"(zero.z), "=r"(zero.w)
               : "l"(__cvta_generic_to_constant(&unknown_zeros)));
  return zero;
}

#endif

/// To be called after `Passes` passes over all of `accumulator`, ((2, 2), row steps, column steps) as mma leaves it. A
/// pass goes through all accumulators before any comes again, as the useful one does: latency is hidden alike. Takes
/// four registers while it lasts; with one pass, nothing is compiled. `PerMma`: passes that take the time of one of
/// Mma.
template <class Mma, int Passes = 1, int PerMma = 1, class Accumulator>
CUTE_DEVICE void repeat_mma_passes(Accumulator& accumulator) {
#if CUTLASS_FMHA_MMA_PASSES > 1
  using namespace cute;
  Mma mma;
  auto a = make_tensor<typename Mma::ValTypeA>(Shape<Shape<_2, _2, _2>>{});
  auto words = recast<uint32_t>(a);
  uint4 const zero = load_unknown_zeros();
  words(0) = zero.x, words(1) = zero.y, words(2) = zero.z, words(3) = zero.w;
  auto b = make_tensor(a.data(), Shape<Shape<_2, _2>>{});  // the same registers
  CUTE_UNROLL
  for (int pass = 0; pass < Passes * (kMmaPasses - 1) / PerMma; ++pass) {
    CUTE_UNROLL
    for (int n = 0; n < size<2>(accumulator); ++n) {
      CUTE_UNROLL
      for (int m = 0; m < size<1>(accumulator); ++m) gemm(mma, a, b, accumulator(_, m, n));
    }
  }
#endif
}

}  // namespace cutlass_fmha
