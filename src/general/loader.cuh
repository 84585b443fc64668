// Tiles of q, k and v on their way to shared memory, wherever their rows stand: one after another, in pages, or packed
// from several heads.
#pragma once

#include "../forward/tile.cuh"

namespace cutlass_fmha {

/// Fills a tile of `Rows` rows with `Threads` threads. Rows that aren't there and dimensions from `head_dim` on become
/// zeros, which keeps what the mma sees finite.
template <int HeadDim, int Rows, int Threads>
struct RowLoader {
  using P = Panels<HeadDim>;
  static constexpr int kChunks = P::kWidth / 8;
  static constexpr int kRowsPerPass = Threads / kChunks;
  static_assert(kRowsPerPass % 8 == 0, "a pass must keep a thread's swizzle pattern");

  /// row_at(row): where the row's first element stands, null for one that isn't there. `any`: an address that may be
  /// named, not read, for those. `vectors`: rows are aligned to 16 bytes and head_dim is a multiple of 8.
  template <class RowAt>
  CUTE_DEVICE static void load(char* tile, uint16_t const* any, int head_dim, bool vectors, RowAt const& row_at) {
    int const first_row = threadIdx.x / kChunks;
    int const column = threadIdx.x % kChunks * 8;
    char* const to = tile + 2 * uint32_t(typename P::template Layout<Rows>{}(first_row, column));
    CUTE_UNROLL
    for (int pass = 0; pass < cute::ceil_div(Rows, kRowsPerPass); ++pass) {
      int const row = first_row + pass * kRowsPerPass;
      if (Rows % kRowsPerPass != 0 && row >= Rows) break;
      uint16_t const* from = row_at(row);
      bool const there = from != nullptr;
      from = (there ? from : any) + column;
      CUTE_UNROLL
      for (int panel = 0; panel < P::kCount; ++panel) {
        char* const chunk = to + (panel * Rows + pass * kRowsPerPass) * P::kWidth * 2;
        int const elements = there ? head_dim - column - panel * P::kWidth : 0;
        copy_chunk(chunk, from + panel * P::kWidth, elements, vectors);
      }
    }
  }

 private:
  /// `elements`: so many of the chunk exist; 0 or fewer, none, and then `from` isn't read; 8 or more, all.
  CUTE_DEVICE static void copy_chunk(char* to, uint16_t const* from, int elements, bool vectors) {
    auto& smem = *reinterpret_cast<cute::uint128_t*>(to);
    if (vectors) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<cute::uint128_t const*>(from),
                                                                   smem, elements > 0);
      return;
    }
    cute::array_aligned<uint16_t, 8> chunk;
    CUTE_UNROLL
    for (int e = 0; e < 8; ++e) chunk[e] = e < elements ? from[e] : uint16_t(0);
    smem = *reinterpret_cast<cute::uint128_t const*>(chunk.data());
  }
};

}  // namespace cutlass_fmha
