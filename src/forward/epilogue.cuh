// What leaves the kernel: O through the warp's own rows of shared memory, so that it is written in whole rows, and LSE.
#pragma once

#include "keys_cp_async.cuh"

namespace cutlass_fmha {

// Not as staging.cuh does it: with that, sm_120's 256x64 at head dim 128 spills.

/// Leaves the warp's rows of O in the swizzled tile that begins at `tile`, from row `tile_row` on, as elements.
template <ForwardConfig C, class Rows>
CUTE_DEVICE void stage_elements(char* tile, int tile_row, Rows const& rows, int lane) {
  using namespace cute;
  using T = ForwardTypes<C>;
  auto coordinates =
      typename T::Mma{}.get_slice(lane).partition_C(make_identity_tensor(Shape<Int<T::kRows>, Int<C.head_dim_v()>>{}));
  auto coordinate = by_row(coordinates);
  using P = typename T::OutputPanels;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(rows); col += 2) {
      auto const at = coordinate(row, col);
      *reinterpret_cast<uint32_t*>(tile + P::template byte_offset<C.tile_m>(tile_row + get<0>(at), get<1>(at))) =
          pack<typename T::Element>(rows(row, col), rows(row, col + 1));
    }
  }
}

/// write(row, column, chunk) for each 16 bytes of elements that stage_elements() left, by whole rows. `AtOnce`: so
/// many of a lane's are read before the first is written, 0: all of them, so that nothing waits for shared memory
/// twice.
template <ForwardConfig C, int AtOnce = 0, class Write>
CUTE_DEVICE void for_staged_chunks(char const* tile, int tile_row, int lane, Write const& write) {
  using namespace cute;
  using P = typename ForwardTypes<C>::OutputPanels;
  constexpr int kChunks = C.head_dim_v() / P::kChunk, kCount = C.rows_per_warp() * kChunks / 32;
  constexpr int kAtOnce = AtOnce == 0 ? kCount : AtOnce;
  auto const place = [&](int i) { return (i * 32 + lane) / kChunks; };
  auto const column = [&](int i) { return (i * 32 + lane) % kChunks * P::kChunk; };
  CUTE_NO_UNROLL
  for (int begin = 0; begin < kCount; begin += kAtOnce) {
    uint128_t chunks[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      uint32_t const from = P::template byte_offset<C.tile_m>(tile_row + place(begin + i), column(begin + i));
      chunks[i] = *reinterpret_cast<uint128_t const*>(tile + from);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) write(place(begin + i), column(begin + i), chunks[i]);
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
  stage_elements<C>(smem, tile_row, rows, lane);
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
