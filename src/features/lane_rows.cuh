// Which queries and keys the scores of a lane are of.
#pragma once

#include "../core/fragments.cuh"
#include "../core/mask.cuh"

namespace cutlass_fmha {

/// A packed query row: which query of which head.
struct QueryRow {
  int query, head;
};

CUTE_DEVICE QueryRow query_row(FeatureParams const& p, FeatureTile const& tile, int packed) {
  int const query = p.by_pack.quotient(packed);
  return {query, tile.head + packed - query * p.pack};
}

/// run(at): at(row) is what a row of the tile stands for, without a division where each row is a query. What runs once
/// in a block costs by its length.
template <ForwardConfig C, class Run>
CUTE_DEVICE void with_query_rows(FeatureParams const& p, FeatureTile const& tile, Run const& run) {
  if (!C.scored() && p.pack == 1) {
    run([&](int row) { return QueryRow{tile.row_begin + row, tile.head}; });
  } else {
    run([&](int row) { return query_row(p, tile, tile.row_begin + row); });
  }
}

/// In which order ldmatrix takes the keys of a tile's 16 rows, where a lane is to have four that follow each other: 4t
/// .. 4t + 3, two of each n8 tile. Lanes 2 and 3 have the upper two first, so that each n8 tile has eight rows of
/// different places in the swizzle.
struct MaskedOrder {
  CUTE_HOST_DEVICE static constexpr int of_row(int row) {
    return row % 8 / 2 * 4 + ((row / 8) ^ (row % 8 / 4)) * 2 + row % 2;
  }
};

/// In which order the keys of a step stand in shared memory, and thus in the columns of its scores. The softmax and P V
/// don't mind. A lane has columns 2t and 2t + 1 of each eight; in order of lanes, these are keys 8t .. 8t + 7 of each
/// 32, so that a lane reads what belongs to its scores in pieces of eight. Columns in order are those of the few-query
/// rows, and of rows to whose scores nothing belongs.
template <ForwardConfig C>
struct KeyOrder {
  static constexpr bool kByLane = C.scored() && C.kv_warps == 1 && C.tile_n % 32 == 0;
  static constexpr int kRun = kByLane ? 8 : 2;  ///< keys that follow each other in a lane's columns
  /// Masked rows read keys in another order than they stand in: MaskedOrder.
  static constexpr int kPairs = C.reads_masks() ? 2 : 1;

  /// The key in a row of the tile. Linear in the bits of the row's number.
  CUTE_HOST_DEVICE static constexpr int of_row(int row) {
    return kByLane ? row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2 : row;
  }
  /// The key in a lane's first column, and how far from it that of another one is.
  CUTE_DEVICE static int first(int lane) { return lane % 4 * kRun; }
  /// Of columns of every other n8 tile.
  CUTE_DEVICE static int first(int lane, int pair) {
    return kPairs == 1 ? first(lane) : MaskedOrder::of_row(8 * pair + lane % 4 * 2);
  }
  CUTE_HOST_DEVICE static constexpr int pair_of(int col) { return kPairs == 1 ? 0 : col / 2 % 2; }
  CUTE_HOST_DEVICE static constexpr int of_column(int col) {
    if (kPairs > 1) return col / 4 * 16 + col % 2;
    return kByLane ? col / 8 * 32 + col % 8 : col / 2 * 8 + col % 2;
  }
};

CUTE_DEVICE float alibi_slope(FeatureParams const& p, int batch, int head) {
  return p.alibi_slopes[batch * p.alibi_stride[0] + head * p.alibi_stride[1]];
}

// Where the rows of a lane's scores stand: `row` counts those that the lane has of its warp's accumulator.

/// Found anew at each use.
struct ComputedRows {
  int row_begin;  ///< of this warp, packed

  CUTE_DEVICE QueryRow at(FeatureParams const& p, FeatureTile const& tile, int row) const {
    return query_row(p, tile, row_begin + accumulator_row(row, lane_id()));
  }
  CUTE_DEVICE float slope(FeatureParams const& p, FeatureTile const& tile, int row) const {
    return alibi_slope(p, tile.batch, at(p, tile, row).head);
  }
};

/// What a warp asks for in every phase about its scores.
struct alignas(16) WarpScores {
  float slope;  ///< ALiBi's, where its rows are of one head
  int beside;   ///< the key beside its first query then
  int large;    ///< see ScoreTerms
  int put_off;  ///< KeyWalk
};

/// The same, but for slopes, which are in shared memory.
struct StagedRows : ComputedRows {
  float const* slopes;  ///< of this warp's rows
  WarpScores& warp;

  CUTE_DEVICE float slope(FeatureParams const&, FeatureTile const&, int row) const {
    return slopes[accumulator_row(row, lane_id())];
  }
};

}  // namespace cutlass_fmha
