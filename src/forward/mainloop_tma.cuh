// One warp's walk over the keys in rows that copy by TMA: the walk of mainloop.cuh, in the same phases, with its loads
// left to the copy unit. What that saves in registers goes into the turns, which are the scarce thing: whatever is no
// mma and no ldmatrix is done before a turn, and the first operands are read before they are needed.
#pragma once

#include "mma_passes.cuh"
#include "producer_tma.cuh"

namespace cutlass_fmha {

template <ForwardConfig C>
struct TmaMainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Shared = TmaLayout<C>;
  using Pipe = KvPipeline<C>;
  using Turn = Turns<C.warps, C.ping_pong>;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m>;
  using KvTile = LdmatrixTile<C.head_dim, C.tile_n>;
  using Producer = TmaProducer<C>;

  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  // The A operand of one 16-wide step over all rows of the warp, and of Q or P as a whole; B operands of some n16.
  template <int Steps>
  using OperandA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>, cute::Int<Steps>>{}));
  template <int Count>
  using OperandsB =
      decltype(cute::make_tensor<Element>(cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::_2, cute::Int<Count>>{}));
  using Probabilities = OperandA<T::kKeySteps>;
  using QFragments = OperandA<C.q_in_registers ? T::kDimSteps : 1>;

  // n16 operands that are read ahead, so that no mma of a turn waits for them: of V before the turn, of Q K^T while the
  // last of P V are multiplied. Without turns it only delays what is needed.
  static constexpr int kAhead = C.ping_pong && C.head_dim >= 64 ? 2 : 0;
  struct FirstOperands {
    OperandA<1> q;
    OperandsB<kAhead + 1> k;
  };
  /// n16 multiplications of Q K^T that are left when the turn is passed on: by the time the other warp's first mma
  /// issues, they are issued too.
  static constexpr int kPassBefore = C.head_dim < 96 ? 1 : 2;

  ForwardTmaParams const& params;
  char* const smem;
  int const warp;
  int const tile_row;  ///< the warp's first row within the tile of Q
  bool const second_group;
  Pipe const k_pipe, v_pipe;
  // Lane offsets of ldmatrix. b0 and b1 of an n8 tile must be neighbouring registers: K's four 8 x 8 matrices are read
  // dimensions first, V's (transposed) keys first, like the rows of Q.
  uint32_t const qv_lane_offset, k_lane_offset;

  int const end;  ///< key blocks [end - blocks, end) are walked
  int const blocks;
  int const first_phase;  ///< before it, no key is visible to this warp
  int const masked_end;   ///< from it on, every row of this warp sees all keys of a block

  CUTE_DEVICE TmaMainloop(ForwardTmaParams const& params, char* smem, int warp, Work const& work)
      : params(params),
        smem(smem),
        warp(warp),
        tile_row(tile_row_of(warp)),
        second_group(warp >= C.warps / 2),
        k_pipe{cute::cast_smem_ptr_to_uint(smem + Shared::kKBarriers)},
        v_pipe{cute::cast_smem_ptr_to_uint(smem + Shared::kVBarriers)},
        qv_lane_offset(opaque(KvTile::lane_offset(threadIdx.x % 16, threadIdx.x % 32 / 16 * 8))),
        k_lane_offset(
            opaque(KvTile::lane_offset(threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, threadIdx.x / 8 % 2 * 8))),
        end(work.end),
        blocks(uniform(work.blocks)),
        first_phase(min(end - visible_blocks(params, work.row_begin + tile_row_of(warp)), blocks)),
        masked_end(uniform(end - full_key_blocks(params, work.row_begin + tile_row_of(warp), C.tile_n))) {}

  /// The first row of a warp within the tile of Q. The second half of the warps takes its rows backwards: under a
  /// diagonal, the two warps of a sub-core (w and w + warps / 2) then have as many keys together as any other two.
  CUTE_DEVICE static int tile_row_of(int warp) {
    return (warp < C.warps / 2 ? warp : C.warps + C.warps / 2 - 1 - warp) * T::kRows;
  }

  /// Q is in shared memory by now. Leaves the unnormalised O in `output`, which is zero at first, and its l in
  /// `softmax`.
  CUTE_DEVICE void run(Producer const& producer, Output& output, typename T::Softmax& softmax) const {
    Scores scores;
    Probabilities probabilities;
    QFragments q_fragments;
    if constexpr (C.q_in_registers) {
      CUTE_UNROLL
      for (int step = 0; step < T::kDimSteps; ++step) load_q(q_begin(), step, q_fragments(cute::_, cute::_, step));
    }
    if (second_group) Turn::pass(warp);  // lets the first group enter
    int phase = 0;
    for (; phase < first_phase; ++phase) skip(producer, phase);
    if (phase < blocks) {
      FirstOperands first;
      bool const masked = phase < masked_end;
      before_turn(producer, phase);
      Turn::take(warp);
      if (phase > 0) release_unused(v_pipe, phase - 1);
      read_ahead(phase, first);
      compute_scores(phase, q_fragments, first, scores);
      producer.refill_k(k_pipe, phase + C.stages);
      update<true>(phase, masked, scores, probabilities, output, softmax);
      OperandsB<kAhead + 1> ahead;
      ++phase;
      if constexpr (is_roomy(C)) {
        CUTE_NO_UNROLL
        for (; phase < min(masked_end, blocks); ++phase) {
          advance<Masked::yes>(producer, phase, q_fragments, first, ahead, scores, probabilities, output, softmax);
        }
      }
      CUTE_NO_UNROLL
      for (; phase < blocks; ++phase) {
        advance<is_roomy(C) ? Masked::no : Masked::ask>(producer, phase, q_fragments, first, ahead, scores,
                                                        probabilities, output, softmax);
      }
      before_turn(producer, phase);
      read_ahead(phase - 1, ahead);
      Turn::take(warp);
      accumulate(phase - 1, ahead, probabilities, output, [] {});
    } else {
      before_turn(producer, phase);
      Turn::take(warp);
    }
    if (!second_group) Turn::pass(warp);  // nobody waits for the second group any more
  }

 private:
  /// A phase after the first.
  template <Masked Mask>
  CUTE_DEVICE void advance(Producer const& producer, int phase, QFragments const& q_fragments, FirstOperands& first,
                           OperandsB<kAhead + 1>& ahead, Scores& scores, Probabilities& probabilities, Output& output,
                           typename T::Softmax& softmax) const {
    before_turn(producer, phase);
    bool const masked = Mask == Masked::ask ? phase < masked_end : Mask == Masked::yes;
    read_ahead(phase - 1, ahead);
    Turn::take(warp);
    accumulate(phase - 1, ahead, probabilities, output, [&] { read_ahead(phase, first); });
    compute_scores(phase, q_fragments, first, scores);
    producer.refill_k(k_pipe, phase + C.stages);
    update<false>(phase, masked, scores, probabilities, output, softmax);
  }

  CUTE_DEVICE static int visible_blocks(ForwardTmaParams const& p, int row_begin) {
    return key_blocks(p, row_begin, row_begin + T::kRows, C.tile_n);
  }

  /// A stage of V is free after the accumulation of the phase before.
  CUTE_DEVICE void before_turn(Producer const& producer, int phase) const {
    if (phase >= 2) producer.refill_v(v_pipe, phase - 2 + C.stages);
  }

  CUTE_DEVICE void release_unused(Pipe const& pipe, int tile) const {
    pipe.consumer_wait(tile);
    pipe.consumer_release(tile);
  }

  CUTE_DEVICE void skip(Producer const& producer, int phase) const {
    before_turn(producer, phase);
    Turn::take(warp);
    if (phase > 0) release_unused(v_pipe, phase - 1);
    release_unused(k_pipe, phase);
    Turn::pass(warp);
    producer.refill_k(k_pipe, phase + C.stages);
  }

  CUTE_DEVICE uint32_t q_begin() const { return tile_row * (2 * QTile::P::kWidth); }

  template <class Fragment>
  CUTE_DEVICE void load_q(uint32_t q_begin, int step, Fragment&& fragment) const {
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_matrix<cute::SM75_U32x4_LDSM_N>(smem, QTile::piece(qv_lane_offset + q_begin, m, step), fragment(cute::_, m));
    }
  }
  template <class Fragment>
  CUTE_DEVICE void load_k(int phase, int step, int n, Fragment&& fragment) const {
    uint32_t const stage = Shared::kKOffset + k_pipe.stage(phase) * Shared::kTile;
    load_matrix<cute::SM75_U32x4_LDSM_N>(smem, stage + KvTile::piece(k_lane_offset, n, step), fragment);
  }
  template <class Fragment>
  CUTE_DEVICE void load_v(int phase, int step, int n, Fragment&& fragment) const {
    uint32_t const stage = Shared::kVOffset + v_pipe.stage(phase) * Shared::kTile;
    load_matrix<cute::SM75_U16x8_LDSM_T>(smem, stage + KvTile::piece(qv_lane_offset, step, n), fragment);
  }

  CUTE_DEVICE void read_ahead(int phase, OperandsB<kAhead + 1>& ahead) const {
    if (kAhead > 0) v_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int n = 0; n < kAhead; ++n) load_v(phase, 0, n, ahead(cute::_, cute::_, n));
  }
  CUTE_DEVICE void read_ahead(int phase, FirstOperands& first) const {
    if constexpr (kAhead == 0) return;
    if constexpr (!C.q_in_registers) load_q(q_begin(), 0, first.q(cute::_, cute::_, 0));
    k_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int n = 0; n < kAhead; ++n) load_k(phase, 0, n, first.k(cute::_, cute::_, n));
  }

  /// scores = Q K(phase)^T, after which the turn is the other warp's.
  CUTE_DEVICE void compute_scores(int phase, QFragments const& q_fragments, FirstOperands const& first,
                                  Scores& scores) const {
    using namespace cute;
    clear(scores);
    uint32_t const q_rows = C.q_in_registers ? 0 : q_begin();
    if (kAhead == 0) k_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int step = 0; step < T::kDimSteps; ++step) {
      OperandA<1> q;
      if constexpr (C.q_in_registers) {
        copy(q_fragments(_, _, step), q(_, _, 0));
      } else if (kAhead > 0 && step == 0) {
        copy(first.q, q);
      } else {
        load_q(q_rows, step, q(_, _, 0));
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        OperandsB<1> k;
        if (step == 0 && n < kAhead) {
          copy(first.k(_, _, n), k(_, _, 0));
        } else {
          load_k(phase, step, n, k(_, _, 0));
        }
        if (step == T::kDimSteps - 1 && n == T::kKeySteps - kPassBefore) Turn::pass(warp);
        multiply<T>(q(_, _, 0), k(_, _, 0), scores, n);
      }
      repeat_mma_passes<typename T::Mma>(scores);
    }
    k_pipe.consumer_release(phase);
  }

  /// output += P V(phase), P being that of the phase's scores. `between` is called before the last multiplications.
  template <class Between>
  CUTE_DEVICE void accumulate(int phase, OperandsB<kAhead + 1> const& ahead, Probabilities const& probabilities,
                              Output& output, Between const& between) const {
    using namespace cute;
    if (kAhead == 0) v_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      OperandsB<T::kDimSteps> v;
      bool const last = step == T::kKeySteps - 1;
      if (kAhead > 0 && last) {  // all of it before `between`
        CUTE_UNROLL
        for (int n = 0; n < T::kDimSteps; ++n) load_v(phase, step, n, v(_, _, n));
        v_pipe.consumer_release(phase);
        between();
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kDimSteps; ++n) {
        if (step == 0 && n < kAhead) {
          copy(ahead(_, _, n), v(_, _, n));
        } else if (kAhead == 0 || !last) {
          load_v(phase, step, n, v(_, _, n));
        }
        multiply<T>(probabilities(_, _, step), v(_, _, n), output, n);
      }
      repeat_mma_passes<typename T::Mma>(output);
    }
    if (kAhead == 0) v_pipe.consumer_release(phase);
  }

  CUTE_DEVICE int row_begin() const { return Shared::work(smem).row_begin + tile_row; }

  /// Softmax of a phase: masks the scores where needed and turns them into probabilities.
  template <bool First>
  CUTE_DEVICE void update(int phase, bool masked, Scores& scores, Probabilities& probabilities, Output& output,
                          typename T::Softmax& softmax) const {
    using namespace cute;
    if (masked) apply_mask(params, by_row(scores), score_coordinates<C>(), row_begin(), (end - 1 - phase) * C.tile_n);
    softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output),
                                 Shared::maxima(smem, tile_row));
  }
};

}  // namespace cutlass_fmha
