// The kernel of the rows with features: any mask, bias, length and place of keys that params.h knows, one tile of query
// rows and one part of their keys per thread block. The plain rows (forward/kernel.cuh) know none of that.
#pragma once

#include "block_keys.cuh"
#include "few_query.cuh"
#include "tile_rows.cuh"

namespace cutlass_fmha {

/// A row starts as if it had seen one key already, its sink, whose value is 0. Only one key part of one part may count
/// it.
template <ForwardConfig C>
CUTE_DEVICE void start_rows(FeatureParams const& p, FeatureTile const& tile, int key_part, int tile_row,
                            RowMaxima maxima, typename ForwardTypes<C>::Softmax& softmax) {
  using T = ForwardTypes<C>;
  bool const counts = p.sinks != nullptr && tile.split == 0 && key_part == 0;
  CUTE_UNROLL
  for (int row = 0; row < 2 * T::kRowSteps; ++row) {
    float sink = -INFINITY;
    if (counts) {
      int const packed = tile.row_begin + tile_row + accumulator_row(row, lane_id());
      sink = p.sinks[query_row(p, tile, packed).head];
    }
    softmax.start(row, sink, lane_id() % 4 == 0, maxima);
  }
}

/// What a kernel takes.
template <ForwardConfig C>
using FeatureKernelParams = cute::conditional_t<C.copy == Copy::tma, FeatureTmaParams, FeatureParams>;

template <ForwardConfig C>
constexpr int features_smem_bytes() {
  if constexpr (C.scored()) {
    return FeatureLayout<C>::kBytes;
  } else {
    return FeatureTileLayout<C>::kBytes;
  }
}

template <ForwardConfig C>
CUTE_DEVICE void scored_rows(FeatureParams const& p, char* smem, Sequence const& sequence, FeatureTile const& tile,
                             KeyWalk const& walk, int warp) {
  using T = ForwardTypes<C>;
  int const key_part = warp % C.kv_warps, tile_row = warp / C.kv_warps * T::kRows;
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.score_unit * kLog2e);
  RowMaxima const maxima{FeatureLayout<C>::KeyParts::maxima(smem) + key_part * C.tile_m + tile_row};
  using Place = typename FeatureLayout<C>::Place;
  if (threadIdx.x == 0) new (&FeatureLayout<C>::place(smem)) Place(p, sequence, tile, walk);
  if constexpr (C.kv_warps > 1) {
    FewQueryFeatureKeys<C> keys(p, smem, sequence, tile, walk, key_part);
    if (C.dependent_launch && !p.device_lengths) wait_for_kernels_ahead();
    if (walk.tiles > 0) keys.request_first();
    start_rows<C>(p, tile, key_part, tile_row, maxima, softmax);
    if (walk.tiles > 0) walk_steps<C>(keys, output, softmax);
  } else {
    BlockKeys<C> keys(p, smem, tile_row);
    keys.store_view(sequence, tile);
    __syncthreads();
    if (walk.tiles > 0) load_query_tile<C>(p, smem, sequence, tile);
    start_rows<C>(p, tile, key_part, tile_row, maxima, softmax);
    if (walk.tiles > 0) walk_steps<C>(keys, output, softmax);
  }
  if (walk.tiles > 0) {
    cute::cp_async_wait<0>();
    __syncthreads();  // nobody reads tiles any more, and nothing arrives in them
  }
  // Not where they are many: what is asked of the tile would take a register all along.
  int const rows = C.kv_warps > 1 ? rows_of(p, tile, C.tile_m) : C.tile_m;
  write_key_part<C, typename FeatureLayout<C>::KeyParts>(smem, key_part, tile_row, output, softmax, rows);
  __syncthreads();
  Place const& place = FeatureLayout<C>::place(smem);
  merge_rows<C>(p, smem, place.sequence, place.tile);
}

template <ForwardConfig C>
CUTE_DEVICE void features(FeatureKernelParams<C> const& p) {
  static_assert(C.takes_features() && (C.copy == Copy::cp_async_16 || (C.copy == Copy::tma && !C.scored())));
  static_assert(!C.scored() || ((C.stages >= 2 || C.kv_warps > 1) && !C.ping_pong));
  static_assert(C.tile_m % (16 * (C.warps / C.kv_warps)) == 0 && C.warps % C.kv_warps == 0 && C.tile_n % 16 == 0);
  extern __shared__ __align__(1024) char smem[];

  FeatureTile tile = tile_at(p, C.tile_m, blockIdx.x);
  // As late as can be: what precedes the first copies costs no time before the wait. Each thread waits once.
  if (C.dependent_launch && p.device_lengths) wait_for_kernels_ahead();
  Sequence sequence = sequence_at(p, tile.batch);
  if (p.by_pack.quotient(tile.row_begin) >= sequence.rows_q) return;  // seqlen_q is that of the longest sequence
  if constexpr (!C.scored()) cut_first(p, C.tile_m, tile, sequence);
  int const i_begin = p.by_pack.quotient(tile.row_begin);
  int const i_end = p.by_pack.quotient(tile.row_begin + C.tile_m - 1) + 1;
  KeyWalk walk = walk_of(p, sequence, tile, i_begin, i_end, C.step_keys());
  if constexpr (C.modifies_scores()) {
    int const last = smaller(i_end, sequence.queries) - 1;
    if (p.near_first) walk.put_off = tiles_put_off(walk.tiles, larger(0, last + sequence.offset), C.tile_n);
  }
  int const warp = uniform(threadIdx.x / 32);
  if constexpr (!C.scored()) {
    tile_rows<C>(p, smem, sequence, tile, walk, warp);
  } else {
    scored_rows<C>(p, smem, sequence, tile, walk, warp);
  }
}

}  // namespace cutlass_fmha
