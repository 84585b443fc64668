// One thread block's walk over the keys, with warp-level mma (m16n8k16) and tiles brought by cp.async.
//
// Each warp owns some query rows and keeps their O in registers. Key blocks are walked from the last to the first, so
// that the masked ones come first. The walk is in phases: in phase p a warp adds P(p-1) V(p-1) to O and computes the
// scores of block p, an uninterrupted run of mma, then turns the scores into P(p). With ping_pong, the two warps of a
// sub-core take turns in the mma part. The first half of the warps brings V, the second half K.
#pragma once

#include "fragments.cuh"
#include "mask.cuh"
#include "mma_passes.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

namespace cutlass_fmha {

/// Where a thread block's tile of queries lies. Kept in shared memory and read again where it is needed: through the
/// main loop, which leaves no register free, nothing else must stay alive for the mask and the epilogue.
struct TilePosition {
  int row_begin;  ///< first query row
  int head, batch;
};

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, and which tile this is.
template <ForwardConfig C>
struct SharedLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * 2;
  static constexpr int kTile = C.tile_n * C.head_dim * 2;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kTile;
  static constexpr int kBarriers = kVOffset + C.stages * kTile;
  static constexpr int kTileBegin = kBarriers + 2 * TilePipeline<C.stages>::kBytes;
  static constexpr int kMaxima = kTileBegin + int(sizeof(TilePosition));
  static constexpr int kBytes = kMaxima + C.tile_m * int(sizeof(float));
};

template <ForwardConfig C>
CUTE_DEVICE RowMaxima row_maxima(char* smem, int tile_row) {
  return {reinterpret_cast<float*>(smem + SharedLayout<C>::kMaxima) + tile_row};
}

template <ForwardConfig C>
struct Mainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Shared = SharedLayout<C>;
  static constexpr int kHalfThreads = C.threads() / 2;
  static constexpr bool kRoomy = is_roomy(C);
  using KvLoader = TileLoader<C.head_dim, C.tile_n, kHalfThreads, C.copy>;
  using Turn = Turns<C.warps, C.ping_pong>;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m>;
  using KvTile = LdmatrixTile<C.head_dim, C.tile_n>;
  // The A operand of one 16-wide step over all rows of the warp, and of Q or P as a whole.
  using StepA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>>{}));
  template <int Steps>
  using OperandA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>, cute::Int<Steps>>{}));

  ForwardParams const& params;
  char* const smem;
  int const uniform_tile_row;  ///< see tile_row()
  int const blocks;            ///< key blocks that the thread block walks
  int first_phase;             ///< before it, no key is visible to this warp
  bool const second_group;

  TilePipeline<C.stages> const k_pipe, v_pipe;
  // Lane offsets of ldmatrix. b0 and b1 of an n8 tile must be neighbouring registers: K's four 8 x 8 matrices are read
  // dimensions first, V's (transposed) keys first, like the rows of Q.
  uint32_t const qv_lane_offset, k_lane_offset;
  KvLoader loader;  ///< of V in the first group, of K in the second; points at the next block to bring

  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  using Probabilities = OperandA<T::kKeySteps>;
  using QFragments = OperandA<C.q_in_registers ? T::kDimSteps : 1>;

  /// The first row of a warp within the tile of Q. The second half of the warps takes its rows backwards: under a
  /// diagonal, the two warps of a sub-core (w and w + warps / 2) then have as many keys together as any other two.
  CUTE_DEVICE static int tile_row_of(int warp) {
    return (warp < C.warps / 2 ? warp : C.warps + C.warps / 2 - 1 - warp) * T::kRows;
  }

  /// That of this warp. From sm_90 on it stays in a uniform register; on sm_89 it would take a vector register. Where
  /// none is left, it is computed again.
  CUTE_DEVICE int tile_row() const { return C.arch >= 90 || kRoomy ? uniform_tile_row : tile_row_of(thread_id() / 32); }

  CUTE_DEVICE void init_pipelines() const {
    if (threadIdx.x == 0) {
      k_pipe.init(kHalfThreads, C.threads());
      v_pipe.init(kHalfThreads, C.threads());
    }
  }

  /// Starts the first loads of K and V. Only the last block of the keys, walked first, can be a partial one.
  CUTE_DEVICE void prologue() {
    loader.source += int64_t(blocks - 1) * C.tile_n * (second_group ? params.k_stride : params.v_stride).seqlen;
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      refill_k<true>(tile);
      refill_v<true>(tile);
    }
  }

  /// Q is in shared memory by now. Leaves the unnormalised O in `output` and its l in `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) {
    Scores scores;
    Probabilities probabilities;
    QFragments q_fragments;
    if constexpr (C.q_in_registers) {
      CUTE_UNROLL
      for (int step = 0; step < T::kDimSteps; ++step) load_q(q_begin(), step, q_fragments(cute::_, cute::_, step));
    }
    if (second_group) Turn::pass();  // lets the first group enter
    int phase = 0;
    for (; phase < first_phase; ++phase) skip(phase);
    if (phase < blocks) {
      begin_turn(phase);
      if (phase > 0) release_unused(v_pipe, phase - 1);
      bool const masked = compute_scores<Masked::ask>(phase, q_fragments, scores);
      end_scores(phase);
      update<true>(phase, masked, scores, probabilities, output, softmax);
      ++phase;
      if constexpr (kRoomy) {
        int const masked_end = blocks - full_key_blocks(params, row_begin(), C.tile_n);
        CUTE_NO_UNROLL
        for (; phase < masked_end; ++phase) {
          advance<Masked::yes>(phase, q_fragments, scores, probabilities, output, softmax);
        }
      }
      CUTE_NO_UNROLL
      for (; phase < blocks; ++phase) {
        advance<kRoomy ? Masked::no : Masked::ask>(phase, q_fragments, scores, probabilities, output, softmax);
      }
      begin_turn(phase);
      accumulate(phase - 1, probabilities, output);
    } else {
      begin_turn(phase);
    }
    if (!second_group) Turn::pass();  // nobody waits for the second group any more
  }

 private:
  /// A phase after the first.
  template <Masked Mask>
  CUTE_DEVICE void advance(int phase, QFragments const& q_fragments, Scores& scores, Probabilities& probabilities,
                           Output& output, typename T::Softmax& softmax) {
    begin_turn(phase);
    accumulate(phase - 1, probabilities, output);
    bool const masked = compute_scores<Mask>(phase, q_fragments, scores);
    end_scores(phase);
    update<false>(phase, masked, scores, probabilities, output, softmax);
  }

  /// Brings a tile of K or V, the next one in the walk of the thread's group, if there is one.
  template <bool Partial>
  CUTE_DEVICE void refill(TilePipeline<C.stages> const& pipe, int ring, int64_t row_stride, int tile) {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    loader.template load<Partial>(smem + ring + tile % C.stages * Shared::kTile, row_stride,
                                  params.seqlen_k - (blocks - 1 - tile) * C.tile_n);
    loader.source -= C.tile_n * row_stride;
    if constexpr (C.copy == Copy::cp_async_16) {
      pipe.producer_commit_cp_async(tile);
    } else {
      pipe.producer_commit(tile);
    }
  }
  template <bool Partial>
  CUTE_DEVICE void refill_k(int tile) {
    if (second_group) refill<Partial>(k_pipe, Shared::kKOffset, params.k_stride.seqlen, tile);
  }
  template <bool Partial>
  CUTE_DEVICE void refill_v(int tile) {
    if (!second_group) refill<Partial>(v_pipe, Shared::kVOffset, params.v_stride.seqlen, tile);
  }

  // A stage of K is free once this phase's scores are done; one of V, after the accumulation of the phase before.
  CUTE_DEVICE void end_scores(int phase) { refill_k<false>(phase + C.stages); }
  CUTE_DEVICE void begin_turn(int phase) {
    if (phase >= 2) refill_v<false>(phase - 2 + C.stages);
    Turn::take();
  }

  template <class Pipeline>
  CUTE_DEVICE void release_unused(Pipeline const& pipe, int tile) const {
    pipe.consumer_wait(tile);
    pipe.consumer_release(tile);
  }

  CUTE_DEVICE void skip(int phase) {
    begin_turn(phase);
    if (phase > 0) release_unused(v_pipe, phase - 1);
    release_unused(k_pipe, phase);
    Turn::pass();
    end_scores(phase);
  }

  CUTE_DEVICE uint32_t q_begin() const { return tile_row() * (2 * QTile::P::kWidth); }

  template <class Fragment>
  CUTE_DEVICE void load_q(uint32_t q_begin, int step, Fragment&& fragment) const {
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_matrix<cute::SM75_U32x4_LDSM_N>(smem, QTile::piece(qv_lane_offset + q_begin, m, step), fragment(cute::_, m));
    }
  }

  /// scores = Q K(phase)^T. Returns whether they need a mask: asked during the last step, so that the answer is there
  /// after it. The turn is passed on there too: by the time the other warp's first mma issues, ours are issued.
  template <Masked Mask>
  CUTE_DEVICE bool compute_scores(int phase, QFragments const& q_fragments, Scores& scores) const {
    using namespace cute;
    clear(scores);
    bool masked = Mask == Masked::yes;
    uint32_t const q_rows = C.q_in_registers ? 0 : q_begin();
    k_pipe.consumer_wait(phase);
    uint32_t const stage = Shared::kKOffset + phase % C.stages * Shared::kTile;
    CUTE_UNROLL
    for (int step = 0; step < T::kDimSteps; ++step) {
      StepA q;
      if constexpr (C.q_in_registers) {
        copy(q_fragments(_, _, step), q);
      } else {
        load_q(q_rows, step, q);
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        auto k = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U32x4_LDSM_N>(smem, stage + KvTile::piece(k_lane_offset, n, step), k);
        if (step == T::kDimSteps - 1 && n == T::kKeySteps / 2) {
          if constexpr (Mask == Masked::ask) masked = is_masked(phase);
          Turn::pass();
        }
        multiply<T>(q, k, scores, n);
      }
      repeat_mma_passes<typename T::Mma>(scores);
    }
    k_pipe.consumer_release(phase);
    return masked;
  }

  /// output += P V(phase), P being that of the phase's scores.
  CUTE_DEVICE void accumulate(int phase, Probabilities const& probabilities, Output& output) const {
    using namespace cute;
    v_pipe.consumer_wait(phase);
    uint32_t const stage = Shared::kVOffset + phase % C.stages * Shared::kTile;
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int n = 0; n < T::kDimSteps; ++n) {
        auto v = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U16x8_LDSM_T>(smem, stage + KvTile::piece(qv_lane_offset, step, n), v);
        multiply<T>(probabilities(_, _, step), v, output, n);
      }
      repeat_mma_passes<typename T::Mma>(output);
    }
    v_pipe.consumer_release(phase);
  }

  CUTE_DEVICE int row_begin() const {
    return reinterpret_cast<TilePosition const*>(smem + Shared::kTileBegin)->row_begin + tile_row();
  }

  /// Whether some row of this warp doesn't see all keys of the phase's block.
  CUTE_DEVICE bool is_masked(int phase) const {
    return (blocks - phase) * C.tile_n > visible_keys(params, row_begin());
  }

  /// Softmax of a phase: masks the scores where needed and turns them into probabilities.
  template <bool First>
  CUTE_DEVICE void update(int phase, bool masked, Scores& scores, Probabilities& probabilities, Output& output,
                          typename T::Softmax& softmax) const {
    using namespace cute;
    if (masked)
      apply_mask(params, by_row(scores), score_coordinates<C>(), row_begin(), (blocks - 1 - phase) * C.tile_n);
    softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output),
                                 row_maxima<C>(smem, tile_row()));
  }
};

}  // namespace cutlass_fmha
