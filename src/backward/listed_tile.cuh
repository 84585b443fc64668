// What block lists name of a tile of scores.
#pragma once

#include "../core/visibility.h"
#include "params.h"

namespace cutlass_fmha {

/// What a warp's queries' lists name of a tile of keys: those of tile `tile` of a query head, found together.
__device__ inline ListedTile listed_tile(BackwardParams const& p, Sequence const& s, int head_kv, int head, int tile,
                                         int key_begin) {
  ListedTile found{tile, head, -1, 0};
  int const query_head = head_kv * (p.num_heads / p.num_heads_kv) + head, width = p.tile_n / kListedKeys;
  int const begin = tile * p.tile_m, end = smaller(begin + p.tile_m, s.queries);
  for (int block = begin / p.block_m; block * p.block_m < end; ++block) {
    NamedKeys named;
    int const count = block_count(p, s.batch, query_head, block);
    int const* const list = block_list(p, s.batch, query_head, block);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      named.add(p, s, uint32_t(list[i * p.block_stride.key]), key_begin, p.tile_n, kListedKeys);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      named.pieces |= __shfl_xor_sync(0xffffffffu, named.pieces, step);
      named.tile_before = larger(named.tile_before, __shfl_xor_sync(0xffffffffu, named.tile_before, step));
    }
    found.before = larger(found.before, named.tile_before);
    int const first = larger(block * p.block_m - begin, 0), last = smaller((block + 1) * p.block_m, end) - begin;
    // Unrolled, the loop takes too many steps in sm_90's wide rows: nvcc 13.0 has the least of three ends as the most.
#pragma unroll 1
    for (int at = first; at < last; at += kListedQueries) found.pieces |= named.pieces << at / kListedQueries * width;
  }
  return found;
}

}  // namespace cutlass_fmha
