// The end of a thread block whose warps divide the keys: their O and l are merged through shared memory, in one
// exchange with one barrier, and leave as whole rows.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../core/key_parts.cuh"
#include "../core/scheduler.h"

namespace cutlass_fmha {

/// Whole rows of O and their LSE, merged from the key parts.
template <ForwardConfig C, class KeyParts>
CUTE_DEVICE void write_merged_rows(ForwardParams const& p, char* smem, WorkTile const& tile) {
  using T = ForwardTypes<C>;
  constexpr int kChunk = T::P::kChunk, kChunks = C.head_dim / kChunk, kItems = C.tile_m * kChunks;
  CUTE_UNROLL
  for (int begin = 0; begin < kItems; begin += C.threads()) {
    int const item = begin + int(threadIdx.x);
    int const row = item / kChunks, place = item % kChunks * kChunk;
    int const query = tile.m_block * C.tile_m + row;
    if ((kItems % C.threads() != 0 && item >= kItems) || query >= p.seqlen_q) continue;
    MergedRow<C, KeyParts> const merged(smem, row, p.scale_log2);
    float o[kChunk];
    merged.read(smem, row, place, 1.f, o);
    auto* const to = static_cast<typename T::Word*>(p.o) + tile.batch * p.o_stride.batch + tile.head * p.o_stride.head +
                     query * p.o_stride.seqlen + KeyParts::dimension(place);
    *reinterpret_cast<uint4*>(to) = pack_chunk<typename T::Element>(o);
    if (p.lse != nullptr && place == 0) {
      p.lse[(int64_t(tile.batch) * p.num_heads + tile.head) * p.seqlen_q + query] = merged.lse;
    }
  }
}

/// After the walk: `tile_row` is the warp's first row within the tile.
template <ForwardConfig C, class KeyParts>
CUTE_DEVICE void few_query_epilogue(ForwardParams const& p, char* smem, WorkTile const& tile, int key_part,
                                    int tile_row, typename ForwardTypes<C>::OutputFragment& output,
                                    typename ForwardTypes<C>::Softmax const& softmax) {
  if constexpr (C.dependent_launch) start_dependents();
  write_key_part<C, KeyParts>(smem, key_part, tile_row, output, softmax);
  __syncthreads();
  write_merged_rows<C, KeyParts>(p, smem, tile);
}

}  // namespace cutlass_fmha
