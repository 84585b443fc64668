// A general row's walk over the keys: all threads bring a step's keys and values by cp.async, one step ahead or more,
// and one barrier a step keeps the ring of stages in order. Warps are in groups of kv_warps that share query rows; each
// warp of a group takes tile_n keys of a step, with an online softmax of its own.
#pragma once

#include "../forward/shares.cuh"
#include "loader.cuh"
#include "scores.cuh"

namespace cutlass_fmha {

/// Shared memory of a block: Q, rings of K and V tiles, and the state of the softmax. On the way out the tiles give way
/// to the shares' O.
template <ForwardConfig C>
struct GeneralLayout {
  static constexpr int kStepKeys = C.tile_n * C.kv_warps;
  static constexpr int kQ = C.tile_m * C.head_dim * 2;
  static constexpr int kK = kStepKeys * C.head_dim * 2;
  static constexpr int kV = kStepKeys * C.head_dim_v() * 2;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kK;
  static constexpr int kTiles = kVOffset + C.stages * kV;
  using Shares = ShareLayout<C, kTiles>;
  static constexpr int kBytes = Shares::kBytes;
};

/// Starts the copies of the tile's queries.
template <ForwardConfig C>
CUTE_DEVICE void load_query_tile(GeneralParams const& p, char* smem, Sequence const& sequence,
                                 GeneralTile const& tile) {
  auto const* const q = static_cast<uint16_t const*>(p.q);
  RowLoader<C.head_dim, C.tile_m, C.threads()>::load(smem, q, p.head_dim, p.vectors, [&](int row) {
    QueryRow const at = query_row(p, tile, tile.row_begin + row);
    return at.query < sequence.queries
               ? q + sequence.entry_q * p.q_stride.batch + int64_t(sequence.first_q + at.query) * p.q_stride.seqlen +
                     at.head * p.q_stride.head
               : nullptr;
  });
}

template <ForwardConfig C>
struct GeneralMainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Shared = GeneralLayout<C>;
  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m>;
  using KTile = LdmatrixTile<C.head_dim, Shared::kStepKeys>;
  using VTile = LdmatrixTile<C.head_dim_v(), Shared::kStepKeys>;
  using StepA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>>{}));
  template <int Steps>
  using OperandA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>, cute::Int<Steps>>{}));
  using QFragments = OperandA<C.q_in_registers ? T::kDimSteps : 1>;
  using Probabilities = OperandA<T::kKeySteps>;

  GeneralParams const& p;
  char* const smem;
  Sequence const& sequence;
  GeneralTile const& tile;
  KeyWalk const& walk;
  int const share;     ///< of the keys of a step
  int const tile_row;  ///< first row of this warp
  int const head_kv;

  CUTE_DEVICE RowMaxima maxima() const { return {Shared::Shares::maxima(smem) + share * C.tile_m + tile_row}; }

  /// Starts the copies of Q and of the first steps, each committed as a group.
  CUTE_DEVICE void prologue() const {
    load_query_tile<C>(p, smem, sequence, tile);
    CUTE_UNROLL
    for (int step = 0; step < C.stages - 1; ++step) load(step);
  }

  /// Leaves the unnormalised O of this warp's share of the keys in `output`, its l in `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) const {
    using namespace cute;
    QFragments q_fragments;
    CUTE_NO_UNROLL
    for (int step = 0; step < walk.tiles; ++step) {
      cp_async_wait<C.stages - 2>();  // this step's group is complete, and Q's, which is part of the first
      __syncthreads();                // for all threads; and nobody reads the step before any more
      load(step + C.stages - 1);
      if constexpr (C.q_in_registers) {
        if (step == 0) {
          CUTE_UNROLL
          for (int d = 0; d < T::kDimSteps; ++d) load_q(d, q_fragments(_, _, d));
        }
      }
      int const key_begin = walk.key_begin(step, Shared::kStepKeys) + share * C.tile_n;
      ScoreBlock<C> const block{p, sequence, tile, tile.row_begin + tile_row, key_begin};
      Scores scores;
      compute_scores(step, q_fragments, scores);
      block.modify(by_row(scores));
      block.hide(by_row(scores), masked_by_range(key_begin));
      Probabilities probabilities;
      softmax.template step<false>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), maxima());
      block.drop_out(pairs_by_row<T>(probabilities));
      accumulate(step, probabilities, output);
    }
  }

 private:
  CUTE_DEVICE static uint32_t stage(int step) { return uint32_t(step % C.stages); }

  CUTE_DEVICE void load(int step) const {
    if (step < walk.tiles) {
      int const begin = walk.key_begin(step, Shared::kStepKeys);
      load_tile<C.head_dim>(Shared::kKOffset + stage(step) * Shared::kK, p.k, p.k_stride, p.head_dim, begin);
      load_tile<C.head_dim_v()>(Shared::kVOffset + stage(step) * Shared::kV, p.v, p.v_stride, p.head_dim_v, begin);
    }
    cute::cp_async_fence();  // an empty group, where there is no step: the number of groups in flight stays the same
  }

  template <int HeadDim>
  CUTE_DEVICE void load_tile(uint32_t to, void const* tensor, Strides const& stride, int head_dim, int begin) const {
    auto const* const from =
        static_cast<uint16_t const*>(tensor) + head_kv * stride.head + key_entry_offset(p, stride, sequence);
    RowLoader<HeadDim, Shared::kStepKeys, C.threads()>::load(smem + to, from, head_dim, p.vectors, [&](int row) {
      int const key = begin + row;
      return key < sequence.keys ? from + key_row_offset(p, stride, sequence, sequence.first_k + key) : nullptr;
    });
  }

  /// Rows that no query stands in are computed with the last query's: nobody reads what they give.
  CUTE_DEVICE bool masked_by_range(int key_begin) const {
    int const row_begin = tile.row_begin + tile_row;
    int const i_begin = p.by_pack.quotient(row_begin);
    int const i_last = smaller(p.by_pack.quotient(row_begin + T::kRows - 1), sequence.queries - 1);
    return i_last < i_begin || is_masked(p, sequence, i_begin, i_last, key_begin, key_begin + C.tile_n);
  }

  template <class Fragment>
  CUTE_DEVICE void load_q(int step, Fragment&& fragment) const {
    int const lane = lane_id();
    uint32_t const offset = QTile::lane_offset(lane % 16, lane / 16 * 8) + tile_row * (2 * QTile::P::kWidth);
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_matrix<cute::SM75_U32x4_LDSM_N>(smem, QTile::piece(offset, m, step), fragment(cute::_, m));
    }
  }

  /// scores = Q K^T of this warp's keys of a step.
  CUTE_DEVICE void compute_scores(int step, QFragments const& q_fragments, Scores& scores) const {
    using namespace cute;
    clear(scores);
    int const lane = lane_id();
    uint32_t const offset = KTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) +
                            share * (C.tile_n * 2 * KTile::P::kWidth) + Shared::kKOffset + stage(step) * Shared::kK;
    CUTE_UNROLL
    for (int d = 0; d < T::kDimSteps; ++d) {
      StepA q;
      if constexpr (C.q_in_registers) {
        copy(q_fragments(_, _, d), q);
      } else {
        load_q(d, q);
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        auto k = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U32x4_LDSM_N>(smem, KTile::piece(offset, n, d), k);
        multiply<T>(q, k, scores, n);
      }
    }
  }

  /// output += P V of this warp's keys of a step.
  CUTE_DEVICE void accumulate(int step, Probabilities const& probabilities, Output& output) const {
    using namespace cute;
    int const lane = lane_id();
    uint32_t const offset = VTile::lane_offset(lane % 16, lane / 16 * 8) + share * (C.tile_n * 2 * VTile::P::kWidth) +
                            Shared::kVOffset + stage(step) * Shared::kV;
    CUTE_UNROLL
    for (int k = 0; k < T::kKeySteps; ++k) {
      CUTE_UNROLL
      for (int n = 0; n < T::kValueSteps; ++n) {
        auto v = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U16x8_LDSM_T>(smem, VTile::piece(offset, k, n), v);
        multiply<T>(probabilities(_, _, k), v, output, n);
      }
    }
  }
};

}  // namespace cutlass_fmha
