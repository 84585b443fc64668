// The compile-time description of a row for what no other row takes: float32 and head dims above 256. Most are
// CUTLASS's own memory-efficient attention (its example 41). fmha_wide() in the manifest makes one of each line.
#pragma once

#include "../config.h"

namespace cutlass_fmha {

constexpr int kAnyHeadDim = 65536;  // 2^16, as the example's own users write it

/// head_dim: the largest, of Q and K and of V and O, that the row takes. tile_n: in the example, if not less than
/// head_dim, O stays in registers.
struct WideConfig : TileConfig {
  constexpr Family family() const { return Family::wide; }
  static constexpr bool takes_features() { return false; }
  static constexpr bool scored() { return false; }
  constexpr int head_dim_v() const { return head_dim; }
  /// Our own main loops in place of the example's: whole_rows.cuh, wide_heads.cuh.
  constexpr bool whole_rows() const { return mma == MmaKind::tf32x3 && head_dim != kAnyHeadDim; }
  constexpr bool wide_heads() const { return mma == MmaKind::m16n8k16 && head_dim != kAnyHeadDim; }
  constexpr bool example() const { return !whole_rows() && !wide_heads(); }
  /// Bytes that addresses, strides and head dims are a multiple of.
  constexpr int alignment() const { return mma == MmaKind::simt ? element_bytes() : 16; }
  /// Whether a launch needs float32 space for O between the steps. float32 rows use O itself, as far as its rows lie
  /// side by side.
  constexpr bool accumulates() const { return example() && head_dim > tile_n; }
};

/// A row for all that FeatureParams says of such tensors. Operands pass through shared memory in steps, so that it is
/// the same for every head dim up to its own.
struct WideScoredConfig : TileConfig {
  constexpr Family family() const { return Family::wide_scored; }
  static constexpr bool takes_features() { return true; }
  static constexpr bool scored() { return true; }
  constexpr int head_dim_v() const { return head_dim; }
  constexpr int alignment() const { return 16; }
  static constexpr int kv_warps = 1;
};

}  // namespace cutlass_fmha
