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

/// Of `heads` heads in each of `batch` entries, with `m_blocks` tiles each. There is at least one tile.
inline TileSchedule schedule_of(TileOrder const& order, bool mixed, int m_blocks, int heads, int batch) {
  TileSchedule s;
  s.order = order;
  s.mixed = mixed;
  s.m_blocks = m_blocks;
  s.heads = heads;
  s.all_heads = heads * batch;
  s.by_heads = Divisor(heads);
  s.by_rank = Divisor(mixed ? order.heads : m_blocks);
  if (!mixed) return s;
  s.last = (s.all_heads - 1) / order.heads * order.heads;
  s.by_share = Divisor(order.heads * order.tiles);
  s.by_last = Divisor(s.all_heads - s.last);
  s.by_all = Divisor(s.all_heads);
  return s;
}
inline void set_schedule(ForwardParams& p, TileOrder const& order, int tile_m) {
  p.schedule = schedule_of(order, p.diagonal != kNoDiagonal, ceil_div(p.seqlen_q, tile_m), p.num_heads, p.batch);
  p.by_group = Divisor(p.num_heads / p.num_heads_kv);
}

/// The tile of a thread block. Without a diagonal, the tiles of one head follow each other, so that its K and V stay in
/// L2. Everything waits for this.
FMHA_HOST_DEVICE inline WorkTile work_tile(TileSchedule const& s, int block) {
  int m_block, head;
  if (!s.mixed) {
    head = s.by_rank.quotient(block);
    m_block = block - head * s.m_blocks;
  } else {
    int const long_tiles = s.all_heads * s.order.tiles;
    bool const is_long = block < long_tiles;
    int const first = is_long ? s.by_share.quotient(block) * s.order.heads : 0;
    int const tile = block - (is_long ? first * s.order.tiles : long_tiles);
    int const rank = (!is_long ? s.by_all : first == s.last ? s.by_last : s.by_rank).quotient(tile);
    head = first + tile - rank * (!is_long ? s.all_heads : first == s.last ? s.all_heads - first : s.order.heads);
    m_block = s.m_blocks - 1 - rank - (is_long ? 0 : s.order.tiles);  // rank 0 is the last one
  }
  int const batch = s.by_heads.quotient(head);
  return {m_block, head - batch * s.heads, batch};
}

/// The head of K and V that query head `head` attends to.
FMHA_HOST_DEVICE inline int kv_head(ForwardParams const& p, int head) { return p.by_group.quotient(head); }

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

}  // namespace cutlass_fmha
