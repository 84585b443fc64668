// What one forward launch reads, and how it is derived from what a caller says. Host code, no CUDA needed.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "divisor.h"

namespace cutlass_fmha {

/// Strides in elements; the head dimension itself is contiguous.
struct Strides {
  int64_t batch, seqlen, head;
};

/// In what order tiles come where some have more keys than others: see core/scheduler.h.
struct TileOrder {
  int heads;  ///< of so many heads, those of all batch entries in a row, long tiles are mixed. 1 or more
  int tiles;  ///< of each: so many are long, the last ones. 1 or more
};

/// How a thread block finds its tile, without a division: schedule_of() and work_tile() in core/scheduler.h. A head is
/// one of all batch entries'.
struct TileSchedule {
  TileOrder order{};             ///< where tiles are mixed
  bool mixed = false;            ///< or the tiles of one head follow each other
  int m_blocks = 0;              ///< tiles of a head
  int heads = 0, all_heads = 0;  ///< of a batch entry, and of all
  int last = 0;                  ///< the first of the heads that are mixed last, which may be fewer
  Divisor by_rank;               ///< by m_blocks, or where tiles are mixed by order.heads
  Divisor by_share;              ///< by the long tiles of these heads
  Divisor by_last;               ///< by the heads that are mixed last
  Divisor by_all;                ///< by all_heads
  Divisor by_heads;              ///< by heads
};

struct ForwardParams {
  void const* q;  ///< [batch, seqlen_q, num_heads, head_dim]
  void const* k;  ///< [batch, seqlen_k, num_heads_kv, head_dim]
  void const* v;  ///< [batch, seqlen_k, num_heads_kv, head_dim]
  void* o;        ///< [batch, seqlen_q, num_heads, head_dim]
  float* lse;     ///< [batch, num_heads, seqlen_q], contiguous, natural log; null when nobody asked for it
  Strides q_stride, k_stride, v_stride, o_stride;

  int batch, seqlen_q, seqlen_k, num_heads, num_heads_kv;

  /// Key j is visible to query i when j <= i + diagonal. Without a causal mask: kNoDiagonal.
  int diagonal;

  TileSchedule schedule;
  Divisor by_group;  ///< by the query heads per head of K and V

  /// exp(scale * s) is computed as exp2(scale_log2 * s) with scale_log2 > 0, so that the row maximum of the scaled
  /// scores is the scaled maximum. The sign of the scale is moved into Q: its bits are taken & q_and, then ^ q_xor.
  float scale_log2;
  uint32_t q_and, q_xor;
};

/// The last tiles of a launch without a diagonal, where several blocks divide the keys of each, so that the SMs have
/// work to the end: a part of `first` key blocks, the last ones, and `parts - 1` of `rest`, the one that is left of
/// fewer. Each leaves its unnormalised O and softmax state, which a second launch merges (helpers/merge_tail.cuh).
struct Tail {
  int begin = INT_MAX;  ///< the first such tile; there are as many blocks before those of the parts
  int tiles = 0, parts = 0, first = 0, rest = 0;
  Divisor by_rest;          ///< by parts - 1
  float* o = nullptr;       ///< [parts, tiles, tile_m, head_dim]
  float* maxima = nullptr;  ///< [parts, tiles, tile_m], of the scores without their scale
  float* sums = nullptr;    ///< the same, l
};

/// A CUtensorMap, the copy unit's description of a tensor. Opaque here: set_tensor_maps() makes it.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

/// What a launch of a row that copies by TMA reads besides.
struct ForwardTmaParams : ForwardParams {
  explicit ForwardTmaParams(ForwardParams const& p) : ForwardParams(p) {}

  Tail tail;

  TensorMap q_map{}, k_map{}, v_map{}, o_map{};
};

/// Lengths are at most this, so that i + diagonal + 1 fits an int, also for the rows that pad the last tile.
constexpr int kMaxSeqlen = 1 << 29;
constexpr int kNoDiagonal = 1 << 30;

/// A softmax scale (any finite float) as a positive factor of scores and what has to be done to the bits of Q, two
/// packed 16-bit floats at a time: & q_and, then ^ q_xor.
struct SplitScale {
  float factor;
  uint32_t q_and, q_xor;

  explicit SplitScale(float scale)
      : factor(std::fabs(scale)), q_and(0xffffffffu), q_xor(scale < 0.f ? 0x80008000u : 0u) {
    if (scale != 0.f) return;
    // 0 * -inf would turn masked scores into NaN: score zero through a zero Q instead.
    q_and = 0u;
    factor = 1.f;
  }
};

inline void set_scale(ForwardParams& params, float scale) {
  constexpr float kLog2e = 1.4426950408889634f;
  SplitScale const split(scale);
  params.q_and = split.q_and;
  params.q_xor = split.q_xor;
  params.scale_log2 = scale == 0.f ? 1.f : split.factor * kLog2e;
}

}  // namespace cutlass_fmha
