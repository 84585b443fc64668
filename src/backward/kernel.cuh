// The backward kernel: dK and dV of one tile of keys of one head, and what they add to dQ.
#pragma once

#include "../core/scheduler.h"
#include "groups.cuh"
#include "overlap.cuh"
#include "walk.cuh"

namespace cutlass_fmha {

/// What a kernel takes.
template <BackwardConfig C>
using BackwardKernelParams = cute::conditional_t<C.copy == Copy::tma, BackwardTmaParams, BackwardParams>;

template <BackwardConfig C>
constexpr int backward_smem_bytes() {
  return BackwardLayout<C>::kBytes;
}

/// Which queries see a tile of keys, some and all of them.
template <BackwardConfig C>
CUTE_DEVICE void find_queries(BackwardParams const& p, KeyTile& tile) {
  Sequence const& s = tile.sequence;
  int const last = smaller(tile.key_begin + C.tile_n, s.keys) - 1;
  VisibleQueries const of_first = visible_queries(p, s, tile.key_begin), of_last = visible_queries(p, s, last);
  tile.all_begin = tile.all_end = 0;
  if (last == tile.key_begin + C.tile_n - 1) {
    // Between the keys of a prefix, which all queries see, and others stand those with the least of all ends.
    bool const in_prefix = p.prefix_lengths != nullptr && last < p.prefix_lengths[s.batch];
    bool const prefix_ends = p.prefix_lengths != nullptr && !in_prefix && tile.key_begin < p.prefix_lengths[s.batch];
    tile.all_begin = of_last.begin;
    // Rows beyond the last query count as seeing all: their P is 0 by their LSE.
    tile.all_end = of_first.end < s.queries || prefix_ends ? (prefix_ends ? 0 : of_first.end) : INT_MAX;
  }
  tile.walk = query_walk(of_first, of_last, C.tile_m);
}

/// The queries whose block lists name a tile of keys.
template <BackwardConfig C>
CUTE_DEVICE void find_listed(BackwardParams const& p, ScoredKeyTile& tile) {
  tile.listed = nullptr;
  if (p.listed == nullptr) return;
  int64_t const number = listing_tile(p, tile.sequence.batch, tile.head_kv, tile.key_begin / C.tile_n, C.tile_n);
  tile.listed = p.listed + number * listed_room(p, C.tile_m);
  tile.steps = p.listed_tiles[number];
}

/// Writes what this warp has of a gradient. `dimensions`: of the tensor.
template <BackwardConfig C>
CUTE_DEVICE void write_gradient(KeyTile const& tile, void* tensor, Strides const& stride, int dimensions, int warp,
                                float factor, KeyGradient<C>& gradient) {
  using G = KeyGradientTypes<C>;
  if (tensor == nullptr) return;
  Sequence const& s = tile.sequence;
  auto* const to = static_cast<uint16_t*>(tensor) + s.entry_k * stride.batch + tile.head_kv * stride.head;
  auto rows = by_row(gradient);
  CUTE_UNROLL
  for (int row = 0; row < 2 * G::kRowSteps; ++row) {
    int const key = tile.key_begin + G::key(warp, row, lane_id());
    if (key >= s.keys) continue;
    uint16_t* const at = to + int64_t(s.first_k + key) * stride.seqlen + lane_id() % 4 * 2;
    CUTE_UNROLL
    for (int n = 0; n < G::kColumns / 8; ++n) {
      int const column = G::column_begin(warp) + 8 * n;
      if (column >= dimensions) break;
      *reinterpret_cast<uint32_t*>(at + column) =
          pack<typename G::Element>(rows(row, 2 * n) * factor, rows(row, 2 * n + 1) * factor);
    }
  }
}

/// What dropout multiplies probabilities by that it keeps.
template <BackwardConfig C>
CUTE_DEVICE float kept_scale(BackwardParams const& p) {
  return C.scored() ? p.dropout_scale : 1.f;
}

/// Of the tile of keys that begins with `key_begin`. `grid_head`: of those in the grid.
template <BackwardConfig C>
CUTE_DEVICE void backward_of_tile(BackwardParams const& p, Sequence const& sequence, int grid_head, int head_kv,
                                  int key_begin) {
  static_assert(C.tile_n % (16 * C.group_warps()) == 0 && C.head_dim % 32 == 0);
  extern __shared__ __align__(1024) char smem[];
  typename BackwardLayout<C>::Place tile;
  tile.sequence = sequence;
  tile.key_begin = key_begin;
  tile.head_kv = head_kv;
  find_queries<C>(p, tile);
  tile.steps = tile.walk.tiles * (p.num_heads / p.num_heads_kv);
  if constexpr (C.scored()) find_listed<C>(p, tile);
  int const steps = tile.steps;
  int const warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    int const head = tile.head = head_kv * (p.num_heads / p.num_heads_kv);
    auto const first = [&](void const* tensor, Strides const& stride) {
      return static_cast<uint16_t const*>(tensor) + sequence.entry_q * stride.batch + head * stride.head +
             sequence.first_q * stride.seqlen;
    };
    int64_t const number = head * p.head_tiles + first_query_tile(p, sequence, C.tile_m);
    tile.q = first(p.q, p.q_stride);
    tile.dout = first(p.dout, p.dout_stride);
    if constexpr (C.writes_scores) {
      int64_t const at = first_scores_tile(p, grid_head, key_begin / p.scores_tile_n, steps);
      tile.sums = reinterpret_cast<float*>(p.scores + at * (C.tile_m * p.scores_tile_n));
    } else {
      tile.sums = p.dq == nullptr ? nullptr : p.dq_sums + number * (C.tile_m * C.head_dim);
    }
    tile.terms = p.row_terms + number * (kTermsOfQuery * C.tile_m);
    tile.turns = p.turns == nullptr ? nullptr : p.turns + number * kTurns;
    // Before a window, those of a prefix have met all queries.
    tile.least_before = p.prefix_lengths != nullptr && p.window_left >= 0 ? 0 : larger(0, key_begin / C.tile_n - 1);
    BackwardLayout<C>::place(smem) = tile;
  }
  __syncthreads();
  if constexpr (C.groups > 1) {
    // A group has one of the gradients. What is known before it has its registers would be spilled.
    using Walk = GroupWalk<C>;
    KeyTile const& place = BackwardLayout<C>::place(smem);
    int const group = warp / C.group_warps(), of_group = warp % C.group_warps();
    if (steps > 0) Walk(p, smem, steps, of_group).bring();
    if (group == 2) {
      Walk::template set_registers<2>();
      if (steps > 0) Walk(p, smem, steps, of_group).run_c();
    } else if (group == 1) {
      Walk::template set_registers<1>();
      KeyGradient<C> dk;
      cute::clear(dk);
      if (steps > 0) Walk(p, smem, steps, of_group).run_b(dk);
      write_gradient<C>(place, p.dk, p.dk_stride, p.head_dim, of_group, p.scale, dk);
    } else {
      Walk::template set_registers<0>();
      KeyGradient<C> dv;
      cute::clear(dv);
      if (steps > 0) Walk(p, smem, steps, of_group).run_a(dv);
      write_gradient<C>(place, p.dv, p.dv_stride, p.head_dim_v, of_group, kept_scale<C>(p), dv);
    }
  } else {
    KeyGradient<C> dk, dv;
    cute::clear(dk);
    cute::clear(dv);
    if (steps > 0) BackwardWalk<C>(p, smem, steps, warp).run(dk, dv);
    KeyTile const& place = BackwardLayout<C>::place(smem);
    write_gradient<C>(place, p.dk, p.dk_stride, p.head_dim, warp, p.scale, dk);
    write_gradient<C>(place, p.dv, p.dv_stride, p.head_dim_v, warp, kept_scale<C>(p), dv);
  }
}

template <BackwardConfig C>
CUTE_DEVICE void backward(BackwardParams const& p) {
  if constexpr (C.dependent_launch) meet_dependents();
  WorkTile const work = work_tile(p.schedule, blockIdx.x);
  int head_kv = work.head, batch = work.batch;
  if constexpr (C.writes_scores) {  // those of all batch entries have numbers
    batch = (p.scores_first + work.head) / p.num_heads_kv;
    head_kv = p.scores_first + work.head - batch * p.num_heads_kv;
  }
  Sequence const sequence = sequence_at(p, batch);
  // Under a diagonal, the first keys are seen by most queries: they come first.
  int const key_begin = (p.schedule.mixed ? p.schedule.m_blocks - 1 - work.m_block : work.m_block) * C.tile_n;
  if (key_begin >= sequence.keys) return;  // seqlen_k is that of the longest sequence
  // What finds tiles in memory, or in lists, counts on keys of C.tile_n each.
  static_assert(C.tail == 0 || (C.groups == 3 && !C.scored() && C.tail < C.tile_n));
  if constexpr (C.tail > 0) {
    if (sequence.keys - key_begin <= C.tail) {
      backward_of_tile<C.of_tail()>(p, sequence, work.head, head_kv, key_begin);
      return;
    }
  }
  backward_of_tile<C>(p, sequence, work.head, head_kv, key_begin);
}

}  // namespace cutlass_fmha
