// Which keys a query row sees, and what follows for the blocks of keys that a warp walks through. Masking is a range
// of blocks: a block is skipped (nothing visible), masked (the diagonal or the end of the keys crosses it) or full.
#pragma once

#include <cute/tensor.hpp>

#include "../config.h"
#include "../host_device.h"
#include "../params.h"

namespace cutlass_fmha {

/// Whether scores of a phase get a mask: a loop over phases either knows, or asks in each.
enum class Masked { yes, no, ask };

/// Whether a warp's fragments leave registers free. Then the phases that need a mask have a loop of their own, so that
/// the long one need not ask, and what can be computed before it is.
constexpr bool is_roomy(ForwardConfig const& c) {
  int const per_thread = 65536 / (c.threads() * c.min_blocks), most = per_thread < 255 ? per_thread : 255;
  int const halves = 2 * c.head_dim + 3 * c.tile_n + (c.q_in_registers ? c.head_dim : 0);  // O, S and P, Q
  constexpr int kOthers = 90;
  return c.rows_per_warp() * halves / 64 + kOthers <= most;
}

/// Keys 0 .. visible_keys - 1 are visible to query `row`.
FMHA_HOST_DEVICE inline int visible_keys(ForwardParams const& p, int row) {
  int const end = row + p.diagonal + 1;
  return end < 0 ? 0 : end < p.seqlen_k ? end : p.seqlen_k;
}

/// Blocks of `tile_n` keys of which some row in [row_begin, row_end) sees a key: 0 .. key_blocks - 1. Rows beyond
/// seqlen_q pad the last tile and see nothing.
FMHA_HOST_DEVICE inline int key_blocks(ForwardParams const& p, int row_begin, int row_end, int tile_n) {
  int const last = (row_end < p.seqlen_q ? row_end : p.seqlen_q) - 1;
  return last < row_begin ? 0 : ceil_div(visible_keys(p, last), tile_n);
}

/// Blocks of which every row from `row_begin` on sees every key: 0 .. full_key_blocks - 1.
FMHA_HOST_DEVICE inline int full_key_blocks(ForwardParams const& p, int row_begin, int tile_n) {
  return visible_keys(p, row_begin) / tile_n;
}

/// Sets the scores of invisible keys to -inf. `scores` is a (row, column) view of a fragment, `coordinates` the same
/// view of an identity tensor: (row, column) within the warp's tile, whose origin is (row_begin, key_begin).
template <class Scores, class Coordinates>
CUTE_HOST_DEVICE void apply_mask(ForwardParams const& p, Scores&& scores, Coordinates const& coordinates, int row_begin,
                                 int key_begin) {
  using namespace cute;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const visible = visible_keys(p, row_begin + get<0>(coordinates(row, _0{}))) - key_begin;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if (get<1>(coordinates(_0{}, col)) >= visible) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace cutlass_fmha
