// What the backward's parts share: types, shared memory, and in what order dQ's sums stand in global memory.
#pragma once

#include "../core/pipeline.cuh"
#include "../core/product.cuh"
#include "../core/visibility.h"
#include "config.h"
#include "params.h"

namespace cutlass_fmha {

/// Rows of a warp's operands are its keys: S^T = K Q^T and dP^T = V dO^T of `Chunk` queries, whose accumulators,
/// rounded, are the A operands of dV += P^T dO and dK += dS^T Q as they lie in registers.
template <BackwardConfig C, int Chunk>
struct BackwardTypes : MmaTypes<C.dtype, C.keys_per_warp()> {
  using Base = MmaTypes<C.dtype, C.keys_per_warp()>;
  static constexpr int kQueries = Chunk;
  static constexpr int kDimSteps = C.head_dim / 16;
  static constexpr int kKeySteps = Chunk / 16;  ///< 16-wide steps along the columns: queries
  using Scores = typename Base::template Accumulator<Chunk>;
  using Probabilities = OperandA<BackwardTypes, kKeySteps>;
};

/// dK or dV of a warp's keys, and then of its neighbour's; of all columns, or half of them.
template <BackwardConfig C>
struct KeyGradientTypes : MmaTypes<C.dtype, C.keys_per_warp() * C.key_sharers()> {
  static constexpr int kColumns = C.head_dim / C.key_sharers();
  using Gradient = typename MmaTypes<C.dtype, C.keys_per_warp() * C.key_sharers()>::template Accumulator<kColumns>;

  CUTE_DEVICE static int column_begin(int warp) { return warp % C.key_sharers() * kColumns; }
  /// The key of an accumulator's row, counted from the tile's first.
  CUTE_DEVICE static int key(int warp, int row, int lane) {
    constexpr int kOwn = C.keys_per_warp() / 8;  // rows
    return (row < kOwn ? warp : warp ^ 1) * C.keys_per_warp() + accumulator_row(row % kOwn, lane);
  }
};
template <BackwardConfig C>
using KeyGradient = typename KeyGradientTypes<C>::Gradient;

/// dQ of a unit or tile: the warps of a group divide its queries and its columns.
template <BackwardConfig C>
struct QueryGradientTypes : MmaTypes<C.dtype, C.dq_rows() / C.query_warps()> {
  static constexpr int kColumns = C.head_dim / (C.group_warps() / C.query_warps());
  using Gradient = typename MmaTypes<C.dtype, C.dq_rows() / C.query_warps()>::template Accumulator<kColumns>;

  CUTE_DEVICE static int row_begin(int warp) { return warp % C.query_warps() * (C.dq_rows() / C.query_warps()); }
  CUTE_DEVICE static int column_begin(int warp) { return warp / C.query_warps() * kColumns; }
};

// dQ's sums of a tile of queries stand in the order of the accumulators of m16n8 that are added to them, 128 floats
// each, those of 16 rows after each other. Where four sums can be added at once, a lane's four are neighbours,
// otherwise those of a warp are.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kVectorSums = false;
#else
constexpr bool kVectorSums = true;
#endif
constexpr int kSumsOfPiece = 128;

/// Where piece (row, column), in elements, begins among the sums of a tile.
CUTE_HOST_DEVICE constexpr int sum_offset(int head_dim, int row, int column) {
  return (row / 16 * (head_dim / 8) + column / 8) * kSumsOfPiece;
}

/// `piece`: where it begins. Nobody waits for it.
CUTE_DEVICE void add_to_sums(float* piece, int lane, float x0, float x1, float x2, float x3) {
  if constexpr (kVectorSums) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(piece + 4 * lane), "f"(x0), "f"(x1), "f"(x2),
                 "f"(x3)
                 : "memory");
  } else {
    float const x[] = {x0, x1, x2, x3};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(piece + lane + 32 * i), "f"(x[i]) : "memory");
    }
  }
}

CUTE_DEVICE float4 read_sums(float const* piece, int lane) {
  if constexpr (kVectorSums) {
    return reinterpret_cast<float4 const*>(piece)[lane];
  } else {
    return {piece[lane], piece[lane + 32], piece[lane + 64], piece[lane + 96]};
  }
}

/// What a thread block works on, read again where it is needed: registers are scarce.
struct KeyTile {
  uint16_t const *q, *dout;  ///< row 0 of the sequence, of the first query head
  float* sums;               ///< of its first query tile; null where nobody wants dQ. Of rows that write dS: where to
  float const* terms;
  int* turns;
  Sequence sequence;
  QueryWalk walk;  ///< of each query head
  int key_begin, head_kv;
  int head;   ///< the first query head
  int steps;  ///< of the walks of all heads
  /// Tiles of keys whose walks may have met a query tile before: least_before .. this one - 1.
  int least_before;
  /// Queries from all_begin on and before all_end see all keys of the tile; so do none where it isn't full.
  int all_begin, all_end;
};

/// Under block lists: the tiles that the block walks, in place of `walk`.
struct ScoredKeyTile : KeyTile {
  ListedTile const* listed;  ///< null without lists
};

/// In bytes, in the order in which they stand.
// Rows that write dS have a second stage of dO where the others have dS, and its barriers.
struct OneGroupBarriers {
  static constexpr int kQ = 0, kDout = kQ + TilePipeline<2>::kBytes, kScores = kDout + TilePipeline<1>::kBytes;
  static constexpr int kBytes = kScores + TilePipeline<1>::kBytes;
};
template <int QueryUnits, int ScoresUnits>
struct GroupBarriers {
  static constexpr int kQueries = 0, kScores = kQueries + TilePipeline<QueryUnits>::kBytes;
  static constexpr int kProbabilities = kScores + TilePipeline<ScoresUnits>::kBytes;  ///< of each pair across groups
  static constexpr int kBytes = kProbabilities + 4 * ScoresUnits * int(sizeof(uint64_t));
};

template <BackwardConfig C>
struct BackwardLayout {
  using Place = std::conditional_t<C.scored(), ScoredKeyTile, KeyTile>;
  static constexpr int kKTile = C.tile_n * C.head_dim * 2, kQTile = C.unit() * C.head_dim * 2;
  static constexpr int kScoresTile = C.tile_n * C.tile_m * 2, kTerms = kTermsOfQuery * C.unit() * int(sizeof(float));
  static constexpr int kScoresTiles = C.whole_dq ? 2 : 1, kScoresUnits = 2 * kScoresTiles;
  /// Of one group, tiles of Q, and one of dO behind them. Of more, units of Q, each with its dO.
  static constexpr int kQStages = C.groups == 1 ? 2 : C.groups == 3 && C.arch == 90 ? 4 : 3;
  static constexpr int kQ = kKTile;
  static constexpr int kDout = kQ + kQStages * kQTile;                                        ///< of one group
  static constexpr int kUnitBytes = 2 * kQTile;                                               ///< of Q and dO
  static constexpr int kScores = C.groups > 1 ? kQ + kQStages * kUnitBytes : kDout + kQTile;  ///< P, dS: [key, query]
  static constexpr int kRowTerms = kScores + kScoresTiles * kScoresTile;
  static constexpr int kPlace = kRowTerms + kQStages * kTerms;
  static constexpr int kBarriers = kPlace + (int(sizeof(Place)) + 15) / 16 * 16;
  static constexpr int kBytes =
      kBarriers + (C.groups > 1 ? GroupBarriers<kQStages, kScoresUnits>::kBytes : OneGroupBarriers::kBytes);
  static_assert(kBytes <= (C.arch == 90 ? 227 : 99) * 1024, "sm_89 and sm_120 have no more than 99 KB");

  /// V stands there before the walk, on its way to registers.
  static constexpr int kV = C.groups > 1 ? kQ : kDout;
  static_assert(kV + kKTile <= kRowTerms);

  CUTE_DEVICE static Place& place(char* smem) { return *reinterpret_cast<Place*>(smem + kPlace); }
};

}  // namespace cutlass_fmha
