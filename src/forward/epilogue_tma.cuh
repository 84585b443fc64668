// What leaves a row that copies by TMA: O through the warp's own rows of shared memory, from where the copy unit writes
// it (and leaves out what lies beyond the end of the queries), and LSE.
#pragma once

#include "keys_tma.cuh"
#include "staging.cuh"

namespace cutlass_fmha {

/// A part's O and softmax state, for the launch that merges them. `part_row`: the warp's first row of it.
template <ForwardConfig C>
CUTE_DEVICE void write_part(Tail const& tail, RowMaxima const& maxima, int part_row,
                            typename ForwardTypes<C>::OutputFragment& output,
                            typename ForwardTypes<C>::Softmax const& softmax, int lane) {
  using namespace cute;
  auto rows = by_row(output);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    int64_t const at = part_row + accumulator_row(row, lane);
    float* const to = tail.o + at * C.head_dim + lane % 4 * 2;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(rows); col += 2) {
      *reinterpret_cast<float2*>(to + col / 2 * 8) = make_float2(rows(row, col), rows(row, col + 1));
    }
    float const sum = QuadOfLanes::sum(softmax.row_sum[row]), maximum = maxima.get(row);
    if (lane % 4 == 0) {
      tail.maxima[at] = maximum;
      tail.sums[at] = sum;
    }
  }
}

/// `tile_row`: the warp's first row within the tile.
template <ForwardConfig C>
CUTE_DEVICE void tma_epilogue(ForwardTmaParams const& p, char* smem, Work const& work,
                              typename ForwardTypes<C>::OutputFragment& output,
                              typename ForwardTypes<C>::Softmax const& softmax, int tile_row, int lane) {
  using namespace cute;
  using T = ForwardTypes<C>;
  using P = typename T::P;
  if (work.part_row >= 0) {
    write_part<C>(p.tail, TmaLayout<C>::maxima(smem, tile_row), work.part_row + tile_row, output, softmax, lane);
    return;
  }
  auto rows = by_row(output);
  auto const lse = softmax.finalize(rows, TmaLayout<C>::maxima(smem, tile_row));
  int const row_begin = work.row_begin + tile_row;

  stage_rows<C>(smem, tile_row, rows, lane);
  if (p.lse != nullptr && lane % 4 == 0) {
    float* const to = p.lse + (int64_t(work.batch) * p.num_heads + work.head) * p.seqlen_q;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(rows); ++row) {
      int const query = row_begin + accumulator_row(row, lane);
      if (query < p.seqlen_q) to[query] = lse[row];
    }
  }
  cute::tma_store_fence();
  __syncwarp();
  if (cute::elect_one_sync()) {
    TmaTile<C.head_dim, T::kRows, C.element_bytes()>::store(p.o_map, smem + tile_row * P::kRowBytes,
                                                            C.tile_m * P::kRowBytes, row_begin, work.head, work.batch);
  }
}

}  // namespace cutlass_fmha
