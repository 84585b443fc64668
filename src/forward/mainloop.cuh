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

/// What a warp asks for in every phase, computed once.
struct WarpConstants {
  uint32_t q_begin;  ///< byte offset of its rows in the tile of Q
  int masked_end;    ///< from this phase on, every row sees all keys of a block
};

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, which tile this is, what warps and lanes
/// read anew before each turn.
template <ForwardConfig C>
struct SharedLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * 2;
  static constexpr int kTile = C.tile_n * C.head_dim * 2;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kTile;
  static constexpr int kBarriers = kVOffset + C.stages * kTile;
  static constexpr int kTileBegin = kBarriers + 2 * KvPipeline<C>::kBytes;
  static constexpr int kMaxima = kTileBegin + int(sizeof(TilePosition));
  static constexpr int kLanes = (kMaxima + C.tile_m * int(sizeof(float)) + 7) / 8 * 8;
  static constexpr int kWarps = kLanes + 32 * int(sizeof(uint2));
  static constexpr int kBytes = kWarps + C.warps * int(sizeof(WarpConstants));
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
  /// Whether what a warp asks for in every phase stays in registers. From sm_90 on these are uniform ones; sm_89 takes
  /// others, of which the largest O (128 of them) leaves none.
  static constexpr bool kKeepsConstants = C.arch >= 90 || kRoomy || C.rows_per_warp() * C.head_dim < 32 * 128;
  using KvLoader = TileLoader<C.head_dim, C.tile_n, kHalfThreads, C.copy>;
  using Turn = Turns<C.warps, C.ping_pong>;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m>;
  static constexpr uint32_t kQRowBytes = 2 * QTile::P::kWidth;
  using KvTile = LdmatrixTile<C.head_dim, C.tile_n>;
  // The A operand of one 16-wide step over all rows of the warp, and of Q or P as a whole.
  using StepA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>>{}));
  template <int Steps>
  using OperandA = decltype(cute::make_tensor<Element>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>, cute::Int<Steps>>{}));

  ForwardParams const& params;
  char* const smem;
  // The same for all lanes. Asked for by tile_row(), second_group() and constants(), which know another way where
  // registers are scarce.
  int const warp_tile_row;
  bool const in_second_group;
  int masked_end;

  int const blocks;  ///< key blocks that the thread block walks
  int first_phase;   ///< before it, no key is visible to this warp

  KvPipeline<C> const k_pipe, v_pipe;
  // Lane offsets of ldmatrix. b0 and b1 of an n8 tile must be neighbouring registers: K's four 8 x 8 matrices are read
  // dimensions first, V's (transposed) keys first, like the rows of Q.
  uint32_t const qv_lane_offset, k_lane_offset;
  KvLoader loader;  ///< of V in the first group, of K in the second; points at the next block to bring

  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  template <int Count>
  using OperandsB =
      decltype(cute::make_tensor<Element>(cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::_2, cute::Int<Count>>{}));
  using Probabilities = OperandA<T::kKeySteps>;
  using QFragments = OperandA<C.q_in_registers ? T::kDimSteps : 1>;

  // n16 operands that are read ahead, so that no mma of a turn waits for them: of V before the turn, of Q K^T while the
  // last of P V are multiplied. Without turns it only delays what is needed.
  static constexpr int kAhead = C.ping_pong && C.head_dim >= 64 ? 2 : 0;

  /// Where a lane reads, computed before a turn.
  struct Lanes {
    uint32_t q, k, v;
  };
  struct FirstOperands {
    StepA q;
    OperandsB<kAhead + 1> k;
  };

  /// The first row of a warp within the tile of Q. The second half of the warps takes its rows backwards: under a
  /// diagonal, the two warps of a sub-core (w and w + warps / 2) then have as many keys together as any other two.
  CUTE_DEVICE static int tile_row_of(int warp) {
    return (warp < C.warps / 2 ? warp : C.warps + C.warps / 2 - 1 - warp) * T::kRows;
  }

  /// That of this warp.
  CUTE_DEVICE int tile_row() const { return kKeepsConstants ? warp_tile_row : tile_row_of(thread_id() / 32); }

  /// Whether this warp is one of the second half. After a vote the compiler knows that all lanes agree: phases stay
  /// uniform, and nothing needs to converge.
  CUTE_DEVICE bool second_group() const {
    return kKeepsConstants ? in_second_group : __any_sync(0xffffffffu, thread_id() >= kHalfThreads);
  }

  CUTE_DEVICE WarpConstants constants() const {
    if constexpr (kKeepsConstants) {
      return {warp_tile_row * kQRowBytes, masked_end};
    } else {
      return reinterpret_cast<WarpConstants const*>(smem + Shared::kWarps)[thread_id() / 32];
    }
  }

  /// What shared memory holds before anything is copied there.
  CUTE_DEVICE void init_shared() const {
    if (threadIdx.x == 0) {
      k_pipe.init(kHalfThreads, C.threads());
      v_pipe.init(kHalfThreads, C.threads());
    }
    if (threadIdx.x < 32) {
      reinterpret_cast<uint2*>(smem + Shared::kLanes)[threadIdx.x] = {qv_lane_offset, k_lane_offset};
    }
    if (!kKeepsConstants && lane_id() == 0) {
      auto* const table = reinterpret_cast<WarpConstants*>(smem + Shared::kWarps);
      table[threadIdx.x / 32] = {tile_row() * kQRowBytes, masked_end};
    }
  }

  /// Starts the first loads of K and V. Only the last block of the keys, walked first, can be a partial one.
  CUTE_DEVICE void prologue() {
    loader.source += int64_t(blocks - 1) * C.tile_n * (second_group() ? params.k_stride : params.v_stride).seqlen;
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
      for (int step = 0; step < T::kDimSteps; ++step) {
        load_q(qv_lane_offset + constants().q_begin, step, q_fragments(cute::_, cute::_, step));
      }
    }
    if (second_group()) Turn::pass();  // lets the first group enter
    int phase = 0;
    for (; phase < first_phase; ++phase) skip(phase);
    if (phase < blocks) {
      before_turn(phase);
      Lanes const lanes = this_lane();
      FirstOperands first;
      Turn::take();
      if (phase > 0) release_unused(v_pipe, phase - 1);
      read_ahead(phase, lanes, first);
      bool const masked = compute_scores<Masked::ask>(phase, lanes, first, q_fragments, scores);
      end_scores(phase);
      update<true>(phase, masked, scores, probabilities, output, softmax);
      ++phase;
      if constexpr (kRoomy) {
        CUTE_NO_UNROLL
        for (; phase < constants().masked_end; ++phase) {
          advance<Masked::yes>(phase, q_fragments, scores, probabilities, output, softmax);
        }
      }
      CUTE_NO_UNROLL
      for (; phase < blocks; ++phase) {
        advance<kRoomy ? Masked::no : Masked::ask>(phase, q_fragments, scores, probabilities, output, softmax);
      }
      finish(phase, probabilities, output);
    } else {
      before_turn(phase);
      Turn::take();
    }
    if (!second_group()) Turn::pass();  // nobody waits for the second group any more
  }

 private:
  /// A phase after the first.
  template <Masked Mask>
  CUTE_DEVICE void advance(int phase, QFragments const& q_fragments, Scores& scores, Probabilities& probabilities,
                           Output& output, typename T::Softmax& softmax) {
    before_turn(phase);
    Lanes const lanes = this_lane();
    OperandsB<kAhead + 1> ahead;
    FirstOperands first;
    read_ahead(phase - 1, lanes, ahead);
    Turn::take();
    accumulate(phase - 1, lanes, ahead, probabilities, output, [&] { read_ahead(phase, lanes, first); });
    bool const masked = compute_scores<Mask>(phase, lanes, first, q_fragments, scores);
    end_scores(phase);
    update<false>(phase, masked, scores, probabilities, output, softmax);
  }

  /// What is left after the last phase.
  CUTE_DEVICE void finish(int phase, Probabilities const& probabilities, Output& output) {
    before_turn(phase);
    Lanes const lanes = this_lane();
    OperandsB<kAhead + 1> ahead;
    read_ahead(phase - 1, lanes, ahead);
    Turn::take();
    accumulate(phase - 1, lanes, ahead, probabilities, output, [] {});
  }

  /// Brings a tile of K or V, the next one in the walk of the thread's group, if there is one.
  template <bool Partial>
  CUTE_DEVICE void refill(KvPipeline<C> const& pipe, int ring, int64_t row_stride, int tile) {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    loader.template load<Partial>(smem + ring + pipe.stage(tile) * Shared::kTile, row_stride,
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
    if (second_group()) refill<Partial>(k_pipe, Shared::kKOffset, params.k_stride.seqlen, tile);
  }
  template <bool Partial>
  CUTE_DEVICE void refill_v(int tile) {
    if (!second_group()) refill<Partial>(v_pipe, Shared::kVOffset, params.v_stride.seqlen, tile);
  }

  // A stage of K is free once this phase's scores are done; one of V, after the accumulation of the phase before.
  CUTE_DEVICE void end_scores(int phase) { refill_k<false>(phase + C.stages); }
  CUTE_DEVICE void before_turn(int phase) {
    if (phase >= 2) refill_v<false>(phase - 2 + C.stages);
  }

  template <class Pipeline>
  CUTE_DEVICE void release_unused(Pipeline const& pipe, int tile) const {
    pipe.consumer_wait(tile);
    pipe.consumer_release(tile);
  }

  CUTE_DEVICE void skip(int phase) {
    before_turn(phase);
    Turn::take();
    if (phase > 0) release_unused(v_pipe, phase - 1);
    release_unused(k_pipe, phase);
    Turn::pass();
    end_scores(phase);
  }

  /// Where registers are scarce, they hold this for the length of a turn only: read anew before each.
  CUTE_DEVICE Lanes this_lane() const {
    uint32_t const q = C.q_in_registers ? 0 : constants().q_begin;
    if constexpr (kRoomy || kAhead == 0) {
      return {qv_lane_offset + q, k_lane_offset, qv_lane_offset};
    } else {
      uint2 const offsets = reinterpret_cast<uint2 const*>(smem + Shared::kLanes)[lane_id()];
      return {offsets.x + q, offsets.y, offsets.x};
    }
  }

  template <class Fragment>
  CUTE_DEVICE void load_q(uint32_t lane, int step, Fragment&& fragment) const {
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_matrix<cute::SM75_U32x4_LDSM_N>(smem, QTile::piece(lane, m, step), fragment(cute::_, m));
    }
  }
  template <class Fragment>
  CUTE_DEVICE void load_k(int phase, uint32_t lane, int step, int n, Fragment&& fragment) const {
    uint32_t const stage = Shared::kKOffset + k_pipe.stage(phase) * Shared::kTile;
    load_matrix<cute::SM75_U32x4_LDSM_N>(smem, stage + KvTile::piece(lane, n, step), fragment);
  }
  template <class Fragment>
  CUTE_DEVICE void load_v(int phase, uint32_t lane, int step, int n, Fragment&& fragment) const {
    uint32_t const stage = Shared::kVOffset + v_pipe.stage(phase) * Shared::kTile;
    load_matrix<cute::SM75_U16x8_LDSM_T>(smem, stage + KvTile::piece(lane, step, n), fragment);
  }

  CUTE_DEVICE void read_ahead(int phase, Lanes const& lanes, OperandsB<kAhead + 1>& ahead) const {
    if (kAhead > 0) v_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int n = 0; n < kAhead; ++n) load_v(phase, lanes.v, 0, n, ahead(cute::_, cute::_, n));
  }
  CUTE_DEVICE void read_ahead(int phase, Lanes const& lanes, FirstOperands& first) const {
    if constexpr (kAhead == 0) return;
    if constexpr (!C.q_in_registers) load_q(lanes.q, 0, first.q);
    k_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int n = 0; n < kAhead; ++n) load_k(phase, lanes.k, 0, n, first.k(cute::_, cute::_, n));
  }

  /// scores = Q K(phase)^T. Returns whether they need a mask: asked during the last step, so that the answer is there
  /// after it. The turn is passed on there too: by the time the other warp's first mma issues, ours are issued.
  template <Masked Mask>
  CUTE_DEVICE bool compute_scores(int phase, Lanes const& lanes, FirstOperands const& first,
                                  QFragments const& q_fragments, Scores& scores) const {
    using namespace cute;
    clear(scores);
    bool masked = Mask == Masked::yes;
    if (kAhead == 0) k_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int step = 0; step < T::kDimSteps; ++step) {
      StepA q;
      if constexpr (C.q_in_registers) {
        copy(q_fragments(_, _, step), q);
      } else if (kAhead > 0 && step == 0) {
        copy(first.q, q);
      } else {
        load_q(lanes.q, step, q);
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        OperandsB<1> k;
        if (step == 0 && n < kAhead) {
          copy(first.k(_, _, n), k(_, _, 0));
        } else {
          load_k(phase, lanes.k, step, n, k(_, _, 0));
        }
        if (step == T::kDimSteps - 1 && n == T::kKeySteps / 2) {
          if constexpr (Mask == Masked::ask) masked = is_masked(phase);
          Turn::pass();
        }
        multiply<T>(q, k(_, _, 0), scores, n);
      }
      repeat_mma_passes<typename T::Mma>(scores);
    }
    k_pipe.consumer_release(phase);
    return masked;
  }

  /// output += P V(phase), P being that of the phase's scores. `between` is called before the last multiplications.
  template <class Between>
  CUTE_DEVICE void accumulate(int phase, Lanes const& lanes, OperandsB<kAhead + 1> const& ahead,
                              Probabilities const& probabilities, Output& output, Between const& between) const {
    using namespace cute;
    if (kAhead == 0) v_pipe.consumer_wait(phase);
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      OperandsB<T::kDimSteps> v;
      bool const last = step == T::kKeySteps - 1;
      if (kAhead > 0 && last) {  // all of it before `between`
        CUTE_UNROLL
        for (int n = 0; n < T::kDimSteps; ++n) load_v(phase, lanes.v, step, n, v(_, _, n));
        v_pipe.consumer_release(phase);
        between();
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kDimSteps; ++n) {
        if (step == 0 && n < kAhead) {
          copy(ahead(_, _, n), v(_, _, n));
        } else if (kAhead == 0 || !last) {
          load_v(phase, lanes.v, step, n, v(_, _, n));
        }
        multiply<T>(probabilities(_, _, step), v(_, _, n), output, n);
      }
      repeat_mma_passes<typename T::Mma>(output);
    }
    if (kAhead == 0) v_pipe.consumer_release(phase);
  }

  CUTE_DEVICE int row_begin() const {
    return reinterpret_cast<TilePosition const*>(smem + Shared::kTileBegin)->row_begin + tile_row();
  }

  /// Whether some row of this warp doesn't see all keys of the phase's block.
  CUTE_DEVICE bool is_masked(int phase) const {
    bool const masked = phase < constants().masked_end;
    return kKeepsConstants ? masked : __any_sync(0xffffffffu, masked);
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
