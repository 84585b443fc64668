// The compile-time description of a fallback row, for what no other row takes: float32 and head dims above 256. Most
// are CUTLASS's own memory-efficient attention (its example 41). fmha_fallback() in the manifest makes one of each
// line.
#pragma once

#include "../support/params.h"

namespace cutlass_fmha {

/// What multiplies, and how exactly.
enum class FallbackMath : int {
  simt,    ///< float32 FMAs: exact to float32, any alignment; on sm_89 and sm_120 faster than tf32x3
  tf32x3,  ///< float32 as sums of two TF32 numbers, three products each: drops 2^-20 of a product at most
  mma,     ///< tensor cores on 16-bit operands, sums in float32
};

constexpr int kAnyHeadDim = 65536;  // 2^16, as the example's own users write it

struct FallbackConfig {
  int arch;
  Element element;  ///< of Q, K, V, O and a bias
  int head_dim;     ///< the largest, of Q and K and of V and O, that the row takes
  int tile_m;       ///< query rows per thread block
  int tile_n;       ///< keys per step; in the example, if not less than head_dim, O stays in registers
  int warps;        ///< of a thread block
  int min_blocks;   ///< resident thread blocks per SM that registers must leave room for
  FallbackMath math;

  constexpr int threads() const { return 32 * warps; }
  /// Our own main loops in place of the example's: whole_rows.cuh, wide_heads.cuh.
  constexpr bool whole_rows() const { return math == FallbackMath::tf32x3 && head_dim != kAnyHeadDim; }
  constexpr bool wide_heads() const { return math == FallbackMath::mma && head_dim != kAnyHeadDim; }
  constexpr bool example() const { return !whole_rows() && !wide_heads(); }
  /// Bytes that addresses, strides and head dims are a multiple of.
  constexpr int alignment() const { return math == FallbackMath::simt ? 4 : 16; }
  /// Whether a launch needs float32 space for O between the steps. float32 rows use O itself, as far as its rows lie
  /// side by side.
  constexpr bool accumulates() const { return example() && head_dim > tile_n; }
};

}  // namespace cutlass_fmha
