// What the kernels beside attention read: the combination of split keys, merged states, rotary embedding, a cache's new
// rows. Host code, no CUDA needed. Strides are in elements; the head dimension itself is contiguous everywhere.
#pragma once

#include <cstdint>

#include "../config.h"
#include "../divisor.h"
#include "../params.h"

namespace cutlass_fmha {

constexpr int kHelperThreads = HelperConfig::kThreads;

/// Where a row's log-sum-exp stands.
struct LseStrides {
  int64_t batch, head, seqlen;
};

/// Parts of the keys, each with an output and a log-sum-exp of its own, become one output: o = sum_s w_s o_s with
/// w_s = exp(lse_s - lse) and lse = log sum_s exp(lse_s). A part without keys has lse -inf; its o is never used.
/// Varlen: a batch of 1 whose seqlen_q is total_q.
struct CombineParams {
  static constexpr int kMaxSplits = 64, kMaxHeadDim = 256;

  float const* partial_o;    ///< [splits, lse_rows, partial_dim], contiguous
  float const* partial_lse;  ///< [splits, lse_rows], contiguous, natural log
  float const* partial_low;  ///< [splits, lse_rows], to be added to it: what one float can't hold; may be null
  void* o;                   ///< [batch, seqlen_q, num_heads, head_dim_v]
  float* lse;                ///< may be null; row i of head h of batch b stands at
  int64_t lse_batch_stride;  ///< b lse_batch_stride + h lse_head_stride + i, here and in partial_lse
  int64_t lse_head_stride;
  int64_t lse_rows;
  Strides o_stride;
  int batch, seqlen_q, num_heads, head_dim_v, splits;
  int partial_dim;  ///< of rows of partial_o: head_dim_v, or more where that says which of their columns are combined

  // Set by launch().
  bool vectors;
  Divisor by_seqlen_q, by_num_heads;

  bool empty() const { return batch == 0 || seqlen_q == 0 || num_heads == 0; }
};

/// The parts of a plain row's tail become rows of O and LSE.
struct TailParams {
  Tail tail;
  void* o;  ///< [batch, seqlen_q, num_heads, head_dim]
  float* lse;
  Strides o_stride;
  int seqlen_q, num_heads, head_dim, tile_m;
  float scale_log2;
};

/// The states of two sets of keys become that of their union. A set without keys has lse -inf, and the other's bits are
/// passed on. Varlen: a batch of 1 whose seqlen_q is total_q.
struct MergeParams {
  void const* o_a;  ///< [batch, seqlen_q, num_heads, head_dim_v]
  void const* o_b;
  void* o;
  float const* lse_a;  ///< [batch, num_heads, seqlen_q], natural log
  float const* lse_b;
  float* lse;
  Strides o_a_stride, o_b_stride, o_stride;
  LseStrides lse_a_stride, lse_b_stride, lse_stride;
  int batch, seqlen_q, num_heads, head_dim_v;

  // Set by launch().
  bool vectors;
  int lanes_log2;  ///< 2^lanes_log2 threads share a row
  Divisor by_seqlen_q, by_num_heads;

  bool empty() const { return batch == 0 || seqlen_q == 0 || num_heads == 0; }
};

/// Rotation of the first `dim` elements of a row at position p, RoFormer (Su et al. 2021): the pair (x, y) number r
/// becomes (x cos - y sin, x sin + y cos) with cos[p, r] and sin[p, r]. Pairs are elements 2r and 2r + 1 (interleaved),
/// or r and r + dim / 2.
struct Rotary {
  void const* cos;  ///< [positions, dim / 2]; null: nothing is rotated
  void const* sin;
  int64_t cos_stride, sin_stride;  ///< from position to position
  int positions;                   ///< rows at others become NaN: there is no angle for them
  int dim;                         ///< even, at most head_dim
  bool interleaved;
  bool float32;  ///< cos and sin are float32, otherwise of the rows' type
};

/// The position of a sequence's first row: first[batch] - before[batch].
struct FirstPosition {
  int const* first;
  int const* before;  ///< may be null
};

/// Rotates rows into a tensor of their own. Packed: a batch of 1, whose rows cu_seqlens[n] to cu_seqlens[n + 1] are
/// sequence n; others are of none, and left alone.
struct RotaryParams {
  void const* x;  ///< [batch, seqlen, num_heads, head_dim]
  void* out;
  Strides x_stride, out_stride;
  int batch, seqlen, num_heads, head_dim;
  int const* cu_seqlens;  ///< [sequences + 1]; null: each batch entry is a sequence
  int sequences;
  FirstPosition position;
  bool advance;  ///< each row is one position after the one before it; otherwise all have the first's
  Rotary rotary;

  // Set by launch().
  bool vectors;
  int lanes_log2;
  Divisor by_seqlen, by_num_heads;

  bool empty() const { return !x || batch == 0 || seqlen == 0 || num_heads == 0 || (cu_seqlens && sequences == 0); }
};

/// Where a cache has its rows. An entry is of a sequence, or with page_table a page.
struct CachePlaces {
  int const* cache_seqlens;    ///< [sequences]: the row that the first new key goes to
  int const* cache_batch_idx;  ///< [sequences]: which entry of the cache is this one's; null: its own number
  int const* page_table;       ///< [sequences, pages of one at most]; null: the cache is contiguous
  int64_t page_table_stride;
  int page_size;
  int entries;   ///< batch_cache, or pages: others are not written to
  int capacity;  ///< rows of a sequence in the cache: a new key beyond them is dropped

  // Set by launch().
  Divisor by_page_size;
};

/// Writes new keys and values behind those that a cache holds, the keys rotated. Packed as RotaryParams are.
struct AppendParams : CachePlaces {
  void* k_cache;  ///< [batch_cache, seqlen_cache, num_heads_kv, head_dim], or [pages, page_size, ...] with page_table
  void* v_cache;  ///< the same with head_dim_v
  void const* k;  ///< [batch, seqlen_new, num_heads_kv, head_dim]
  void const* v;
  Strides k_cache_stride, v_cache_stride, k_stride, v_stride;
  int batch, seqlen_new, num_heads_kv, head_dim, head_dim_v;
  int const* cu_seqlens;
  int sequences;
  int* seqused_k;  ///< [sequences]: becomes cache_seqlens and the new rows; may be null
  FirstPosition position;
  Rotary rotary;
  RotaryParams query;  ///< of the same sequences, rotated in the same launch; x is null where there is none

  // Set by launch().
  bool vectors;
  int lanes_log2;
  Divisor by_seqlen_new, by_num_heads_kv;

  bool no_keys() const { return batch == 0 || seqlen_new == 0 || num_heads_kv == 0 || (cu_seqlens && sequences == 0); }
  bool empty() const { return no_keys() && query.empty(); }
};

/// Throw std::invalid_argument for numbers that contradict each other.
void check(CombineParams const& p);
void check(MergeParams const& p);
void check(RotaryParams const& p);
void check(AppendParams const& p);

}  // namespace cutlass_fmha
