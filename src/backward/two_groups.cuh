// The walk of walk.cuh with the work of a pair of warps divided between two groups: A has S, P and dV of its keys and
// dQ, B has dP, dS and dK. A warp keeps one gradient instead of two, so that it owns twice as many keys, and each B
// fragment from shared memory feeds twice as many mma.
//
// A unit is half a tile. Q and dO come by units, as B asks for them; three have room, since A is ahead of B and another
// is on its way. Units are handed over: P by a warp of A to its partner in B, in registers' order, at the place where
// dS of the same scores comes afterwards; dS by all of B to dQ, which A computes a unit late, or a tile. Where dS goes
// to memory, B writes it from registers, or A copies it from shared memory.
//
// Where two neighbours of a group divide the columns of the gradient of both's keys (key_sharers), each finds the
// other's P, or dS, in that place. In A each then tells the other's partner that dS may come there.
#pragma once

#include "parts.cuh"

namespace cutlass_fmha {

template <BackwardConfig C>
struct TwoGroupWalk : BackwardParts<C> {
  using Parts = BackwardParts<C>;
  using typename Parts::Gradient;
  using typename Parts::Layout;
  using typename Parts::QTile;
  using typename Parts::ScoresTile;
  using typename Parts::Values;
  using Barriers = TwoGroupBarriers<Layout::kQStages, Layout::kScoresUnits>;
  using Parts::barriers, Parts::params, Parts::place, Parts::smem, Parts::warp;
  using Unit = typename Parts::template Types<C.unit()>;
  static constexpr int kThreads = C.threads() / 2;  ///< of a group
  static constexpr int kUnit = C.unit();
  // Scores of group A: with pieces, exponentials of one stand beside S of the next and dV of the one before.
  static constexpr int kPieces = C.by_pieces ? kUnit / 16 : 1;
  using Piece = typename Parts::template Types<kUnit / kPieces>;
  /// dS is written by who made it; where neighbours need it in shared memory, A has the time to copy it from there.
  static constexpr bool kWritesAtOnce = C.writes_scores && C.key_sharers() == 1;
  static_assert(C.warps == 8 && C.chunk == C.unit());
  static_assert(!C.whole_dq || (!C.scored() && !C.writes_scores), "turns are of units");
  static_assert(!C.by_pieces || (!C.scored() && C.key_sharers() == 1), "dV begins before P is handed over");
  static_assert(!C.scored() || C.copy != Copy::tma, "products that nobody wants say nothing of what is read");

  /// What of dQ waits to be added; null: nothing.
  struct Pending {
    typename Parts::Q::Gradient dq;
    float* to = nullptr;

    CUTE_DEVICE void add() {
      if (to != nullptr) Parts::add_to_sums_of(to, dq);
      to = nullptr;
    }
  };

  using QueryPipe = TilePipeline<Layout::kQStages, C.copy>;
  using Position = typename QueryPipe::Position;

  int const steps;                                       ///< of all heads
  QueryPipe const query_pipe;                            ///< units of Q and dO
  TilePipeline<Layout::kScoresUnits> const scores_pipe;  ///< units: P, which warps of B await by pairs; dS to dQ

  CUTE_DEVICE TwoGroupWalk(BackwardParams const& p, char* smem, int steps, int warp)
      : Parts(p, smem, warp),
        steps(steps),
        query_pipe{barriers() + Barriers::kQueries},
        scores_pipe{barriers() + Barriers::kScores} {}

  /// Brings the block's keys; returns V of this warp's, or K.
  CUTE_DEVICE void start(Values& values) const {
    if (threadIdx.x == 0) {
      query_pipe.init(kThreads, C.threads());
      scores_pipe.init(kThreads, kThreads);
      for (int i = 0; i < 4 * Layout::kScoresUnits; ++i)
        mbarrier_init(barriers() + Barriers::kProbabilities + 8 * i, 32);
    }
    this->load_keys(params.k, params.k_stride, 0, params.head_dim);
    this->load_keys(params.v, params.v_stride, Layout::kV, params.head_dim_v);
    cute::cp_async_wait<0>();
    __syncthreads();
    this->keep_values(values, C.kept_key_steps > 0 && thread_id() < kThreads ? 0 : Layout::kV);
    if constexpr (C.copy == Copy::tma) cute::tma_store_fence();
    __syncthreads();  // where V stood, Q and dO come
  }

  /// Group A: dV, and what the block adds to dQ.
  CUTE_DEVICE void run_a([[maybe_unused]] Values const& keys, Gradient& dv) const {
    QueryCursor at = this->first(place().walk), before = at;
    [[maybe_unused]] cute::conditional_t<C.adds_late(), Pending, std::nullptr_t> pending{};
    Position unit_at;
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      bool const masked = this->is_masked(at);
      auto const run_half = [&](int half) FMHA_INLINE {
        int const unit = 2 * step + half;
        uint32_t const q = q_at(unit_at), terms = terms_of(unit_at);
        query_pipe.consumer_wait(unit_at);
        typename Piece::Scores scores[kPieces];
        typename Piece::Probabilities probabilities[kPieces];
        auto const multiply_keys = [&](int i) FMHA_INLINE {
          cute::clear(scores[i]);
          this->template add_scores<Piece>(
              [&](int i, auto&& k) FMHA_INLINE {
                if (i < C.kept_key_steps) {
                  cute::copy(keys(cute::_, cute::_, i), k);
                } else {
                  this->read_keys(0, i, k);
                }
              },
              q, i * Piece::kKeySteps, scores[i]);
        };
        auto const add_values = [&](int i, auto const& factors) FMHA_INLINE {
          this->add_queries(factors, q + Layout::kQTile, i * Piece::kKeySteps, dv);
        };
        multiply_keys(0);
        if constexpr (C.adds_late()) pending.add();
        CUTE_UNROLL
        for (int i = 0; i < kPieces; ++i) {
          int const begin = half * kUnit + i * Piece::kQueries;
          if (i + 1 < kPieces) multiply_keys(i + 1);
          if constexpr (C.scored()) {
            typename Unit::Probabilities factors;
            this->template score<Unit>(masked, scores[i], probabilities[i], factors, terms, at,
                                       at.tile * C.tile_m + begin);
            scores_pipe.producer_acquire(unit);
            hand_over(step, begin / 16, factors);
          } else {
            if (i > 0) add_values(i - 1, probabilities[i - 1]);
            this->template exponentiate<Piece>(masked, scores[i], probabilities[i],
                                               this->lse_of(terms, i * Piece::kQueries), at.tile * C.tile_m + begin);
          }
        }
        if constexpr (!C.scored()) {
          scores_pipe.producer_acquire(unit);
          CUTE_UNROLL
          for (int i = 0; i < kPieces; ++i) {
            hand_over(step, half * Unit::kKeySteps + i * Piece::kKeySteps, probabilities[i]);
          }
        }
        decltype(auto) of_sharers = share(probabilities[kPieces - 1], [&](int m, int i, auto&& p) FMHA_INLINE {
          read_probabilities(neighbour(), m, half * Unit::kKeySteps + i, scores_at(step), p);
        });
        mbarrier_arrive(probabilities_barrier(step, half, neighbour()));  // its place is free for dS
        if (!C.scored() || params.dv != nullptr) add_values(kPieces - 1, of_sharers);
        query_pipe.consumer_release(unit_at, made_of(dv));
        unit_at = unit_at.next();
        if constexpr (C.whole_dq) {
          if (half == 1 && step > 0) finish_tile(step - 1, before);
        } else if constexpr (!kWritesAtOnce) {
          if (unit > 0) finish(unit - 1, half == 0 ? before : at, pending);
        }
      };
      if constexpr (kWritesAtOnce) {
        // Products of the next half that begin among those of this one take registers that are not there.
        CUTE_NO_UNROLL
        for (int half = 0; half < 2; ++half) run_half(half);
      } else {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) run_half(half);
      }
      before = at;
      at = this->after(at, place().walk);
    }
    if constexpr (C.whole_dq) {
      finish_tile(steps - 1, before);
    } else if constexpr (!kWritesAtOnce) {
      if constexpr (C.adds_late()) pending.add();
      finish(2 * steps - 1, before, pending);
      if constexpr (C.adds_late()) pending.add();
    }
  }

  /// Group B: dK.
  CUTE_DEVICE void run_b(Values const& values, Gradient& dk) const {
    QueryCursor at = this->first(place().walk), here = at;
    load(0, {0, 1}, at);
    load(1, {1, 1}, at);
    if (steps > 1) load(0, {2, 1}, this->after(at, place().walk));
    Position unit_at;
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      here = at;
      at = this->after(at, place().walk);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const unit = 2 * step + half, begin = half * kUnit;
        uint32_t const q = q_at(unit_at);
        // Of the next tile, where the last unit was: all warps have read that, or nearly.
        if (unit > 0 && step + 1 < steps) load(half, unit_at.before(), at);
        typename Unit::Scores scores;
        typename Unit::Probabilities probabilities;
        query_pipe.consumer_wait(unit_at);
        auto const of_unit = this->template scored_chunk<Unit>(here, here.tile * C.tile_m + begin);
        uint32_t const d = this->minus_d_of(terms_of(unit_at), 0);
        auto const minus_d = [&](int pair) { return this->terms_at(d, pair); };
        if constexpr (C.scored()) {
          of_unit.start(scores, minus_d);
        } else {
          this->template start_with_d<Unit>(scores, d);
        }
        this->template add_scores<Unit>([&](int i, auto&& v)
                                            FMHA_INLINE { cute::copy(values(cute::_, cute::_, i), v); },
                                        q + Layout::kQTile, 0, scores);
        mbarrier_wait(probabilities_barrier(step, half, warp), step / Layout::kScoresTiles & 1);
        take_over(step, begin / 16, probabilities);
        if constexpr (C.scored()) {
          of_unit.differentiate(probabilities, scores, minus_d);
        } else {
          this->template differentiate<Unit>(probabilities, scores);
        }
        if constexpr (kWritesAtOnce) {
          this->template write_scores<Unit>(step, begin / 8, probabilities);
        } else {
          __syncwarp();  // all lanes have their P: dS may take its place
          this->template store_scores<Unit>(begin / 16, probabilities, scores_at(step));
        }
        decltype(auto) of_sharers = share(probabilities, [&](int m, int i, auto&& ds) FMHA_INLINE {
          this->read_scores(neighbour(), m, begin / 16 + i, scores_at(step), ds);
        });
        kWritesAtOnce ? scores_pipe.consumer_release(unit) : scores_pipe.producer_commit(unit);
        if (!C.scored() || params.dk != nullptr) this->add_queries(of_sharers, q, 0, dk);
        query_pipe.consumer_release(unit_at, made_of(dk));
        unit_at = unit_at.next();
      }
    }
  }

 private:
  /// The warp with which this one divides gradients, or this one itself.
  CUTE_DEVICE int neighbour() const { return warp ^ (C.key_sharers() - 1); }
  /// P or dS of all keys of whose gradient this warp has a part: `own`, and what its neighbour has stored by now, which
  /// read(m, step, fragment) brings.
  template <class Own, class Read>
  CUTE_DEVICE decltype(auto) share(Own const& own, [[maybe_unused]] Read const& read) const {
    if constexpr (C.key_sharers() == 1) {
      return own;
    } else {
      constexpr int kRowSteps = Unit::kRowSteps, kSteps = cute::size<2>(Own{});
      OperandA<KeyGradientTypes<C>, kSteps> all;
      named_barrier_sync(1 + thread_id() / 64, 64);
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        CUTE_UNROLL
        for (int m = 0; m < kRowSteps; ++m) {
          // By words: ptxas takes elements apart.
          cute::copy(cute::recast<uint32_t>(own(cute::_, m, step)), cute::recast<uint32_t>(all(cute::_, m, step)));
          read(m, step, all(cute::_, kRowSteps + m, step));
        }
      }
      return all;
    }
  }
  /// Where a unit of Q is, and dO behind it.
  CUTE_DEVICE static uint32_t q_at(Position unit) { return Layout::kQ + unit.stage * Layout::kUnitBytes; }
  CUTE_DEVICE static uint32_t terms_of(Position unit) { return Layout::kRowTerms + unit.stage * Layout::kTerms; }
  /// Where a step's P and dS are.
  CUTE_DEVICE static uint32_t scores_at(int step) {
    return Layout::kScores + (C.whole_dq ? step % 2 * Layout::kScoresTile : 0);
  }
  CUTE_DEVICE uint32_t probabilities_barrier(int step, int half, int warp) const {
    int const unit = C.whole_dq ? step % 2 * 2 + half : half;
    return barriers() + Barriers::kProbabilities + 8 * (Layout::kScoresUnits * warp + unit);
  }
  /// dQ of a unit, whose tile is `at`.
  template <class Late = std::nullptr_t>
  CUTE_DEVICE void finish(int unit, QueryCursor const& at, [[maybe_unused]] Late&& late = {}) const {
    scores_pipe.consumer_wait(unit);
    if constexpr (C.writes_scores) {
      copy_scores(unit / 2, unit % 2 * kUnit);
      scores_pipe.consumer_release(unit);
      return;
    }
    if (place().sums == nullptr) {
      scores_pipe.consumer_release(unit);
      return;
    }
    auto const make = [&](int row) FMHA_INLINE {
      auto const release = [&] { scores_pipe.consumer_release(unit); };
      if constexpr (requires { late.dq; }) {
        late.to = this->multiply_query_gradient(at, row, release, Layout::kScores, late.dq);
      } else {
        this->add_query_gradient(at, row, release);
      }
    };
    // Where it lies in its tile is known to the compiler by who calls.
    if (unit % 2 == 0) {
      make(0);
    } else {
      make(kUnit);
    }
  }

  /// dQ of a step's tile, which is `at`.
  CUTE_DEVICE void finish_tile(int step, QueryCursor const& at) const {
    auto const release = [&] {
      scores_pipe.consumer_release(2 * step);
      scores_pipe.consumer_release(2 * step + 1);
    };
    scores_pipe.consumer_wait(2 * step);
    scores_pipe.consumer_wait(2 * step + 1);
    if (place().sums == nullptr) {
      release();
    } else {
      this->add_query_gradient(at, 0, release, scores_at(step));
    }
  }

  /// dS of a unit, which begins with query `row` of a step's tile, to memory.
  CUTE_DEVICE void copy_scores(int step, int row) const {
    constexpr int kEights = kUnit / 8;
    auto* const tile = reinterpret_cast<uint16_t*>(place().sums) + int64_t(step) * (C.tile_m * C.tile_n);
    CUTE_UNROLL
    for (int first = 0; first < C.tile_n * kEights; first += kThreads) {
      int const i = first + threadIdx.x % kThreads, keys = i / (8 * kEights), queries = row / 8 + i / 8 % kEights;
      *reinterpret_cast<uint4*>(tile + scores_matrix(C.tile_m, keys, queries) + i % 8 * 8) =
          *reinterpret_cast<uint4 const*>(smem + Layout::kScores +
                                          ScoresTile::lane_offset(8 * keys + i % 8, 8 * queries));
    }
  }

  template <class Probabilities>
  CUTE_DEVICE void hand_over(int step, int column_step, Probabilities const& probabilities) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(probabilities); ++i) {
      CUTE_UNROLL
      for (int m = 0; m < Unit::kRowSteps; ++m) {
        auto const words = cute::recast<uint32_t>(probabilities(cute::_, m, i));
        *reinterpret_cast<uint4*>(smem + this->scores_offset(warp, m, column_step + i, scores_at(step))) = {
            words(0), words(1), words(2), words(3)};
      }
    }
  }
  CUTE_DEVICE void take_over(int step, int column_step, typename Unit::Probabilities& probabilities) const {
    CUTE_UNROLL
    for (int i = 0; i < Unit::kKeySteps; ++i) {
      CUTE_UNROLL
      for (int m = 0; m < Unit::kRowSteps; ++m)
        read_probabilities(warp, m, column_step + i, scores_at(step), probabilities(cute::_, m, i));
    }
  }
  /// What a warp of A handed over.
  template <class Fragment>
  CUTE_DEVICE void read_probabilities(int warp, int m, int column_step, uint32_t tile, Fragment&& fragment) const {
    uint4 const from = *reinterpret_cast<uint4 const*>(smem + this->scores_offset(warp, m, column_step, tile));
    auto words = cute::recast<uint32_t>(fragment);
    words(0) = from.x, words(1) = from.y, words(2) = from.z, words(3) = from.w;
  }

  /// Asks for half of the tile `at`, to where `last` was before.
  CUTE_DEVICE void load(int half, Position last, QueryCursor const& at) const {
    int const row = half * kUnit;
    uint32_t const q = q_at(last), dout = q + Layout::kQTile, terms = terms_of(last);
    if constexpr (C.copy == Copy::tma) {
      if (this->comes_by_tma(at)) {
        if (warp != 0) return;
        query_pipe.producer_acquire_after(last);
        if (cute::elect_one_sync()) {
          int const barrier = Barriers::kQueries + query_pipe.full_offset(last);
          this->request_queries(this->maps().q_map, barrier, at, row, q);
          this->request_queries(this->maps().dout_map, barrier, at, row, dout);
          query_pipe.producer_commit(last, kThreads - 32 - 2);
        }
        this->template load_terms<kThreads>(at, row, terms);
        query_pipe.producer_commit_cp_async(last);
        return;
      }
    }
    query_pipe.producer_acquire_after(last);
    this->template load_queries<kThreads>(place().q, params.q_stride, at, row, q, params.head_dim);
    this->template load_queries<kThreads>(place().dout, params.dout_stride, at, row, dout, params.head_dim_v);
    this->template load_terms<kThreads>(at, row, terms);
    query_pipe.producer_commit_cp_async(last);
  }
};

}  // namespace cutlass_fmha
