// What leaves the kernel: O through the warp's own rows of shared memory, so that it is written in whole rows, and LSE.
#pragma once

#include "keys_cp_async.cuh"

namespace cutlass_fmha {

/// Writes `rows` rows of `HeadDim` elements that lie in the swizzled tile `tile` from row `tile_row` on.
template <ForwardConfig C>
CUTE_DEVICE void write_rows(char const* tile, int tile_row, uint16_t* to, int64_t row_stride, int rows, int lane) {
  using namespace cute;
  constexpr int kChunks = C.head_dim / 8, kCount = C.rows_per_warp() * kChunks / 32;
  typename Panels<C.head_dim>::template Layout<C.tile_m> layout;
  auto const place = [&](int i) { return (i * 32 + lane) / kChunks; };
  auto const column = [&](int i) { return (i * 32 + lane) % kChunks * 8; };
  uint128_t chunks[kCount];  // all of them before the first is written: nothing waits for shared memory twice
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    chunks[i] = *reinterpret_cast<uint128_t const*>(tile + 2 * layout(tile_row + place(i), column(i)));
  }
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (place(i) >= rows) continue;
    uint16_t* const destination = to + place(i) * row_stride + column(i);
    if constexpr (C.copy == Copy::cp_async_16) {
      *reinterpret_cast<uint128_t*>(destination) = chunks[i];
    } else {
      CUTE_UNROLL
      for (int e = 0; e < 8; ++e) destination[e] = reinterpret_cast<uint16_t const*>(&chunks[i])[e];
    }
  }
}

/// `tile_row`: the warp's first row within the tile.
template <ForwardConfig C>
CUTE_DEVICE void epilogue(ForwardParams const& p, char* smem, typename ForwardTypes<C>::OutputFragment& output,
                          typename ForwardTypes<C>::Softmax& softmax, int tile_row, int lane) {
  using namespace cute;
  using T = ForwardTypes<C>;
  auto rows = by_row(output);
  auto const lse = softmax.finalize(rows, SharedLayout<C>::maxima(smem, tile_row));
  TilePosition const at = SharedLayout<C>::position(smem);
  int const row_begin = at.row_begin + tile_row;
  auto coordinates =
      typename T::Mma{}.get_slice(lane).partition_C(make_identity_tensor(Shape<Int<T::kRows>, Int<C.head_dim>>{}));
  auto coordinate = by_row(coordinates);
  typename Panels<C.head_dim>::template Layout<C.tile_m> layout;

  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    int const r = get<0>(coordinate(row, _0{}));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(rows); col += 2) {
      int const c = get<1>(coordinate(row, col));
      *reinterpret_cast<uint32_t*>(smem + 2 * layout(tile_row + r, c)) =
          pack<typename T::Element>(rows(row, col), rows(row, col + 1));
    }
    if (p.lse != nullptr && lane % 4 == 0 && row_begin + r < p.seqlen_q) {
      p.lse[(int64_t(at.batch) * p.num_heads + at.head) * p.seqlen_q + row_begin + r] = lse[row];
    }
  }
  __syncwarp();
  uint16_t* const o = static_cast<uint16_t*>(p.o) + at.batch * p.o_stride.batch + at.head * p.o_stride.head +
                      row_begin * p.o_stride.seqlen;
  write_rows<C>(smem, tile_row, o, p.o_stride.seqlen, p.seqlen_q - row_begin, lane);
}

}  // namespace cutlass_fmha
