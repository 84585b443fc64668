// Which thread block computes which query tile. Plain integer arithmetic, the same on host and device.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "../params.h"

namespace cutlass_fmha {

struct WorkTile {
  int m_block;  ///< query rows [m_block * tile_m, (m_block + 1) * tile_m)
  int head;
  int batch;
};

FMHA_HOST_DEVICE inline int64_t grid_size(ForwardParams const& p, int tile_m) {
  return int64_t(ceil_div(p.seqlen_q, tile_m)) * p.num_heads * p.batch;
}

/// Without a mask, the tiles of one head follow each other, so that its K and V stay in L2. With a diagonal, the tiles
/// with the most keys come first, over all heads: the blocks that finish last are then short ones.
/// `Quick`: in a hurry to know, since everything waits for it: where there is one sequence, a division is skipped.
template <bool Quick = false>
FMHA_HOST_DEVICE inline WorkTile work_tile(ForwardParams const& p, int tile_m, int block) {
  int const m_blocks = ceil_div(p.seqlen_q, tile_m);
  int m_block, sequence;
  if (p.diagonal == kNoDiagonal) {
    sequence = block / m_blocks;
    m_block = block - sequence * m_blocks;
  } else {
    int const sequences = p.batch * p.num_heads;
    int const rank = block / sequences;
    sequence = block - rank * sequences;
    m_block = m_blocks - 1 - rank;
  }
  int const batch = Quick && p.batch == 1 ? 0 : sequence / p.num_heads;
  return {m_block, sequence - batch * p.num_heads, batch};
}

/// Prepares scheduled_tile() and kv_head(). For a problem with at least one tile and at most 2^31 - 1.
inline void set_schedule(ForwardTmaParams& p, int tile_m) {
  p.m_blocks = ceil_div(p.seqlen_q, tile_m);
  p.by_rank = Divisor(p.diagonal == kNoDiagonal ? p.m_blocks : p.batch * p.num_heads);
  p.by_heads = Divisor(p.num_heads);
  p.by_group = Divisor(p.num_heads / p.num_heads_kv);
}

/// work_tile() without a division.
FMHA_HOST_DEVICE inline WorkTile scheduled_tile(ForwardTmaParams const& p, int block) {
  int const quotient = p.by_rank.quotient(block);
  int m_block, sequence;
  if (p.diagonal == kNoDiagonal) {
    sequence = quotient;
    m_block = block - sequence * p.m_blocks;
  } else {
    sequence = block - quotient * (p.batch * p.num_heads);
    m_block = p.m_blocks - 1 - quotient;
  }
  int const batch = p.by_heads.quotient(sequence);
  return {m_block, sequence - batch * p.num_heads, batch};
}

/// The keys of a tile that a block walks: key blocks [end - count, end).
struct KeyPart {
  int tile;
  int end, count;
  int row;  ///< the first of its rows among those of all parts; -1: there is one part
};

/// Of block number `block`, where tiles of `key_blocks` key blocks have a tail. Its first parts come first.
FMHA_HOST_DEVICE inline KeyPart tail_part(Tail const& t, int tile_m, int key_blocks, int block) {
  int const number = block - t.begin;
  if (number < t.tiles) return {block, key_blocks, t.first, number * tile_m};
  int const tile = t.by_rest.quotient(number - t.tiles);
  int const part = number - t.tiles - tile * (t.parts - 1);
  int const end = key_blocks - t.first - part * t.rest;
  return {t.begin + tile, end, end < t.rest ? end : t.rest, ((part + 1) * t.tiles + tile) * tile_m};
}

/// The head of K and V that query head `head` attends to.
FMHA_HOST_DEVICE inline int kv_head(ForwardTmaParams const& p, int head) { return p.by_group.quotient(head); }

}  // namespace cutlass_fmha
