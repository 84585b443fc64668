// Which thread block computes which query tile. Plain integer arithmetic, the same on host and device.
#pragma once

#include <cstdint>

#include "../config.h"
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

/// What the order of tiles depends on.
struct Gpu {
  int sms;
  int64_t l2_bytes;
};

/// Where some tiles have more keys than others, the long ones come first, so that all SMs end with short ones. But if
/// tiles of all heads are mixed and K and V of all don't fit the L2 cache, each tile brings them from memory. So the
/// long tiles of some heads are mixed, the longest first, then those of the next heads; and then the short tiles of all
/// heads, which have few keys. These are as many heads as fit, or as leave four tiles of each to run at a time: they
/// begin near each other, and what one brings the others find. `heads`: those of all batch entries, `group` of which
/// share keys and values, of `head_bytes` together. Of `tiles` of a head, `short_tiles` are short.
inline TileOrder tile_order(Gpu const& gpu, int warps, int heads, int group, int64_t head_bytes, int tiles,
                            int short_tiles) {
  constexpr int kWarpsPerSm = 8, kTilesAtOnce = 4;
  int64_t const cached = gpu.l2_bytes / 2 / (head_bytes > 0 ? head_bytes : 1) * group;
  int64_t const shared = int64_t(gpu.sms) * kWarpsPerSm / warps / kTilesAtOnce;
  int64_t const groups = heads / group, wanted = (cached > shared ? cached : shared) / group;
  int64_t const most = wanted > 1 ? wanted : 1;
  if (most >= groups) return {heads, tiles};
  int64_t const shares = (groups + most - 1) / most;  // alike
  return {int((groups + shares - 1) / shares) * group, tiles - short_tiles};
}

/// Tiles of which the last row sees at most half of what that of the last tile sees; that one is none of them.
inline int short_tiles(int64_t diagonal, int64_t seqlen_k, int tile_m, int tiles) {
  int64_t const most = int64_t(tiles) * tile_m + diagonal;
  int64_t const half = (most < seqlen_k ? most : seqlen_k) / 2;
  int64_t const count = half < diagonal ? 0 : (half - diagonal) / tile_m;
  return int(count < tiles - 1 ? count : tiles - 1);
}

/// A tile by its head, counted over all batch entries, and its rank: 0 is the last tile of the head.
struct RankedTile {
  int rank, head;
};

FMHA_HOST_DEVICE inline RankedTile ranked_tile(TileOrder const& order, int heads, int number) {
  int const long_tiles = heads * order.tiles;
  if (number >= long_tiles) {
    int const rank = (number - long_tiles) / heads;
    return {order.tiles + rank, number - long_tiles - rank * heads};
  }
  int const first = order.heads >= heads ? 0 : number / (order.heads * order.tiles) * order.heads;
  int const count = order.heads < heads - first ? order.heads : heads - first;
  int const rank = (number - first * order.tiles) / count;
  return {rank, first + number - first * order.tiles - rank * count};
}

/// Without a mask, the tiles of one head follow each other, so that its K and V stay in L2.
/// `Quick`: in a hurry to know, since everything waits for it: where there is one sequence, a division is skipped.
template <bool Quick = false>
FMHA_HOST_DEVICE inline WorkTile work_tile(ForwardParams const& p, int tile_m, int block) {
  int const m_blocks = ceil_div(p.seqlen_q, tile_m);
  int m_block, sequence;
  if (p.diagonal == kNoDiagonal) {
    sequence = block / m_blocks;
    m_block = block - sequence * m_blocks;
  } else {
    RankedTile const tile = ranked_tile(p.order, p.batch * p.num_heads, block);
    sequence = tile.head;
    m_block = m_blocks - 1 - tile.rank;
  }
  int const batch = Quick && p.batch == 1 ? 0 : sequence / p.num_heads;
  return {m_block, sequence - batch * p.num_heads, batch};
}

/// Of a launch. For a problem with at least one tile. On an H200, whose memory is 3 to 16 times as fast as that of GPUs
/// with sm_89 and sm_120 (`fast_memory`), small tiles, two or more an SM, are 2 to 5 % faster if those of all heads are
/// mixed.
inline TileOrder tile_order(ForwardParams const& p, ForwardConfig const& c, Gpu const& gpu) {
  int const heads = p.batch * p.num_heads, tiles = ceil_div(p.seqlen_q, c.tile_m);
  if (p.diagonal == kNoDiagonal || (c.architecture().fast_memory && c.warps < 8)) return {heads, tiles};
  return tile_order(gpu, c.warps, heads, p.num_heads / p.num_heads_kv,
                    int64_t(p.seqlen_k) * c.head_dim * 2 * c.element_bytes(), tiles,
                    short_tiles(p.diagonal, p.seqlen_k, c.tile_m, tiles));
}

/// Prepares scheduled_tile() and kv_head(). For a problem with at least one tile and at most 2^31 - 1.
inline void set_schedule(ForwardTmaParams& p, int tile_m) {
  p.m_blocks = ceil_div(p.seqlen_q, tile_m);
  int const heads = p.batch * p.num_heads;
  p.by_rank = Divisor(p.diagonal == kNoDiagonal ? p.m_blocks : p.order.heads);
  p.by_share = Divisor(p.order.heads * p.order.tiles);
  p.last = (heads - 1) / p.order.heads * p.order.heads;
  p.by_last = Divisor(heads - p.last);
  p.by_all = Divisor(heads);
  p.by_heads = Divisor(p.num_heads);
  p.by_group = Divisor(p.num_heads / p.num_heads_kv);
}

/// work_tile() without a division.
FMHA_HOST_DEVICE inline WorkTile scheduled_tile(ForwardTmaParams const& p, int block) {
  int m_block, sequence;
  if (p.diagonal == kNoDiagonal) {
    sequence = p.by_rank.quotient(block);
    m_block = block - sequence * p.m_blocks;
  } else {
    int const heads = p.batch * p.num_heads, long_tiles = heads * p.order.tiles;
    bool const is_long = block < long_tiles;
    int const first = is_long ? p.by_share.quotient(block) * p.order.heads : 0;
    int const tile = block - (is_long ? first * p.order.tiles : long_tiles);
    int const rank = (!is_long ? p.by_all : first == p.last ? p.by_last : p.by_rank).quotient(tile);
    sequence = first + tile - rank * (!is_long ? heads : first == p.last ? heads - first : p.order.heads);
    m_block = p.m_blocks - 1 - rank - (is_long ? 0 : p.order.tiles);
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
