// O on its way out, in a warp's own rows of the shared memory that held Q: staged as elements, read by whole rows.
#pragma once

#include "../core/fragments.cuh"

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
/// times eight rows are read before the first is written: `EightsAtOnce`.
template <ForwardConfig C, int EightsAtOnce = 1, class Write>
CUTE_DEVICE void for_staged_rows(char const* tile, int tile_row, int lane, Write const& write) {
  using namespace cute;
  using P = typename ForwardTypes<C>::OutputPanels;
  constexpr int kEights = C.rows_per_warp() / 8;
  constexpr int kPasses = P::kChunks / 4;  // that a warp takes for eight rows of a panel
  int const lane_row = lane / P::kChunks, lane_column = lane % P::kChunks * P::kChunk;
  auto const row_of = [&](int eight, int pass) { return 8 * eight + pass * (8 / kPasses) + lane_row; };
  CUTE_NO_UNROLL
  for (int begin = 0; begin < kEights; begin += EightsAtOnce) {
    uint128_t chunks[EightsAtOnce][kPasses][P::kCount];
    CUTE_UNROLL
    for (int eight = 0; eight < EightsAtOnce; ++eight) {
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
    for (int eight = 0; eight < EightsAtOnce; ++eight) {
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

}  // namespace cutlass_fmha
