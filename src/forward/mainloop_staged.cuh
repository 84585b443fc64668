// Split rows whose keys and values pass through shared memory: for problems with few query rows, as mainloop_split.cuh,
// with whole lines by cp.async in place of loads straight into mma operands, which touch eight or sixteen lines each.
//
// Share s of the keys is blocks s, s + kv_warps, ..., walked from the last to the first by the warps that have it, one
// for each group of query rows. They bring their tiles themselves and wait for each other only: a barrier of their own,
// or none where a share has one warp.
#pragma once

#include "mask.cuh"
#include "scheduler.h"
#include "shares.cuh"
#include "tile.cuh"

namespace cutlass_fmha {

/// Shared memory of a block: Q, then for each share its stages of K and V.
template <ForwardConfig C>
struct StagedLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * 2;
  static constexpr int kTile = C.tile_n * C.head_dim * 2;
  static constexpr int kShare = C.stages * 2 * kTile;
  using Shares = ShareLayout<C, kQ + C.kv_warps * kShare>;
  static constexpr int kBytes = Shares::kBytes;
};

/// Copies rows `begin` and on of a tensor to a tile of `Rows` rows with `Threads` threads of which this is `thread`.
/// Rows from `end` on become zeros.
template <int HeadDim, int Rows, int Threads>
CUTE_DEVICE void copy_rows(char* tile, uint16_t const* tensor, int64_t row_stride, int begin, int end, int thread) {
  using P = Panels<HeadDim>;
  constexpr int kChunks = P::kWidth / 8, kRowsPerPass = Threads / kChunks;
  static_assert(Rows % kRowsPerPass == 0);
  typename P::template Layout<Rows> layout;
  int const first = thread / kChunks, column = thread % kChunks * 8;
  uint16_t const* from = tensor + (begin + first) * row_stride + column;
  CUTE_UNROLL
  for (int pass = 0; pass < Rows / kRowsPerPass; ++pass) {
    int const row = first + pass * kRowsPerPass;
    bool const there = begin + row < end;
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      char* const to = tile + 2 * (uint32_t(layout(row, column)) + panel * Rows * P::kWidth);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(there ? from + panel * P::kWidth : tensor),
          *reinterpret_cast<cute::uint128_t*>(to), there);
    }
    from += kRowsPerPass * row_stride;
  }
}

template <ForwardConfig C>
struct StagedMainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  using Layout = StagedLayout<C>;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m>;
  using KvTile = LdmatrixTile<C.head_dim, C.tile_n>;
  static constexpr int kShareThreads = C.warps / C.kv_warps * 32;
  template <int Steps>
  using OperandA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>, cute::Int<Steps>>{}));
  using Probabilities = OperandA<T::kKeySteps>;

  ForwardParams const& params;
  char* const smem;
  uint16_t const *k, *v;  ///< of this head
  int const share;
  int const row_begin;  ///< first query row of this warp
  int const tile_row;   ///< the same within the tile
  int const blocks;     ///< key blocks of which some row of the tile sees some key

  CUTE_DEVICE RowMaxima maxima() const { return {Layout::Shares::maxima(smem) + share * C.tile_m + tile_row}; }

  CUTE_DEVICE int steps() const { return blocks <= share ? 0 : (blocks - 1 - share) / C.kv_warps + 1; }

  /// Starts the copies of the first steps, K and V each committed as a group.
  CUTE_DEVICE void prologue() const {
    CUTE_UNROLL
    for (int step = 0; step < C.stages; ++step) {
      load_k(step);
      load_v(step);
    }
  }

  /// Q is in shared memory by now. Leaves the unnormalised O in `output`, its l in `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) const {
    using namespace cute;
    OperandA<T::kDimSteps> q;
    int const lane = lane_id();
    uint32_t const q_offset = QTile::lane_offset(lane % 16, lane / 16 * 8) + tile_row * (2 * QTile::P::kWidth);
    CUTE_UNROLL
    for (int d = 0; d < T::kDimSteps; ++d) {
      CUTE_UNROLL
      for (int m = 0; m < T::kRowSteps; ++m) {
        load_matrix<SM75_U32x4_LDSM_N>(smem, QTile::piece(q_offset, m, d), q(_, m, d));
      }
    }
    CUTE_NO_UNROLL
    for (int step = 0; step < steps(); ++step) {
      Scores scores;
      Probabilities probabilities;
      wait_for_tile();
      compute_scores(step, q, scores);
      meet();  // all have read the tile that the next one replaces
      load_k(step + C.stages);
      int const key_begin = block(step) * C.tile_n;
      if (key_begin + C.tile_n > visible_keys(params, row_begin)) {
        apply_mask(params, by_row(scores), score_coordinates<C>(), row_begin, key_begin);
      }
      softmax.template step<false>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), maxima());
      wait_for_tile();
      accumulate(step, probabilities, output);
      meet();
      load_v(step + C.stages);
    }
  }

 private:
  CUTE_DEVICE int block(int step) const { return blocks - 1 - (blocks - 1 - share) % C.kv_warps - step * C.kv_warps; }

  CUTE_DEVICE char* tile(int step, int which) const {
    return smem + Layout::kQ + share * Layout::kShare + (step % C.stages * 2 + which) * Layout::kTile;
  }

  CUTE_DEVICE void load_k(int step) const { load(step, 0, k, params.k_stride.seqlen); }
  CUTE_DEVICE void load_v(int step) const { load(step, 1, v, params.v_stride.seqlen); }
  CUTE_DEVICE void load(int step, int which, uint16_t const* tensor, int64_t row_stride) const {
    if (step < steps()) {
      copy_rows<C.head_dim, C.tile_n, kShareThreads>(tile(step, which), tensor, row_stride, block(step) * C.tile_n,
                                                     params.seqlen_k,
                                                     int(threadIdx.x) / (32 * C.kv_warps) * 32 + lane_id());
    }
    cute::cp_async_fence();  // an empty group, where there is no step: the number of groups in flight stays the same
  }

  /// The tile that is wanted now is complete: all but the newest 2 * stages - 1 groups are.
  CUTE_DEVICE void wait_for_tile() const {
    cute::cp_async_wait<2 * C.stages - 1>();
    meet();
  }
  /// Waits for the warps of the share, and sees what they wrote.
  CUTE_DEVICE void meet() const {
    if constexpr (kShareThreads == 32) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + share, kShareThreads);
    }
  }

  template <class Q>
  CUTE_DEVICE void compute_scores(int step, Q const& q, Scores& scores) const {
    using namespace cute;
    clear(scores);
    int const lane = lane_id();
    uint32_t const offset = KvTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    CUTE_UNROLL
    for (int d = 0; d < T::kDimSteps; ++d) {
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        auto b = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U32x4_LDSM_N>(tile(step, 0), KvTile::piece(offset, n, d), b);
        multiply<T>(q(_, _, d), b, scores, n);
      }
    }
  }

  CUTE_DEVICE void accumulate(int step, Probabilities const& probabilities, Output& output) const {
    using namespace cute;
    int const lane = lane_id();
    uint32_t const offset = KvTile::lane_offset(lane % 16, lane / 16 * 8);
    CUTE_UNROLL
    for (int n = 0; n < T::kKeySteps; ++n) {
      CUTE_UNROLL
      for (int d = 0; d < T::kDimSteps; ++d) {
        auto b = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U16x8_LDSM_T>(tile(step, 1), KvTile::piece(offset, n, d), b);
        multiply<T>(probabilities(_, _, n), b, output, d);
      }
    }
  }
};

/// Whole rows of O and their LSE, merged from the shares.
template <ForwardConfig C>
CUTE_DEVICE void staged_epilogue(ForwardParams const& p, char* smem, WorkTile const& tile) {
  constexpr int kChunks = C.head_dim / 8, kItems = C.tile_m * kChunks;
  CUTE_UNROLL
  for (int begin = 0; begin < kItems; begin += C.threads()) {
    int const item = begin + int(threadIdx.x);
    int const row = item / kChunks, dimension = item % kChunks * 8;
    int const query = tile.m_block * C.tile_m + row;
    if ((kItems % C.threads() != 0 && item >= kItems) || query >= p.seqlen_q) continue;
    MergedRow<C, typename StagedLayout<C>::Shares> const merged(smem, row, p.scale_log2);
    float o[8];
    merged.read(smem, row, dimension, 1.f, o);
    uint4 packed;
    packed.x = pack<typename ForwardTypes<C>::Element>(o[0], o[1]);
    packed.y = pack<typename ForwardTypes<C>::Element>(o[2], o[3]);
    packed.z = pack<typename ForwardTypes<C>::Element>(o[4], o[5]);
    packed.w = pack<typename ForwardTypes<C>::Element>(o[6], o[7]);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.o) + tile.batch * p.o_stride.batch +
                              tile.head * p.o_stride.head + query * p.o_stride.seqlen + dimension) = packed;
    if (p.lse != nullptr && dimension == 0) {
      p.lse[(int64_t(tile.batch) * p.num_heads + tile.head) * p.seqlen_q + query] = merged.lse;
    }
  }
}

}  // namespace cutlass_fmha
