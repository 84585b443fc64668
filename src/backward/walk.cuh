// One thread block's walk over the queries that see its keys, with warp-level mma (m16n8k16).
//
// Each warp owns some keys: V in registers, dK and dV too. A step takes tile_m queries, `chunk` of them at a time:
// S^T = K Q^T becomes P^T, dP^T = V dO^T becomes dS^T, and both are operands of dV and dK without leaving registers. dS
// also goes to shared memory, where all warps meet: dQ += dS K is a product over all keys of the block. Or it goes to
// memory, and warps only meet for what they read.
#pragma once

#include "parts.cuh"

namespace cutlass_fmha {

template <BackwardConfig C>
struct BackwardWalk : BackwardParts<C> {
  using Parts = BackwardParts<C>;
  using T = typename Parts::template Types<C.chunk>;
  using typename Parts::Gradient;
  using typename Parts::Layout;
  using typename Parts::QTile;
  using typename Parts::Values;
  using Barriers = OneGroupBarriers;
  using Parts::barriers, Parts::params, Parts::place, Parts::smem, Parts::warp;
  static constexpr int kChunks = C.tile_m / C.chunk;
  /// Scored ones are long: the instruction cache has to hold what a step executes.
  static constexpr int kUnrolledChunks = C.scored() ? 1 : kChunks;
  // What ptxas spills unless a step finds it anew: what is known of the walk, and where lanes read. With it, others
  // spill.
  static constexpr bool kReadsWalk = C.arch != 120 || C.head_dim != 128 || C.writes_scores || C.scored();
  static constexpr bool kFindsLanes = (C.arch == 120 ? C.keys_per_warp() == 32 : C.head_dim == 128) || C.scored();

  QueryWalk const walk;
  int const steps;  ///< of all heads
  TilePipeline<2, C.copy> const q_pipe;
  TilePipeline<C.writes_scores ? 2 : 1, C.copy> const dout_pipe;
  TilePipeline<1> const scores_pipe;

  CUTE_DEVICE BackwardWalk(BackwardParams const& p, char* smem, int steps, int warp)
      : Parts(p, smem, warp),
        walk(place().walk),
        steps(steps),
        q_pipe{barriers() + Barriers::kQ},
        dout_pipe{barriers() + Barriers::kDout},
        scores_pipe{barriers() + Barriers::kScores} {}

  /// The sums of all that the block's queries say of dK, without the scale, and dV.
  CUTE_DEVICE void run(Gradient& dk, Gradient& dv) {
    if (threadIdx.x == 0) {
      q_pipe.init(C.threads(), C.threads());
      dout_pipe.init(C.threads(), C.threads());
      if constexpr (!C.writes_scores) scores_pipe.init(C.threads(), C.threads());
      if constexpr (C.copy == Copy::tma) cutlass::arch::fence_barrier_init();  // the copy unit completes them
    }
    QueryCursor at = this->first(walk);
    this->load_keys(params.k, params.k_stride, 0, params.head_dim);
    this->load_keys(params.v, params.v_stride, Layout::kV, params.head_dim_v);
    cute::cp_async_fence();
    __syncthreads();  // the barriers exist
    load_q(0, at);
    cute::cp_async_wait<0>();
    __syncthreads();
    Values values;
    this->keep_values(values);
    if constexpr (C.copy == Copy::tma) cute::tma_store_fence();
    __syncthreads();  // where V stood, dO comes
    load_dout(0, at);
    CUTE_NO_UNROLL
    for (int step = 0; step < all_steps(); ++step) {
      if constexpr (kFindsLanes) this->find_lanes();
      bool const masked = this->is_masked(at);
      q_pipe.consumer_wait(step);
      uint32_t const q_tile = Layout::kQ + q_pipe.stage(step) * Layout::kQTile;
      uint32_t const terms = Layout::kRowTerms + q_pipe.stage(step) * Layout::kTerms;
#pragma unroll(kUnrolledChunks)
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        typename T::Scores scores;
        typename T::Probabilities probabilities;
        int const begin = chunk * C.chunk;
        uint32_t const lse = this->lse_of(terms, begin);
        cute::clear(scores);
        this->template add_scores<T>([&](int i, auto&& k) FMHA_INLINE { this->read_keys(0, i, k); }, q_tile, begin / 16,
                                     scores);
        auto const values_of = [&](int i, auto&& v) FMHA_INLINE { cute::copy(values(cute::_, cute::_, i), v); };
        if constexpr (C.scored()) {
          typename T::Probabilities factors;
          this->template score<T>(masked, scores, probabilities, factors, lse, at, at.tile * C.tile_m + begin);
          if (chunk == 0) dout_pipe.consumer_wait(step);
          if (params.dv != nullptr) this->add_queries(probabilities, dout_tile(step), begin / 16, dv);
          auto const of_chunk = this->template scored_chunk<T>(at, at.tile * C.tile_m + begin);
          auto const start = [&](int pair) { return this->terms_at(this->minus_d_of(terms, begin), pair); };
          of_chunk.start(scores, start);
          this->template add_scores<T>(values_of, dout_tile(step), begin / 16, scores);
          of_chunk.differentiate(factors, scores, start);
          cute::copy(factors, probabilities);
        } else {
          this->template exponentiate<T>(masked, scores, probabilities, lse, at.tile * C.tile_m + begin);
          if (chunk == 0) dout_pipe.consumer_wait(step);
          this->template start_with_d<T>(scores, this->minus_d_of(terms, begin));
          this->template add_scores<T>(values_of, dout_tile(step), begin / 16, scores);
          this->add_queries(probabilities, dout_tile(step), begin / 16, dv);
          this->template differentiate<T>(probabilities, scores);
        }
        if constexpr (C.writes_scores) {
          this->template write_scores<T>(step, begin / 8, probabilities);
        } else {
          if (chunk == 0) scores_pipe.producer_acquire(step);
          this->template store_scores<T>(begin / 16, probabilities);
          if (chunk == kChunks - 1) scores_pipe.producer_commit(step);
        }
        if (chunk == kChunks - 1) dout_pipe.consumer_release(step, C.scored() ? made_of(scores) : made_of(dv));
        if (chunk == 0 && step + 1 < all_steps()) {
          load_q(step + 1, next(at));
          if constexpr (C.writes_scores) load_dout(step + 1, next(at));
        }
        if (!C.scored() || params.dk != nullptr) this->add_queries(probabilities, q_tile, begin / 16, dk);
      }
      q_pipe.consumer_release(step, made_of(dk));
      if constexpr (!C.writes_scores) {
        scores_pipe.consumer_wait(step);
        if (step + 1 < all_steps()) load_dout(step + 1, next(at));
        if (place().sums != nullptr) {
          this->add_query_gradient(at, 0, [&] { scores_pipe.consumer_release(step); });
        } else {
          scores_pipe.consumer_release(step);
        }
      }
      at = next(at);
    }
  }

 private:
  CUTE_DEVICE int all_steps() const { return kReadsWalk ? place().steps : steps; }
  CUTE_DEVICE uint32_t dout_tile(int step) const { return Layout::kDout + dout_pipe.stage(step) * Layout::kQTile; }
  CUTE_DEVICE QueryCursor next(QueryCursor const& at) const {
    return this->after(at, kReadsWalk ? place().walk : walk);
  }

  /// Q and the terms of its rows, for a step.
  CUTE_DEVICE void load_q(int step, QueryCursor const& at) const {
    if constexpr (C.copy == Copy::tma) {
      if (this->comes_by_tma(at)) {
        if (warp != 0) return;
        q_pipe.producer_acquire(step);
        if (cute::elect_one_sync()) {
          this->request_queries(this->maps().q_map, Barriers::kQ + q_pipe.full_offset(step), at, 0,
                                Layout::kQ + q_pipe.stage(step) * Layout::kQTile);
          q_pipe.producer_commit(step, C.threads() - 32 - 1);
        }
        this->template load_terms<C.threads()>(at, 0, Layout::kRowTerms + q_pipe.stage(step) * Layout::kTerms);
        q_pipe.producer_commit_cp_async(step);
        return;
      }
    }
    q_pipe.producer_acquire(step);
    this->template load_queries<C.threads()>(place().q, params.q_stride, at, 0,
                                             Layout::kQ + q_pipe.stage(step) * Layout::kQTile, params.head_dim);
    this->template load_terms<C.threads()>(at, 0, Layout::kRowTerms + q_pipe.stage(step) * Layout::kTerms);
    q_pipe.producer_commit_cp_async(step);
  }
  CUTE_DEVICE void load_dout(int step, QueryCursor const& at) const {
    if constexpr (C.copy == Copy::tma) {
      if (this->comes_by_tma(at)) {
        if (warp != 0) return;
        dout_pipe.producer_acquire(step);
        if (cute::elect_one_sync()) {
          this->request_queries(this->maps().dout_map, Barriers::kDout + dout_pipe.full_offset(step), at, 0,
                                dout_tile(step));
          dout_pipe.producer_commit(step, C.threads() - 1);
        }
        return;
      }
    }
    dout_pipe.producer_acquire(step);
    this->template load_queries<C.threads()>(place().dout, params.dout_stride, at, 0, dout_tile(step),
                                             params.head_dim_v);
    dout_pipe.producer_commit_cp_async(step);
  }
};

}  // namespace cutlass_fmha
