// The walk of walk.cuh with the work divided between groups of four warps: A has S, P and dV of the block's keys, B has
// dP, dS and dK of the same, and dQ is a third group's, C, or A's where there is none. A warp keeps one gradient
// instead of two, so that it owns twice as many keys, and each B fragment from shared memory feeds twice as many mma.
//
// A unit is half a tile. Q and dO come by units, as C (or B) asks for them; three have room at least, since A is ahead
// of B and another is on its way. Units are handed over: P by a warp of A to its partner in B, in registers' order, at
// the place where dS of the same scores comes afterwards; dS by all of B to dQ, which A computes a unit late. Where dS
// goes to memory, who would make dQ of it copies it there.
//
// Where two neighbours of a group divide the columns of the gradient of both's keys (key_sharers), each finds the
// other's P, or dS, in that place. In A each then tells the other's partner that dS may come there.
#pragma once

#include "parts.cuh"

namespace cutlass_fmha {

template <BackwardConfig C>
struct GroupWalk : BackwardParts<C> {
  using Parts = BackwardParts<C>;
  using typename Parts::Gradient;
  using typename Parts::Layout;
  using typename Parts::QTile;
  using typename Parts::ScoresTile;
  using typename Parts::Values;
  using Barriers = GroupBarriers<Layout::kQStages, Layout::kScoresUnits>;
  using Parts::barriers, Parts::params, Parts::place, Parts::smem, Parts::warp;
  using Unit = typename Parts::template Types<C.unit()>;
  using Chunk = typename Parts::template Types<C.chunk>;  ///< of group B
  static constexpr int kThreads = 32 * C.group_warps();   ///< of a group
  static constexpr int kUnit = C.unit();
  static constexpr bool kThird = C.groups == 3;
  static_assert(C.group_warps() == 4 && (C.chunk == kUnit || C.key_sharers() == 1));
  static_assert(!C.scored() || C.copy != Copy::tma, "products that nobody wants say nothing of what is read");

  using QueryPipe = TilePipeline<Layout::kQStages, C.copy>;
  using Position = typename QueryPipe::Position;

  int const steps;                                       ///< of all heads
  QueryPipe const query_pipe;                            ///< units of Q and dO
  TilePipeline<Layout::kScoresUnits> const scores_pipe;  ///< units: P, which warps of B await by pairs; dS to dQ

  CUTE_DEVICE GroupWalk(BackwardParams const& p, char* smem, int steps, int warp)
      : Parts(p, smem, warp),
        steps(steps),
        query_pipe{barriers() + Barriers::kQueries},
        scores_pipe{barriers() + Barriers::kScores} {}

  /// Brings the block's keys, by all of its threads.
  CUTE_DEVICE void bring() const {
    if (threadIdx.x == 0) {
      query_pipe.init(kThreads, 2 * kThreads);
      scores_pipe.init(kThreads, kThreads);
      for (int i = 0; i < 4 * Layout::kScoresUnits; ++i)
        mbarrier_init(barriers() + Barriers::kProbabilities + 8 * i, 32);
    }
    this->load_keys(params.k, params.k_stride, 0, params.head_dim);
    this->load_keys(params.v, params.v_stride, Layout::kV, params.head_dim_v);
    cute::cp_async_wait<0>();
    if constexpr (C.copy == Copy::tma) cute::tma_store_fence();
    __syncthreads();
  }

  /// Takes or gives up registers, once, by all of a group.
  template <int Group>
  CUTE_DEVICE static void set_registers() {
    // Three threads have 504. B has V beside what A has; C has dQ.
    constexpr int kOfC = cute::size(typename Parts::Q::Gradient{}) > 32 ? 104 : 72;
    constexpr int kOfA = (504 - kOfC - 32) / 2, kOfB = kOfA + 32;
    if constexpr (!kThird) {
    } else if constexpr (Group == 2) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOfC));
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Group == 1 ? kOfB : kOfA));
    }
  }

  /// Group A: dV, and without a third group what the block adds to dQ.
  CUTE_DEVICE void run_a(Gradient& dv) const {
    release_all();
    QueryCursor at = this->first(place().walk), before = at;
    Position unit_at;
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
#pragma unroll(kThird ? 2 : 1)
      for (int half = 0; half < 2; ++half) {
        int const unit = 2 * step + half, begin = half * kUnit;
        uint32_t const q = q_at(unit_at), terms = terms_of(unit_at);
        typename Unit::Scores scores;
        typename Unit::Probabilities probabilities;
        query_pipe.consumer_wait(unit_at);
        cute::clear(scores);
        this->template add_scores<Unit>([&](int i, auto&& k) FMHA_INLINE { this->read_keys(0, i, k); }, q, 0, scores);
        bool const masked = this->is_masked(at);
        if constexpr (C.scored()) {
          typename Unit::Probabilities factors;
          this->template score<Unit>(masked, scores, probabilities, factors, terms, at, at.tile * C.tile_m + begin);
          scores_pipe.producer_acquire(unit);
          hand_over(step, begin / 16, factors);
        } else {
          this->template exponentiate<Unit>(masked, scores, probabilities, this->lse_of(terms, 0),
                                            at.tile * C.tile_m + begin);
          scores_pipe.producer_acquire(unit);
          hand_over(step, begin / 16, probabilities);
        }
        decltype(auto) of_sharers = share(probabilities, [&](int m, int i, auto&& p) FMHA_INLINE {
          read_probabilities(neighbour(), m, begin / 16 + i, scores_at(step), p);
        });
        mbarrier_arrive(probabilities_barrier(step, half, neighbour()));  // its place is free for dS
        if (!C.scored() || params.dv != nullptr) this->add_queries(of_sharers, q + Layout::kQTile, 0, dv);
        query_pipe.consumer_release(unit_at, made_of(dv));
        unit_at = unit_at.next();
        if (!kThird && unit > 0) finish(unit - 1, before, [] {});
        before = at;
      }
      at = this->after(at, place().walk);
    }
    if (!kThird) finish(2 * steps - 1, before, [] {});
  }

  /// Group B: dK.
  CUTE_DEVICE void run_b(Gradient& dk) const {
    Values values;
    this->keep_values(values);
    if constexpr (C.copy == Copy::tma) cute::tma_store_fence();
    release_all();
    QueryCursor here = this->first(place().walk);
    Next next{here};
    if (!kThird) load_first(next);
    Position unit_at;
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      CUTE_NO_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t const q = q_at(unit_at), terms = terms_of(unit_at);
        // All warps have read the unit before, or nearly.
        if (!kThird && step + half > 0) load_in_place_of(2 * step + half - 1, next);
        query_pipe.consumer_wait(unit_at);
        CUTE_NO_UNROLL
        for (int first = 0; first < kUnit; first += C.chunk) {
          int const row = half * kUnit + first;
          typename Chunk::Scores scores;
          typename Chunk::Probabilities probabilities;
          auto const of_chunk = this->template scored_chunk<Chunk>(here, here.tile * C.tile_m + row);
          uint32_t const d = this->minus_d_of(terms, first);
          auto const minus_d = [&](int pair) { return this->terms_at(d, pair); };
          if constexpr (C.scored()) {
            of_chunk.start(scores, minus_d);
          } else {
            this->template start_with_d<Chunk>(scores, d);
          }
          this->template add_scores<Chunk>([&](int i, auto&& v)
                                               FMHA_INLINE { cute::copy(values(cute::_, cute::_, i), v); },
                                           q + Layout::kQTile, first / 16, scores);
          OperandsB<typename Parts::T, 1> first_of_q;  // on its way while others are waited for
          if constexpr (kThird && C.key_sharers() == 1)
            this->read_columns(q, first / 16, 0, first_of_q(cute::_, cute::_, 0));
          if (first == 0) mbarrier_wait(probabilities_barrier(step, half, warp), step / Layout::kScoresTiles & 1);
          take_over(step, row / 16, probabilities);
          if constexpr (C.scored()) {
            of_chunk.differentiate(probabilities, scores, minus_d);
          } else {
            this->template differentiate<Chunk>(probabilities, scores);
          }
          __syncwarp();  // all lanes have their P: dS may take its place
          this->template store_scores<Chunk>(row / 16, probabilities, scores_at(step));
          decltype(auto) of_sharers = share(probabilities, [&](int m, int i, auto&& ds) FMHA_INLINE {
            this->read_scores(neighbour(), m, row / 16 + i, scores_at(step), ds);
          });
          if (first == kUnit - C.chunk) scores_pipe.producer_commit(2 * step + half);
          if constexpr (kThird && C.key_sharers() == 1) {
            this->add_queries(of_sharers, dk, [&](int step, int n, auto&& b) FMHA_INLINE {
              step + n == 0 ? cute::copy(first_of_q(cute::_, cute::_, 0), b)
                            : this->read_columns(q, first / 16 + step, n, b);
            });
          } else if (!C.scored() || params.dk != nullptr) {
            this->add_queries(of_sharers, q, first / 16, dk);
          }
        }
        query_pipe.consumer_release(unit_at, made_of(dk));
        unit_at = unit_at.next();
      }
      here = this->after(here, place().walk);
    }
  }

  /// Group C: what comes, and what the block adds to dQ.
  CUTE_DEVICE void run_c() const {
    QueryCursor here = this->first(place().walk);
    Next next{here};
    load_first(next);
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      if constexpr (C.whole_dq) {
        // Once dS of both units is there, all have read the first of Q and dO.
        finish(2 * step, here, [&] { load_in_place_of(2 * step, next); });
        load_in_place_of(2 * step + 1, next);
      } else {
        CUTE_NO_UNROLL
        for (int unit = 2 * step; unit < 2 * step + 2; ++unit) {
          finish(unit, here, [] {});
          load_in_place_of(unit, next);
        }
      }
      here = this->after(here, place().walk);
    }
  }

 private:
  /// Units may come: V, which stands in their place, is not read by this thread any more.
  CUTE_DEVICE void release_all() const {
    CUTE_UNROLL
    for (int stage = 0; stage < Layout::kQStages; ++stage) query_pipe.consumer_release(Position{stage});
  }

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
  /// dQ of a unit, or of a tile from that on, which is of the tile `at`; or its dS goes to memory. made() is called
  /// once dS is there.
  template <class Made>
  CUTE_DEVICE void finish(int unit, QueryCursor const& at, Made const& made) const {
    int const row = unit % 2 * kUnit;
    constexpr int kUnits = C.dq_rows() / kUnit;
    CUTE_UNROLL
    for (int i = 0; i < kUnits; ++i) scores_pipe.consumer_wait(unit + i);
    made();
    auto const release = [&] {
      CUTE_UNROLL
      for (int i = 0; i < kUnits; ++i) scores_pipe.consumer_release(unit + i);
    };
    if constexpr (C.writes_scores) {
      copy_scores(unit / 2, row);
      release();
    } else if (place().sums == nullptr) {
      release();
    } else {
      this->add_query_gradient(at, row, release, scores_at(unit / 2));
    }
  }

  /// dS of a unit, which begins with query `row` of a step's tile, to memory.
  CUTE_DEVICE void copy_scores(int step, int row) const {
    constexpr int kEights = kUnit / 8;
    // As far apart as of a whole tile of keys.
    auto* const tile = reinterpret_cast<uint16_t*>(place().sums) + int64_t(step) * (C.tile_m * params.scores_tile_n);
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
    for (int i = 0; i < Unit::kKeySteps; ++i) {
      CUTE_UNROLL
      for (int m = 0; m < Unit::kRowSteps; ++m) {
        auto const words = cute::recast<uint32_t>(probabilities(cute::_, m, i));
        *reinterpret_cast<uint4*>(smem + this->scores_offset(warp, m, column_step + i, scores_at(step))) = {
            words(0), words(1), words(2), words(3)};
      }
    }
  }
  CUTE_DEVICE void take_over(int step, int column_step, typename Chunk::Probabilities& probabilities) const {
    CUTE_UNROLL
    for (int i = 0; i < Chunk::kKeySteps; ++i) {
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

  /// The next unit to be asked for.
  struct Next {
    QueryCursor at;
    Position last{};  ///< in whose place it comes: V's at first, then a unit's
  };
  /// Asks for the units that come in V's place.
  CUTE_DEVICE void load_first(Next& next) const {
    CUTE_NO_UNROLL
    for (int unit = -Layout::kQStages; unit < 0; ++unit) load_in_place_of(unit, next);
  }
  /// Asks for the unit that comes where `unit` was.
  CUTE_DEVICE void load_in_place_of(int unit, Next& next) const {
    int const number = unit + Layout::kQStages;
    if (number >= 2 * place().steps) return;  // read anew: `steps` would be spilled
    load(number % 2, next.last, next.at);
    if (number % 2 == 1) next.at = this->after(next.at, place().walk);
    next.last = next.last.next();
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
