// What a backward reads and writes besides what its forward did. Host code, no CUDA needed.
//
// With P = exp(S - LSE), S as features/params.h defines it, and D_i = sum_d dO_id O_id - dLSE_i:
//     dV = P^T dO        dP = dO V^T        dS = P (dP - D)        dK = scale dS^T Q        dQ = scale dS K
// A thread block owns tile_n keys of a head of K and V and walks the query tiles that see some of them, of all query
// heads that share it, one head after the other: dK and dV are sums in a fixed order. dQ is summed in fp32 by the
// blocks of all keys, in whatever order they come; or dS is written to memory, rounded, and dQ is a product of its own.
// Under block lists a block walks those tiles that they name it with.
#pragma once

#include <algorithm>

#include "../attention_params.h"
#include "../features/sequence.h"

namespace cutlass_fmha {

/// A tile of queries whose block lists name keys of a tile of keys: an entry of the lists' transpose.
struct alignas(16) ListedTile {
  int tile, head;   ///< head: of those that share the keys
  int before;       ///< the last tile of keys before this one that the same lists name; -1: none
  uint32_t pieces;  ///< which are named: kListedQueries x kListedKeys each, those of the same queries follow each other
};

/// Blocks of lists are multiples of such pieces, in all rows of the forward.
constexpr int kListedQueries = 16, kListedKeys = 32;

struct BackwardParams : AttentionParams {
  // What AttentionParams says is as the forward had it; o and lse are only read.
  void const* dout;   ///< as o
  float const* dlse;  ///< as lse; null where LSE has no gradient
  // What nobody wants is null, and not computed, so far as nothing else needs it.
  void* dq;       ///< as q
  void* dk;       ///< as k
  void* dv;       ///< as v
  float* dbias;   ///< added to; by dbias_stride, 0 where bias is broadcast
  float* dsinks;  ///< as sinks
  bool ordered;   ///< the sums of dQ have the same bits each time
  Strides dout_stride, dq_stride, dk_stride, dv_stride;
  ScoreStrides dbias_stride;

  float* workspace;  ///< workspace_floats() of them, 16-byte aligned; what stands there means nothing

  // What the launch finds out. Both parts of the workspace go by head and tile of tile_m queries, workspace_tiles() of
  // a head: first_query_tile() is where a sequence's begin.
  float* dq_sums;       ///< [num_heads, tiles, tile_m * row_dim], in the order of sum_offset()
  float* row_terms;     ///< [num_heads, tiles, tile_m / unit, kTermsOfQuery, unit]: see there
  int* turns;           ///< [num_heads, tiles, kTurns]: tiles of keys whose part of dQ is in; null where not ordered
  float* sink_sums;     ///< [num_heads, tiles]: of a tile, what dsinks sums
  int tile_m, row_dim;  ///< of the row; row_dim: of its sums of dQ, 0 where it has none
  int unit;             ///< of the row: queries that come at once
  int64_t head_tiles;   ///< query tiles of a head in the workspace

  // The transpose of block lists: of each tile of keys, in the order of heads and then of tiles.
  ListedTile* listed;  ///< [batch, num_heads_kv, key tiles, listed_room()]; null without lists
  int* listed_tiles;   ///< [batch, num_heads_kv, key tiles]: how many
  int tile_n;          ///< of the row
  int* listed_steps;   ///< [batch, num_heads, query tiles, key tiles]: in which step of the keys' walk dS of both is
                       ///< written; -1: in none. Null where dS isn't written
  // Where dS is written: of `scores_turn` heads of keys at a time, with all their query heads, scores_bytes() each.
  // Heads of keys are numbered through all batch entries.
  uint16_t* scores;  ///< 16-byte aligned; what stands there means nothing
  int scores_turn;
  // What the launch finds out.
  int scores_first;                ///< head of keys of this launch
  int scores_tile_n;               ///< keys of a tile, of scores_tiles of a head
  int scores_tiles, scores_width;  ///< scores_layout()

  bool empty() const { return batch == 0 || num_heads == 0 || (seqlen_q == 0 && seqlen_k == 0); }
};

/// What a launch of a row that copies by TMA reads besides.
struct BackwardTmaParams : BackwardParams {
  explicit BackwardTmaParams(BackwardParams const& p) : BackwardParams(p) {}

  TensorMap q_map{}, dout_map{};
};

/// Throws std::invalid_argument for numbers that contradict each other, whatever the row.
void check(BackwardParams const& p, int element_bytes);

/// Query tiles of a head in the workspace. Packed sequences begin with a tile each: one is left over of each at most.
inline int64_t workspace_tiles(FeatureParams const& p, int tile_m) {
  // With cu_seqlens_q, a head of lse has the rows of all sequences.
  return p.cu_seqlens_q ? p.lse_head_stride / tile_m + p.batch : int64_t(p.batch) * ceil_div(p.seqlen_q, tile_m);
}

/// What the backward wants of each query: LSE in units of log2, and -D, where dP begins. Queries that see nothing, or
/// don't exist, have +inf and 0.
constexpr int kTermsOfQuery = 2;

/// Parts of dQ of a tile that are summed by one warp each.
constexpr int kTurns = 8;

/// Entries of a tile of keys in the transpose of block lists, with one behind the last.
FMHA_HOST_DEVICE inline int64_t listed_room(FeatureParams const& p, int tile_m) {
  return int64_t(p.num_heads / p.num_heads_kv) * ceil_div(p.seqlen_q, tile_m) + 1;
}
/// Which of the tiles of keys that have such entries one is.
FMHA_HOST_DEVICE inline int64_t listing_tile(FeatureParams const& p, int batch, int head_kv, int tile, int tile_n) {
  return (int64_t(batch) * p.num_heads_kv + head_kv) * ceil_div(p.seqlen_k, tile_n) + tile;
}
/// How many these are.
inline int64_t listing_tiles(FeatureParams const& p, int tile_n) { return listing_tile(p, p.batch, 0, 0, tile_n); }

/// Where the steps of a tile of queries begin, of a row with such tiles.
FMHA_HOST_DEVICE inline int64_t listed_steps_of(FeatureParams const& p, int batch, int head, int tile, int tile_m,
                                                int tile_n) {
  return ((int64_t(batch) * p.num_heads + head) * ceil_div(p.seqlen_q, tile_m) + tile) * ceil_div(p.seqlen_k, tile_n);
}

/// Of a row with such tiles; row_dim: of its sums of dQ, 0 where it has none. There are block lists where there is
/// block_m.
inline int64_t workspace_floats(BackwardParams const& p, int tile_m, int tile_n, int row_dim) {
  int64_t listed = 0;
  if (p.block_m > 0 && p.num_heads > 0) {
    listed = listing_tiles(p, tile_n) * (listed_room(p, tile_m) * int64_t(sizeof(ListedTile) / 4) + 1);
    if (row_dim == 0) listed += listed_steps_of(p, p.batch, 0, 0, tile_m, tile_n);
  }
  return p.num_heads * workspace_tiles(p, tile_m) *
             (tile_m * (row_dim + kTermsOfQuery) + (p.ordered ? kTurns : 0) + (p.dsinks != nullptr ? 1 : 0)) +
         listed;
}

// dS stands in tiles of tile_n keys and tile_m queries. Those of a tile of keys follow each other as its block walks
// them: only what is walked is written. Lists may name any. Under a diagonal, the first keys are seen by many queries
// and the last by few: the tiles of keys n and tiles - 1 - n share a row of memory, one from its left, the other from
// its right.
struct ScoresLayout {
  int64_t rows, width;  ///< of a head of keys; of a row, in tiles
};

/// Of a row with such tiles. No sequence needs more, whatever lengths the device knows.
inline ScoresLayout scores_layout(BackwardParams const& p, int tile_m, int tile_n) {
  int64_t const group = p.num_heads_kv > 0 ? p.num_heads / p.num_heads_kv : 0;
  int64_t const tiles = ceil_div(p.seqlen_k, tile_n), all = ceil_div(p.seqlen_q, tile_m);
  auto const walked = [&](int64_t tile) -> int64_t {
    int64_t queries = p.seqlen_q;
    if (p.prefix_lengths == nullptr && p.window_right >= 0 && p.block_m == 0) {
      // Those from the first key's diagonal on, which ends where the keys or the queries do.
      queries = (p.bottom_right ? p.seqlen_k : p.seqlen_q) - tile * tile_n + p.window_right;
      if (p.window_left >= 0) queries = std::min<int64_t>(queries, int64_t(p.window_left) + p.window_right + tile_n);
    }
    // They begin anywhere in a tile.
    return queries <= 0 ? 0 : std::min<int64_t>(all, (queries + tile_m - 1) / tile_m + 1);
  };
  ScoresLayout layout{(tiles + 1) / 2, 0};
  for (int64_t tile = 0; tile < layout.rows; ++tile) {
    int64_t const mirrored = tiles - 1 - tile;
    layout.width = std::max<int64_t>(layout.width, walked(tile) + (mirrored > tile ? walked(mirrored) : 0));
  }
  layout.width *= group;
  return layout;
}

/// dS of a head of keys, in bytes.
inline int64_t scores_bytes(BackwardParams const& p, int tile_m, int tile_n) {
  auto const [rows, width] = scores_layout(p, tile_m, tile_n);
  return rows * width * tile_m * tile_n * int64_t(sizeof(uint16_t));
}

/// Number of the first tile of dS of a tile of keys, which has so many. `head`: of keys, of those in memory.
FMHA_HOST_DEVICE inline int64_t first_scores_tile(BackwardParams const& p, int head, int key_tile, int tiles) {
  int const mirrored = p.scores_tiles - 1 - key_tile;
  int64_t const row = int64_t(head) * ceil_div(p.scores_tiles, 2) + smaller(key_tile, mirrored);
  return row * p.scores_width + (key_tile <= mirrored ? 0 : p.scores_width - tiles);
}

/// Where dS of 8 keys and 8 queries stands in its tile, of numbers of such eights, in elements; queries of a key are
/// neighbours. It is 128 bytes that a warp writes at once, and that ldmatrix reads without conflicts.
FMHA_HOST_DEVICE constexpr int scores_matrix(int tile_m, int keys, int queries) {
  return (keys * (tile_m / 8) + queries) * 64;
}

/// Query rows that a block of the last kernel turns into dQ.
constexpr int kRowsAfter = 16;

// Gradients of rows that are no sequence's, and of keys that are not in use, are zeros. A block of the first kernel
// sees to so many rows, where there may be such.
constexpr int kRestRows = 128;

FMHA_HOST_DEVICE inline int64_t rest_blocks_of_queries(BackwardParams const& p) {
  if (p.dq == nullptr || p.cu_seqlens_q == nullptr) return 0;
  return ceil_div(int(p.lse_head_stride), kRestRows);  // a head of lse has the rows of all sequences
}
FMHA_HOST_DEVICE inline int64_t rows_of_keys(BackwardParams const& p) { return int64_t(p.entries_k) * p.rows_k; }
/// Whether not all keys need be in use.
inline bool keys_rest(BackwardParams const& p) {
  return p.cu_seqlens_k != nullptr || p.seqused_k != nullptr || p.leftpad_k != nullptr;
}
inline int64_t rest_blocks(BackwardParams const& p) {
  int64_t const of_keys = keys_rest(p) && (p.dk != nullptr || p.dv != nullptr) ? rows_of_keys(p) : 0;
  return rest_blocks_of_queries(p) + (of_keys + kRestRows - 1) / kRestRows;
}

/// Where the first query tile of a sequence stands among those of a head.
FMHA_HOST_DEVICE inline int64_t first_query_tile(FeatureParams const& p, Sequence const& s, int tile_m) {
  return p.cu_seqlens_q != nullptr ? s.first_q / tile_m + s.batch : int64_t(s.batch) * ceil_div(p.seqlen_q, tile_m);
}

}  // namespace cutlass_fmha
