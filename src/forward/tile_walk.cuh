// One warp's walk over the keys of a tile of queries, with warp-level mma (m16n8k16).
//
// Each warp owns some query rows and keeps their O in registers. Key blocks are walked from the last to the first, so
// that the masked ones come first. The walk is in phases: in phase p a warp adds P(p-1) V(p-1) to O and computes the
// scores of block p, an uninterrupted run of mma, then turns the scores into P(p). With ping_pong, the two warps of a
// sub-core take turns in the mma part: whatever is no mma and no ldmatrix is done before a turn, and the first operands
// are read before they are needed.
//
// `Keys` says where K and V come from, and what a warp knows of its walk:
//   Shared                       where rings of tiles lie in shared memory; tile t is that of phase t
//   k_pipe, v_pipe               their pipelines
//   blocks                       phases of the thread block
//   first_phase, end_phase()     before and from which on no key is visible to this warp; kEndsEarly: not only to the
//                                warps of tiles that have no more blocks
//   memory(), lanes()            where a lane reads: from where on, and, asked for before each turn, how many bytes
//                                from the beginning of a tile, q(), k() and v()
//   take(), pass()               turns; second_group(): whether this warp comes second
//   before_turn(p), end_scores(p)  bring what finds room by then: V after phase p - 2, K after the scores of phase p
//   kBringsInSoftmax, in_softmax(p)  whether, and how, V after phase p - 1 is brought during the softmax of phase p:
//                                one stage is free for a while before a long one ends
//   is_masked(p), masked_end()   whether some row doesn't see all keys of a block; from that phase on, all rows do,
//                                where kMaskedFirst says that there is such a phase
//   kAsksInTurn, kPassAt         whether is_masked() is asked during a turn; before which n16 of the last step of
//                                Q K^T the turn is passed on: by the time the other warp's first mma issues, ours are
//   before_softmax(p, masked, scores)  masks
//   ask_for_masks(p, asked), before_softmax(p, masked, asked, scores)  where they are read for: MaskFragment
//   terms(p, masked, asked)      in its place where scores are modified: ScoreTerms
//   maxima()                     of this warp's rows, for the softmax
#pragma once

#include "../core/mask.cuh"
#include "../core/pipeline.cuh"
#include "../core/product.cuh"

namespace cutlass_fmha {

/// The first row of a warp within the tile of Q. The second half of the warps takes its rows backwards: under a
/// diagonal, the two warps of a sub-core (w and w + warps / 2) then have as many keys together as any other two.
template <ForwardConfig C>
CUTE_DEVICE int tile_row_of(int warp) {
  return (warp < C.warps / 2 ? warp : C.warps + C.warps / 2 - 1 - warp) * C.rows_per_warp();
}

template <ForwardConfig C, class Keys, class Asked = std::nullptr_t>
struct TileWalk {
  using T = ForwardTypes<C>;
  using Product = WarpProduct<C>;
  using Lanes = typename Keys::Lanes;
  using Shared = typename Keys::Shared;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using QFragments = typename Product::QFragments;

  // n16 operands that are read ahead, so that no mma of a turn waits for them: of V before the turn, of Q K^T while the
  // last of P V are multiplied. Without turns it only delays what is needed.
  // Rows that read a mask or a bias meanwhile have room for less.
  static constexpr int kRoomAhead = !C.reads_masks() || (is_roomy(C) && C.copy == Copy::tma) ? 2
                                    : C.architecture().fast_memory                           ? 1
                                                                                             : 0;
  static constexpr int kAheadV = C.ping_pong && C.head_dim >= 64 ? kRoomAhead : 0;
  static constexpr int kAheadK = C.reads_masks() && kRoomAhead < 2 ? 0 : kAheadV;
  using Ahead = OperandsB<T, kAheadV + 1>;
  /// Whether K is waited for before a turn, too: without a branch in it, ptxas mixes all of its mma, where it has the
  /// registers. A ring of one stage has K no earlier than it is needed.
  static constexpr bool kWaitsAhead = C.ping_pong && C.stages > 1 && is_roomy(C) && C.head_dim <= 96;
  struct FirstOperands {
    typename Product::QStep q;
    OperandsB<T, kAheadK + 1> k;
  };

  /// The step of Q K^T by which all of V was read: ptxas mixes it with the last of P V.
  static constexpr int kReleaseAt = C.reads_masks() && C.head_dim >= 128 ? 3 : 1;

  /// Whether the phases that need a mask have a loop of their own.
  static constexpr bool kMaskedLoop = Keys::kMaskedFirst && is_roomy(C);

  char* const smem;
  Keys& keys;

  /// Q is in shared memory by now. Leaves the unnormalised O in `output`, which is zero at first, and its l in
  /// `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) const {
    Scores scores;
    Probabilities probabilities;
    QFragments q_fragments;
    if constexpr (C.q_in_registers) Product::keep_q(smem, keys.q_lane(), q_fragments);
    if (keys.second_group()) keys.pass();  // lets the first group enter
    int phase = 0;
    for (; phase < keys.first_phase; ++phase) skip(phase);
    if (phase < keys.end_phase()) {
      keys.before_turn(phase);
      bool masked = asked_before_turn<Masked::ask>(phase);
      Lanes const lanes = keys.lanes();
      FirstOperands first;
      Asked asked = ask_for_masks(phase);
      keys.take();
      if (phase > 0) release_unused(keys.v_pipe, phase - 1);
      read_ahead<true>(phase, lanes, first);
      compute_scores<Masked::ask, kAheadK == 0>(phase, lanes, first, q_fragments, scores, masked, []() FMHA_INLINE {});
      keys.end_scores(phase);
      update<true>(phase, masked, asked, scores, probabilities, output, softmax);
      ++phase;
      if constexpr (kMaskedLoop) {
        CUTE_NO_UNROLL
        for (; phase < keys.masked_end(); ++phase) {
          advance<Masked::yes>(phase, q_fragments, scores, probabilities, output, softmax);
        }
      }
      CUTE_NO_UNROLL
      for (; phase < keys.end_phase(); ++phase) {
        advance<kMaskedLoop ? Masked::no : Masked::ask>(phase, q_fragments, scores, probabilities, output, softmax);
      }
      finish(phase, probabilities, output);
    } else {
      end_turns(phase);
    }
    if (!keys.second_group()) keys.pass();  // nobody waits for the second group any more
  }

 private:
  /// A phase after the first.
  template <Masked Mask>
  CUTE_DEVICE void advance(int phase, QFragments const& q_fragments, Scores& scores, Probabilities& probabilities,
                           Output& output, typename T::Softmax& softmax) const {
    keys.before_turn(phase);
    bool masked = asked_before_turn<Mask>(phase);
    Lanes const lanes = keys.lanes();
    Asked asked = ask_for_masks(phase);
    Ahead ahead;
    FirstOperands first;
    read_ahead(phase - 1, lanes, ahead);
    if (kWaitsAhead) keys.k_pipe.consumer_wait(phase);
    keys.take();
    accumulate(phase - 1, lanes, ahead, probabilities, output, [&] { read_ahead<!kWaitsAhead>(phase, lanes, first); });
    // Once V is read, which it is before scores are made, but where products are mixed. To wait for O itself takes a
    // register too many elsewhere.
    auto const release = [&]() FMHA_INLINE {
      if constexpr (kAheadV > 0) {
        keys.v_pipe.consumer_release(phase - 1, kWaitsAhead ? made_of(output) : made_of(scores));
      }
    };
    compute_scores<Mask, kAheadK == 0 && !kWaitsAhead>(phase, lanes, first, q_fragments, scores, masked, release);
    keys.end_scores(phase);
    update<false>(phase, masked, asked, scores, probabilities, output, softmax);
  }

  /// What is left after the last phase of which this warp sees keys.
  CUTE_DEVICE void finish(int phase, Probabilities const& probabilities, Output& output) const {
    if constexpr (Keys::kEndsEarly) {
      keys.before_turn(phase);
    } else {
      before_last_turn(phase);
    }
    Lanes const lanes = keys.lanes();
    Ahead ahead;
    read_ahead(phase - 1, lanes, ahead);
    keys.take();
    accumulate(phase - 1, lanes, ahead, probabilities, output, []() FMHA_INLINE {});
    if constexpr (kAheadV > 0) keys.v_pipe.consumer_release(phase - 1, made_of(output));
    if constexpr (Keys::kEndsEarly) {
      if (phase == keys.blocks) return;
      leave(phase);
      end_turns(phase + 1);
    }
  }

  /// Where this warp has accumulated all that it sees: the other phases, and the last turn.
  CUTE_DEVICE void end_turns(int phase) const {
    if constexpr (Keys::kEndsEarly) {
      CUTE_NO_UNROLL
      for (; phase < keys.blocks; ++phase) skip(phase);
    }
    before_last_turn(phase);
    keys.take();
  }

  /// After the last phase, only a ring of one stage has room that a tile still wants.
  CUTE_DEVICE void before_last_turn(int phase) const {
    if constexpr (C.stages == 1) keys.before_turn(phase);
  }

  /// A phase of which this warp sees no key.
  CUTE_DEVICE void skip(int phase) const {
    keys.before_turn(phase);
    keys.take();
    if (phase > 0) release_unused(keys.v_pipe, phase - 1);
    leave(phase);
  }
  CUTE_DEVICE void leave(int phase) const {
    release_unused(keys.k_pipe, phase);
    keys.pass();
    keys.end_scores(phase);
    if constexpr (Keys::kBringsInSoftmax) keys.in_softmax(phase);
  }

  template <class Pipeline>
  CUTE_DEVICE void release_unused(Pipeline const& pipe, int tile) const {
    pipe.consumer_wait(tile);
    pipe.consumer_release(tile);
  }

  /// What is read for the scores of a phase, where a row does that: on its way while the turn is waited for, and during
  /// it.
  CUTE_DEVICE Asked ask_for_masks(int phase) const {
    Asked asked{};
    if constexpr (C.reads_masks()) keys.ask_for_masks(phase, asked);
    return asked;
  }

  template <Masked Mask>
  CUTE_DEVICE bool asked_before_turn(int phase) const {
    if constexpr (Mask == Masked::ask && !Keys::kAsksInTurn) return keys.is_masked(phase);
    return Mask == Masked::yes;
  }

  CUTE_DEVICE uint32_t k_tile(int phase) const { return Shared::kKOffset + keys.k_pipe.stage(phase) * Shared::kKTile; }
  CUTE_DEVICE uint32_t v_tile(int phase) const { return Shared::kVOffset + keys.v_pipe.stage(phase) * Shared::kVTile; }

  CUTE_DEVICE void read_ahead(int phase, Lanes const& lanes, Ahead& ahead) const {
    if (kAheadV > 0) keys.v_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int n = 0; n < kAheadV; ++n)
      Product::load_v(keys.memory(), v_tile(phase), lanes.v(), 0, n, ahead(cute::_, cute::_, n));
  }
  template <bool Waits>
  CUTE_DEVICE void read_ahead(int phase, Lanes const& lanes, FirstOperands& first) const {
    if constexpr (kAheadK == 0) return;
    if constexpr (!C.q_in_registers) Product::load_q(keys.memory(), lanes.q(), 0, first.q(cute::_, cute::_, 0));
    if (Waits) keys.k_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int n = 0; n < kAheadK; ++n)
      Product::load_k(keys.memory(), k_tile(phase), lanes.k(), 0, n, first.k(cute::_, cute::_, n));
  }

  /// scores = Q K(phase)^T, during which the turn is passed on. Asks whether they need a mask, where that is asked
  /// during a turn: late, so that the answer is there after it. `Waits`: for K. `begun` is called before kReleaseAt.
  template <Masked Mask, bool Waits, class Begun>
  CUTE_DEVICE void compute_scores(int phase, Lanes const& lanes, FirstOperands const& first,
                                  QFragments const& q_fragments, Scores& scores, bool& masked,
                                  Begun const& begun) const {
    using namespace cute;
    if (Waits) keys.k_pipe.consumer_wait(phase);
    Product::query_keys(
        q_fragments,
        [&](int step, auto&& q) FMHA_INLINE {
          if (kAheadK > 0 && step == 0) {
            copy(first.q(_, _, 0), q);
          } else {
            Product::load_q(keys.memory(), lanes.q(), step, q);
          }
        },
        [&](int step, int n, auto&& k) FMHA_INLINE {
          if (step == 0 && n < kAheadK) {
            copy(first.k(_, _, n), k);
          } else {
            Product::load_k(keys.memory(), k_tile(phase), lanes.k(), step, n, k);
          }
        },
        [&](int step, int n) FMHA_INLINE {
          if (step == kReleaseAt && n == 0) begun();
          if (step == T::kDimSteps - 1 && n == Keys::kPassAt) {
            if constexpr (Mask == Masked::ask && Keys::kAsksInTurn) masked = keys.is_masked(phase);
            keys.pass();
          }
        },
        scores);
    keys.k_pipe.consumer_release(phase, made_of(scores));
  }

  /// output += P V(phase), P being that of the phase's scores. `between` is called before the last multiplications.
  /// Where these have all of V in registers by then, it is still to be released.
  template <class Between>
  CUTE_DEVICE void accumulate(int phase, Lanes const& lanes, Ahead const& ahead, Probabilities const& probabilities,
                              Output& output, Between const& between) const {
    using namespace cute;
    if (kAheadV == 0) keys.v_pipe.consumer_wait(phase);
    Product::template add_values<(kAheadV > 0)>(
        probabilities,
        [&](int step, int n, auto&& v) FMHA_INLINE {
          if (step == 0 && n < kAheadV) {
            copy(ahead(_, _, n), v);
          } else {
            Product::load_v(keys.memory(), v_tile(phase), lanes.v(), step, n, v);
          }
        },
        between, output);
    if constexpr (kAheadV > 0) return;
    if constexpr (!C.ping_pong && C.warps == 8) {
      keys.v_pipe.consumer_release_fenced(phase);
    } else {
      keys.v_pipe.consumer_release(phase, made_of(output));
    }
  }

  /// Softmax of a phase: turns scores into probabilities.
  template <bool First>
  CUTE_DEVICE void update(int phase, bool masked, Asked& asked, Scores& scores, Probabilities& probabilities,
                          Output& output, typename T::Softmax& softmax) const {
    if constexpr (C.modifies_scores()) {
      auto terms = keys.terms(phase, masked, asked);
      terms.prepare(by_row(scores));
      softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), keys.maxima(),
                                   terms);
      terms.finish(pairs_by_row<T>(probabilities));
    } else {
      if constexpr (C.reads_masks()) {
        keys.before_softmax(phase, masked, asked, scores);
      } else {
        keys.before_softmax(phase, masked, scores);
      }
      softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), keys.maxima());
    }
  }
};

}  // namespace cutlass_fmha
