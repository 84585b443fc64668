// What a thread block of a general row computes, which rows of the tensors that is, and which keys its queries see.
// Plain integer arithmetic, the same on host and device.
#pragma once

#include "../forward/scheduler.h"
#include "../host_device.h"
#include "params.h"

namespace cutlass_fmha {

FMHA_HOST_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
FMHA_HOST_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

/// A sequence's lengths, and where it stands in the tensors.
struct Sequence {
  int batch;
  int entry_q, entry_k;          ///< batch entry of q and o, of k and v
  int rows_q;                    ///< rows of o and lse that are this sequence's
  int first_q = 0, first_k = 0;  ///< rows before the sequence's first one in its batch entry
  int queries = 0, keys = 0;     ///< that count: the other rows of o are zeros
  int offset = 0;                ///< query i stands beside key i + offset
};

FMHA_HOST_DEVICE inline Sequence sequence_at(GeneralParams const& p, int batch) {
  Sequence s{.batch = batch, .entry_q = batch, .entry_k = batch, .rows_q = p.seqlen_q};
  int end_k = p.seqlen_k;  // rows of k in use
  if (p.cu_seqlens_q != nullptr) {
    s.first_q = p.cu_seqlens_q[batch];
    s.rows_q = p.cu_seqlens_q[batch + 1] - s.first_q;
    s.entry_q = 0;
  }
  if (p.cu_seqlens_k != nullptr) {
    s.first_k = p.cu_seqlens_k[batch];
    end_k = p.cu_seqlens_k[batch + 1] - s.first_k;
    s.entry_k = 0;
  }
  if (p.batch_index_k != nullptr) s.entry_k = p.batch_index_k[batch];
  s.queries = p.seqused_q != nullptr ? smaller(s.rows_q, p.seqused_q[batch]) : s.rows_q;
  if (p.seqused_k != nullptr) end_k = smaller(end_k, p.seqused_k[batch]);
  int const padding = p.leftpad_k != nullptr ? p.leftpad_k[batch] : 0;
  s.first_k += padding;
  s.keys = larger(0, end_k - padding);
  s.offset = p.bottom_right ? s.keys - s.queries : 0;
  return s;
}

/// One thread block's part: packed query rows [row_begin, row_begin + tile_m) of the heads from `head` on, and one part
/// of the keys. Packed row r is head `head + r % pack` of query r / pack.
struct GeneralTile {
  int row_begin, head, batch, split;
};

/// Of the tile's rows, so many are of queries that the longest sequence has.
FMHA_HOST_DEVICE inline int rows_of(GeneralParams const& p, GeneralTile const& tile, int tile_m) {
  return smaller(tile_m, p.seqlen_q * p.pack - tile.row_begin);
}

FMHA_HOST_DEVICE inline int64_t grid_size(GeneralParams const& p, int tile_m) {
  int64_t const tiles = (int64_t(p.seqlen_q) * p.pack + tile_m - 1) / tile_m;
  return tiles * (p.num_heads / p.pack) * p.batch * p.splits;
}

/// Parts of one tile's keys follow each other.
FMHA_HOST_DEVICE inline GeneralTile tile_at(GeneralParams const& p, int tile_m, int block) {
  int const heads = p.num_heads / p.pack;
  int const tiles = ceil_div(p.seqlen_q * p.pack, tile_m);
  int const number = block / p.splits;
  RankedTile const tile = ranked_tile(p.order, heads * p.batch, number);
  int const batch = tile.head / heads;
  return {(tiles - 1 - tile.rank) * tile_m, (tile.head - batch * heads) * p.pack, batch, block - number * p.splits};
}

/// Of a launch whose elements have `bytes`. For a problem with at least one tile.
inline TileOrder tile_order(GeneralParams const& p, int tile_m, int warps, int bytes, Gpu const& gpu) {
  int const heads = p.num_heads / p.pack, tiles = ceil_div(p.seqlen_q * p.pack, tile_m);
  bool const grow = p.window_left < 0 && p.window_right >= 0;
  int64_t const diagonal = int64_t(p.bottom_right ? p.seqlen_k - p.seqlen_q : 0) + p.window_right;
  return tile_order(gpu, warps, heads * p.batch, p.num_heads / p.num_heads_kv / p.pack,
                    int64_t(p.seqlen_k) * (p.head_dim + p.head_dim_v) * bytes, tiles,
                    grow ? short_tiles(diagonal * p.pack, p.seqlen_k * int64_t(p.pack), tile_m, tiles) : 0);
}

/// Keys that a query sees, so far as masks given by ranges go: [begin, end) and [0, prefix).
struct VisibleKeys {
  int begin, end, prefix;

  FMHA_HOST_DEVICE bool sees(int key) const { return (key >= begin && key < end) || key < prefix; }
};

FMHA_HOST_DEVICE inline VisibleKeys visible_keys(GeneralParams const& p, Sequence const& s, int query) {
  if (query >= s.queries) return {0, 0, 0};
  int const beside = query + s.offset;
  int const begin = p.window_left < 0 ? 0 : larger(0, beside - p.window_left);
  int const end = p.window_right < 0 ? s.keys : smaller(s.keys, beside + p.window_right + 1);
  int const prefix = p.prefix_lengths != nullptr ? smaller(s.keys, p.prefix_lengths[s.batch]) : 0;
  return {begin, end, prefix};
}

/// How block lists are walked in tiles of so many keys, which divide block_n. A block that is longer than all keys
/// has no more tiles than they have.
inline void set_blocks(GeneralParams& p, int tile_keys) {
  int const tiles = larger(1, ceil_div(p.seqlen_k, tile_keys));
  p.block_tiles = smaller(p.block_n / tile_keys, tiles);
  p.by_block_tiles = Divisor(p.block_tiles);
  p.key_blocks = ceil_div(tiles, p.block_tiles);
}

/// The key tiles that a thread block walks, numbered 0 .. tiles - 1 from the last to the first, and which keys a tile
/// holds: those from key_begin() on, perhaps none.
struct KeyWalk {
  int const* blocks = nullptr;  ///< of a block list; null: all tiles from `first` on
  int first = 0;                ///< number of the first tile
  int tiles = 0;
  int skipped = 0;  ///< tiles that other parts walk before this one's

  FMHA_HOST_DEVICE int key_begin(GeneralParams const& p, int tile, int tile_keys) const {
    return key_begin_before(p, tiles - 1 - tile, tile_keys);
  }
  /// Of the tile that `left` others come after.
  FMHA_HOST_DEVICE int key_begin_before(GeneralParams const& p, int left, int tile_keys) const {
    int const place = left + skipped;
    if (blocks == nullptr) return (first + place) * tile_keys;
    int const entry = p.by_block_tiles.quotient(place);
    // All blocks that have no keys, however large their numbers, begin where the first of them does.
    uint32_t const named = uint32_t(blocks[entry * p.block_stride.key]), end = uint32_t(p.key_blocks);
    int const block = int(named < end ? named : end);
    return (block * p.block_tiles + place - entry * p.block_tiles) * tile_keys;
  }
};

/// Of a tile of queries i_begin .. i_last (< queries): everything that some of them sees.
FMHA_HOST_DEVICE inline KeyWalk whole_walk(GeneralParams const& p, Sequence const& s, int head, int i_begin, int i_last,
                                           int tile_keys) {
  KeyWalk walk;
  if (p.block_counts != nullptr) {
    int const row = i_begin / p.block_m;
    walk.tiles = p.block_tiles *
                 p.block_counts[s.batch * p.count_stride[0] + head * p.count_stride[1] + row * p.count_stride[2]];
    walk.blocks =
        p.block_indices + s.batch * p.block_stride.batch + head * p.block_stride.head + row * p.block_stride.query;
    return walk;
  }
  // Both ends of what a query sees grow with its number.
  VisibleKeys const earliest = visible_keys(p, s, i_begin), latest = visible_keys(p, s, i_last);
  int const begin = earliest.prefix > 0 ? 0 : earliest.begin;
  int const end = larger(latest.end, latest.prefix);
  if (begin >= end) return walk;
  walk.first = begin / tile_keys;
  walk.tiles = ceil_div(end, tile_keys) - walk.first;
  return walk;
}

/// The part of the walk that belongs to this thread block. `i_begin`, `i_end`: the tile's queries.
FMHA_HOST_DEVICE inline KeyWalk walk_of(GeneralParams const& p, Sequence const& s, GeneralTile const& tile, int i_begin,
                                        int i_end, int tile_keys) {
  int const i_last = smaller(i_end, s.queries) - 1;
  if (i_last < i_begin || s.keys == 0) return {};
  KeyWalk walk = whole_walk(p, s, tile.head, i_begin, i_last, tile_keys);
  int const part = ceil_div(walk.tiles, p.splits);
  walk.skipped = smaller(tile.split * part, walk.tiles);
  walk.tiles = smaller(part, walk.tiles - walk.skipped);
  return walk;
}

/// What the queries i_begin .. i_last see, all of them and some of them. Both ends of what a query sees grow with its
/// number. Nothing, where there are none.
struct alignas(16) CommonView {
  int all_begin = 0, all_end = 0, some_begin = 0, some_end = 0, prefix = 0;

  CommonView() = default;
  FMHA_HOST_DEVICE CommonView(GeneralParams const& p, Sequence const& s, int i_begin, int i_last) {
    if (i_last < i_begin) return;
    VisibleKeys const earliest = visible_keys(p, s, i_begin), latest = visible_keys(p, s, i_last);
    all_begin = latest.begin, all_end = earliest.end;
    some_begin = earliest.begin, some_end = latest.end;
    prefix = earliest.prefix;
  }
  /// Of the `count` keys from `begin` on.
  FMHA_HOST_DEVICE bool all_see(int begin, int count) const {
    return begin + count <= prefix || (begin >= all_begin && begin + count <= all_end);
  }
  FMHA_HOST_DEVICE bool some_see(int begin, int count) const {
    return begin < prefix || (begin < some_end && begin + count > some_begin);
  }
};

/// Where the rows of k or v that key_row_offset() counts begin, in elements.
FMHA_HOST_DEVICE inline int64_t key_entry_offset(GeneralParams const& p, Strides const& stride, Sequence const& s) {
  return p.page_table == nullptr ? s.entry_k * stride.batch : 0;
}

/// Which of the pages holds a row of the sequence.
FMHA_HOST_DEVICE inline int page_number(GeneralParams const& p, Sequence const& s, int row) {
  return p.page_table[s.batch * p.page_table_stride + p.by_page_size.quotient(row)];
}

/// Where a row of page number `page` stands, in elements.
FMHA_HOST_DEVICE inline int64_t page_row_offset(GeneralParams const& p, Strides const& stride, int page, int row) {
  return page * stride.batch + (row - p.by_page_size.quotient(row) * p.page_size) * stride.seqlen;
}

/// Where a row of k or v stands from there on, in elements; first_k is the row of the first key.
FMHA_HOST_DEVICE inline int64_t key_row_offset(GeneralParams const& p, Strides const& stride, Sequence const& s,
                                               int row) {
  if (p.page_table == nullptr) return row * stride.seqlen;
  return page_row_offset(p, stride, page_number(p, s, row), row);
}

}  // namespace cutlass_fmha
