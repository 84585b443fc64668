// What a backward reads and writes besides what its forward did. Host code, no CUDA needed.
//
// With P = exp(S - LSE), S as features/params.h defines it, and D_i = sum_d dO_id O_id - dLSE_i:
//     dV = P^T dO        dP = dO V^T        dS = P (dP - D)        dK = scale dS^T Q        dQ = scale dS K
// A thread block owns tile_n keys of a head of K and V and walks the query tiles that see some of them, of all query
// heads that share it, one head after the other: dK and dV are sums in a fixed order. dQ is summed in fp32 by the
// blocks of all keys, in whatever order they come.
#pragma once

#include "../attention_params.h"
#include "../features/sequence.h"

namespace cutlass_fmha {

struct BackwardParams : AttentionParams {
  // What AttentionParams says is as the forward had it; o and lse are only read.
  void const* dout;   ///< as o
  float const* dlse;  ///< as lse; null where LSE has no gradient
  // What nobody wants is null, and not computed, so far as nothing else needs it.
  void* dq;       ///< as q
  void* dk;       ///< as k; rows that are no sequence's, and keys beyond those in use, are not written
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
  float* row_terms;     ///< [num_heads, tiles, 2, tile_m]: LSE in units of log2, D. Rows that see nothing: +inf, 0
  int* turns;           ///< [num_heads, tiles, kTurns]: tiles of keys whose part of dQ is in; null where not ordered
  float* sink_sums;     ///< [num_heads, tiles]: of a tile, what dsinks sums
  int tile_m, row_dim;  ///< of the row
  int64_t head_tiles;   ///< query tiles of a head in the workspace

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

/// Parts of dQ of a tile that are summed by one warp each.
constexpr int kTurns = 8;

/// Of a row with such tiles and such a head dim.
inline int64_t workspace_floats(BackwardParams const& p, int tile_m, int row_dim) {
  return p.num_heads * workspace_tiles(p, tile_m) *
         (tile_m * (row_dim + 2) + (p.ordered ? kTurns : 0) + (p.dsinks != nullptr ? 1 : 0));
}

/// Query rows that a block of the last kernel turns into dQ.
constexpr int kRowsAfter = 16;

/// Where the first query tile of a sequence stands among those of a head.
FMHA_HOST_DEVICE inline int64_t first_query_tile(FeatureParams const& p, Sequence const& s, int tile_m) {
  return p.cu_seqlens_q != nullptr ? s.first_q / tile_m + s.batch : int64_t(s.batch) * ceil_div(p.seqlen_q, tile_m);
}

}  // namespace cutlass_fmha
