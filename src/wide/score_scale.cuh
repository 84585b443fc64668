// How the example multiplies scores by a number: by FMAs with 0, so that no product is -0. It keeps the maximum of a
// row by integer atomics, for which -0 is the least number there is: a row whose largest score is -0, as negative and
// zero scales make it, would be taken for one that sees no key.
#pragma once

#include <cutlass/array.h>
#include <cutlass/functional.h>

namespace cutlass_fmha {

constexpr int kScoresPerThread = 32;  // a warp has 32 x 32 of them

}  // namespace cutlass_fmha

template <>
struct cutlass::multiplies<cutlass::Array<float, cutlass_fmha::kScoresPerThread>> {
  using Scores = cutlass::Array<float, cutlass_fmha::kScoresPerThread>;

  CUTLASS_DEVICE Scores operator()(float scale, Scores const& scores) const {
    Scores product;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cutlass_fmha::kScoresPerThread; ++i) product[i] = fmaf(scale, scores[i], 0.f);
    return product;
  }
};
