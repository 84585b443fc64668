// Which keys a query sees and which queries see a key, and what follows for the tiles that a thread block walks
// through. Masking is a range of blocks: a block is skipped (nothing visible), masked (the diagonal, a window or the
// end of the keys crosses it) or full. Plain integer arithmetic, the same on host and device.
#pragma once

#include "../config.h"
#include "../features/sequence.h"
#include "../host_device.h"
#include "../params.h"

namespace cutlass_fmha {

// ---- plain rows: a diagonal at most

/// Keys 0 .. visible_keys - 1 are visible to query `row`.
FMHA_HOST_DEVICE inline int visible_keys(ForwardParams const& p, int row) {
  int const end = row + p.diagonal + 1;
  return end < 0 ? 0 : end < p.seqlen_k ? end : p.seqlen_k;
}

/// Blocks of `tile_n` keys of which some row in [row_begin, row_end) sees a key: 0 .. key_blocks - 1. Rows beyond
/// seqlen_q pad the last tile and see nothing.
FMHA_HOST_DEVICE inline int key_blocks(ForwardParams const& p, int row_begin, int row_end, int tile_n) {
  int const last = (row_end < p.seqlen_q ? row_end : p.seqlen_q) - 1;
  return last < row_begin ? 0 : ceil_div(visible_keys(p, last), tile_n);
}

/// Blocks of which every row from `row_begin` on sees every key: 0 .. full_key_blocks - 1.
FMHA_HOST_DEVICE inline int full_key_blocks(ForwardParams const& p, int row_begin, int tile_n) {
  return visible_keys(p, row_begin) / tile_n;
}

// ---- scored rows: ranges, and block lists

/// Keys that a query sees, so far as masks given by ranges go: [begin, end) and [0, prefix).
struct VisibleKeys {
  int begin, end, prefix;

  FMHA_HOST_DEVICE bool sees(int key) const { return (key >= begin && key < end) || key < prefix; }
};

FMHA_HOST_DEVICE inline VisibleKeys visible_keys(FeatureParams const& p, Sequence const& s, int query) {
  if (query >= s.queries) return {0, 0, 0};
  int const beside = query + s.offset;
  int const begin = p.window_left < 0 ? 0 : larger(0, beside - p.window_left);
  int const end = p.window_right < 0 ? s.keys : smaller(s.keys, beside + p.window_right + 1);
  int const prefix = p.prefix_lengths != nullptr ? smaller(s.keys, p.prefix_lengths[s.batch]) : 0;
  return {begin, end, prefix};
}

/// How block lists are walked in tiles of so many keys, which divide block_n. A block that is longer than all keys
/// has no more tiles than they have.
inline void set_blocks(FeatureParams& p, int tile_keys) {
  int const tiles = larger(1, ceil_div(p.seqlen_k, tile_keys));
  p.block_tiles = smaller(p.block_n / tile_keys, tiles);
  p.by_block_tiles = Divisor(p.block_tiles);
  p.key_blocks = ceil_div(tiles, p.block_tiles);
}

/// The list of a block of queries: how many entries count, and the first.
FMHA_HOST_DEVICE inline int block_count(FeatureParams const& p, int batch, int head, int query_block) {
  return p.block_counts[batch * p.count_stride[0] + head * p.count_stride[1] + query_block * p.count_stride[2]];
}
FMHA_HOST_DEVICE inline int const* block_list(FeatureParams const& p, int batch, int head, int query_block) {
  return p.block_indices + batch * p.block_stride.batch + head * p.block_stride.head +
         query_block * p.block_stride.query;
}

/// The key tiles that a thread block walks, numbered 0 .. tiles - 1 from the last to the first, and which keys a tile
/// holds: those from key_begin() on, perhaps none.
struct KeyWalk {
  int const* blocks = nullptr;  ///< of a block list; null: all tiles from `first` on
  int first = 0;                ///< number of the first tile
  int tiles = 0;
  int skipped = 0;  ///< tiles that other parts walk before this one's
  int put_off = 0;  ///< of score-mod rows: tiles before the last one that are walked after all others: TilesBack

  FMHA_HOST_DEVICE int key_begin(FeatureParams const& p, int tile, int tile_keys) const {
    return key_begin_before(p, tiles - 1 - tile, tile_keys);
  }
  /// Of the tile that `left` others come after.
  FMHA_HOST_DEVICE int key_begin_before(FeatureParams const& p, int left, int tile_keys) const {
    int const place = left + skipped;
    if (blocks == nullptr) return (first + place) * tile_keys;
    int const entry = p.by_block_tiles.quotient(place);
    // All blocks that have no keys, however large their numbers, begin where the first of them does.
    uint32_t const named = uint32_t(blocks[entry * p.block_stride.key]), end = uint32_t(p.key_blocks);
    int const block = int(named < end ? named : end);
    return (block * p.block_tiles + place - entry * p.block_tiles) * tile_keys;
  }
};

/// Of a tile of queries i_begin .. i_last (< queries): everything that some of them sees by ranges.
FMHA_HOST_DEVICE inline KeyWalk range_walk(FeatureParams const& p, Sequence const& s, int i_begin, int i_last,
                                           int tile_keys) {
  KeyWalk walk;
  // Both ends of what a query sees grow with its number.
  VisibleKeys const earliest = visible_keys(p, s, i_begin), latest = visible_keys(p, s, i_last);
  int const begin = earliest.prefix > 0 ? 0 : earliest.begin;
  int const end = larger(latest.end, latest.prefix);
  if (begin >= end) return walk;
  walk.first = begin / tile_keys;
  walk.tiles = ceil_div(end, tile_keys) - walk.first;
  return walk;
}

/// The same, or what a block list names where some of them sees anything.
FMHA_HOST_DEVICE inline KeyWalk whole_walk(FeatureParams const& p, Sequence const& s, int head, int i_begin, int i_last,
                                           int tile_keys) {
  KeyWalk walk = range_walk(p, s, i_begin, i_last, tile_keys);
  if (p.block_counts == nullptr || walk.tiles == 0) return walk;
  walk.first = 0;
  int const row = i_begin / p.block_m;
  walk.tiles = p.block_tiles * block_count(p, s.batch, head, row);
  walk.blocks = block_list(p, s.batch, head, row);
  return walk;
}

/// The part of the walk that belongs to this thread block. `i_begin`, `i_end`: the tile's queries.
FMHA_HOST_DEVICE inline KeyWalk walk_of(FeatureParams const& p, Sequence const& s, FeatureTile const& tile, int i_begin,
                                        int i_end, int tile_keys) {
  int const i_last = smaller(i_end, s.queries) - 1;
  if (i_last < i_begin || s.keys == 0) return {};
  KeyWalk walk = whole_walk(p, s, tile.head, i_begin, i_last, tile_keys);
  int const part = p.by_splits.quotient(walk.tiles + p.splits - 1);
  walk.skipped = smaller(tile.split * part, walk.tiles);
  walk.tiles = smaller(part, walk.tiles - walk.skipped);
  return walk;
}

/// What the queries i_begin .. i_last see, all of them and some of them. Both ends of what a query sees grow with its
/// number. Nothing, where there are none.
struct alignas(16) CommonView {
  int all_begin = 0, all_end = 0, some_begin = 0, some_end = 0, prefix = 0;

  CommonView() = default;
  FMHA_HOST_DEVICE CommonView(FeatureParams const& p, Sequence const& s, int i_begin, int i_last) {
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

/// Keys before a window, [begin, end), that a walk meets beside those that it is for, though no query of the tile sees
/// them. Where keys are in pages, theirs may be gone: such keys count as zeros, and their pages are not looked up.
struct LeftBehind {
  int begin = 0, end = 0;

  LeftBehind() = default;
  FMHA_HOST_DEVICE LeftBehind(VisibleKeys const& of_first) : begin(of_first.prefix), end(of_first.begin) {}
  /// Of the `count` keys from `key` on: all of them.
  FMHA_HOST_DEVICE bool has(int key, int count) const { return key >= begin && key + count <= end; }
  /// A key that is not among them, in place of `key` where these are; whose page there is.
  FMHA_HOST_DEVICE int kept(int key, int count) const { return !has(key, count) ? key : begin > 0 ? 0 : end; }
};

// ---- the other direction: a walk over queries, as gradients of keys and values take it

/// Queries that see a key, so far as masks given by ranges go: [begin, end).
struct VisibleQueries {
  int begin, end;

  FMHA_HOST_DEVICE bool sees(int query) const { return query >= begin && query < end; }
};

FMHA_HOST_DEVICE inline VisibleQueries visible_queries(ForwardParams const& p, int key) {
  if (key >= p.seqlen_k) return {0, 0};
  return {larger(0, key - p.diagonal), p.seqlen_q};
}

FMHA_HOST_DEVICE inline VisibleQueries visible_queries(FeatureParams const& p, Sequence const& s, int key) {
  if (key >= s.keys) return {0, 0};
  if (p.prefix_lengths != nullptr && key < p.prefix_lengths[s.batch]) return {0, s.queries};
  int const beside = key - s.offset;
  int const begin = p.window_right < 0 ? 0 : larger(0, beside - p.window_right);
  int const end = p.window_left < 0 ? s.queries : smaller(s.queries, beside + p.window_left + 1);
  return {begin, end};
}

/// Tiles of queries: [first, first + tiles).
struct QueryWalk {
  int first = 0, tiles = 0;
};

/// Of a tile of keys j_begin .. j_last (< keys): every tile of which some query sees some of them.
FMHA_HOST_DEVICE inline QueryWalk query_walk(VisibleQueries const& of_first, VisibleQueries const& of_last,
                                             int tile_queries) {
  // Both ends of what sees a key grow with its number, but for the first keys, of a prefix, which all queries see.
  int const begin = of_first.begin, end = larger(of_first.end, of_last.end);
  if (begin >= end) return {};
  int const first = begin / tile_queries;
  return {first, ceil_div(end, tile_queries) - first};
}

// ---- block lists transposed

/// What a list names of a tile of keys, in pieces of so many: a bit of each. And before it.
struct NamedKeys {
  uint32_t pieces = 0;
  int tile_before = -1;  ///< the last tile of keys with some; -1: none

  /// An entry of the list: the number of a block, perhaps beyond all keys.
  FMHA_HOST_DEVICE void add(FeatureParams const& p, Sequence const& s, uint32_t block, int key_begin, int tile_keys,
                            int piece_keys) {
    if (block >= uint32_t(ceil_div(s.keys, p.block_n))) return;
    int const begin = int(block) * p.block_n, end = begin + smaller(p.block_n, s.keys - begin);
    int const first = larger(begin - key_begin, 0), last = smaller(end - key_begin, tile_keys);
    if (first < last) pieces |= low_bits(ceil_div(last, piece_keys)) & ~low_bits(first / piece_keys);
    if (begin < key_begin) tile_before = larger(tile_before, (smaller(end, key_begin) - 1) / tile_keys);
  }

 private:
  FMHA_HOST_DEVICE static uint32_t low_bits(int count) { return (1u << count) - 1; }
};

}  // namespace cutlass_fmha
