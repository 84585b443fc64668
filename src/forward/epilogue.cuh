// What leaves the kernel: O through the warp's own rows of shared memory, so that it is written in whole rows, and LSE.
#pragma once

#include "keys_cp_async.cuh"

namespace cutlass_fmha {

/// Leaves the warp's rows of O in the swizzled tile that begins at `tile`, from row `tile_row` on, as elements.
template <ForwardConfig C, class Rows>
CUTE_DEVICE void stage_rows(char* tile, int tile_row, Rows const& rows, int lane) {
  using namespace cute;
  using P = typename ForwardTypes<C>::OutputPanels;
  // As in LdmatrixTile: a chunk of 8 columns only flips bits of the lane's address.
  uint32_t const lane_offset = P::template byte_offset<C.tile_m>(lane / 4, lane % 4 * 2);
  CUTE_UNROLL
  for (int chunk = 0; chunk < C.head_dim_v() / 8; ++chunk) {
    char* const to =
        tile + ((lane_offset ^ (chunk % P::kChunks * 16)) + (chunk / P::kChunks * C.tile_m + tile_row) * P::kRowBytes);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(rows); ++row) {
      *reinterpret_cast<uint32_t*>(to + accumulator_row(row, 0) * P::kRowBytes) =
          pack<typename ForwardTypes<C>::Element>(rows(row, 2 * chunk), rows(row, 2 * chunk + 1));
    }
  }
}

/// write(row, column, chunk) for each 16 bytes of elements that stage_rows() left, a panel's rows at a time. So many
/// times eight rows are read before the first is written: `EightsAtOnce`, 0: all, so that nothing waits for shared
/// memory twice.
template <ForwardConfig C, int EightsAtOnce = 0, class Write>
CUTE_DEVICE void for_staged_chunks(char const* tile, int tile_row, int lane, Write const& write) {
  using namespace cute;
  using P = typename ForwardTypes<C>::OutputPanels;
  constexpr int kEights = C.rows_per_warp() / 8, kAtOnce = EightsAtOnce == 0 ? kEights : EightsAtOnce;
  constexpr int kPasses = P::kChunks / 4;  // that a warp takes for eight rows of a panel
  int const lane_row = lane / P::kChunks, lane_column = lane % P::kChunks * P::kChunk;
  auto const row_of = [&](int eight, int pass) { return 8 * eight + pass * (8 / kPasses) + lane_row; };
  CUTE_NO_UNROLL
  for (int begin = 0; begin < kEights; begin += kAtOnce) {
    uint128_t chunks[kAtOnce][kPasses][P::kCount];
    CUTE_UNROLL
    for (int eight = 0; eight < kAtOnce; ++eight) {
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        // The swizzle of a row is that of its number within eight.
        char const* const from = tile + P::template byte_offset<C.tile_m>(row_of(0, pass), lane_column) +
                                 (tile_row + 8 * (begin + eight)) * P::kRowBytes;
        CUTE_UNROLL
        for (int panel = 0; panel < P::kCount; ++panel) {
          chunks[eight][pass][panel] = *reinterpret_cast<uint128_t const*>(from + panel * (C.tile_m * P::kRowBytes));
        }
      }
    }
    CUTE_UNROLL
    for (int eight = 0; eight < kAtOnce; ++eight) {
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        CUTE_UNROLL
        for (int panel = 0; panel < P::kCount; ++panel) {
          write(row_of(begin + eight, pass), lane_column + panel * P::kWidth, chunks[eight][pass][panel]);
        }
      }
    }
  }
}

/// `tile_row`: the warp's first row within the tile.
template <ForwardConfig C>
CUTE_DEVICE void epilogue(ForwardParams const& p, char* smem, typename ForwardTypes<C>::OutputFragment& output,
                          typename ForwardTypes<C>::Softmax& softmax, int tile_row, int lane) {
  using namespace cute;
  auto rows = by_row(output);
  auto const lse = softmax.finalize(rows, SharedLayout<C>::maxima(smem, tile_row));
  TilePosition const at = SharedLayout<C>::position(smem);
  int const row_begin = at.row_begin + tile_row;
  stage_rows<C>(smem, tile_row, rows, lane);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    int const r = accumulator_row(row, lane);
    if (p.lse != nullptr && lane % 4 == 0 && row_begin + r < p.seqlen_q) {
      p.lse[(int64_t(at.batch) * p.num_heads + at.head) * p.seqlen_q + row_begin + r] = lse[row];
    }
  }
  __syncwarp();
  using Word = typename ForwardTypes<C>::Word;
  Word* const o =
      static_cast<Word*>(p.o) + at.batch * p.o_stride.batch + at.head * p.o_stride.head + row_begin * p.o_stride.seqlen;
  int const there = p.seqlen_q - row_begin;
  for_staged_chunks<C>(smem, tile_row, lane, [&](int row, int column, uint128_t const& chunk) {
    if (row >= there) return;
    Word* const to = o + row * p.o_stride.seqlen + column;
    if constexpr (C.copy == Copy::cp_async_16) {
      *reinterpret_cast<uint128_t*>(to) = chunk;
    } else {
      CUTE_UNROLL
      for (int e = 0; e < ForwardTypes<C>::P::kChunk; ++e) to[e] = reinterpret_cast<Word const*>(&chunk)[e];
    }
  });
}

}  // namespace cutlass_fmha
