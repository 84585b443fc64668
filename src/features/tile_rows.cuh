// Ranged and score-mod rows: each warp has query rows of its own and walks all their keys, as plain rows do
// (forward/tile_walk.cuh), wherever these stand.
#pragma once

#include "../forward/tile_walk.cuh"
#include "epilogue.cuh"
#include "keys_cp_async.cuh"
#include "keys_tma.cuh"
#include "score_trials.cuh"

namespace cutlass_fmha {

template <ForwardConfig C>
using FeatureKeySource = cute::conditional_t<C.copy == Copy::tma, TmaFeatureKeys<C>, CpAsyncFeatureKeys<C>>;

/// Keys for the walk, what a warp sees of them, and what becomes of their scores, where a row knows that.
template <ForwardConfig C>
struct FeatureKeys : FeatureKeySource<C> {
  using Source = FeatureKeySource<C>;
  using T = ForwardTypes<C>;
  using Shared = FeatureTileLayout<C>;
  using Product = WarpProduct<C>;
  using Turn = Turns<C.warps, C.ping_pong>;
  using Source::p, Source::smem, Source::warp, Source::blocks, Source::last_begin, Source::put_off;
  using Source::place;
  static constexpr bool kEndsEarly = true, kMaskedFirst = false;
  /// Whether a trial pauses for in_softmax(): a long one.
  static constexpr bool kPauses = Source::kBringsInSoftmax && C.tile_n >= 64 && C.head_dim <= 128;
  /// Of masked rows: whether there is room to hide keys where they are read. All by cp.async have none in a bias.
  static constexpr bool hides_first(bool bias) {
    return (C.ping_pong || is_roomy(C)) && (C.copy == Copy::tma || !bias);
  }

  struct Lanes {
    uint32_t q_offset, k_offset, v_offset;

    CUTE_DEVICE uint32_t q() const { return q_offset; }
    CUTE_DEVICE uint32_t k() const { return k_offset; }
    CUTE_DEVICE uint32_t v() const { return v_offset; }
  };

  int first_phase = 0, seen_until = 0;           ///< WarpPhases
  uint32_t const qv_lane_offset, k_lane_offset;  ///< addresses: in a tile that begins where shared memory does
  using VLane = cute::conditional_t<C.reads_masks(), uint32_t, std::nullptr_t>;
  VLane v_lane_offset;  ///< where V's isn't Q's

  CUTE_DEVICE FeatureKeys(FeatureParams const& p, char* smem, int warp, KeyWalk const& walk)
      : Source(p, smem, warp, walk),
        qv_lane_offset(cute::cast_smem_ptr_to_uint(smem) + Product::v_lane(lane_id())),
        k_lane_offset(cute::cast_smem_ptr_to_uint(smem) + k_lane()),
        v_lane_offset{} {
    if constexpr (C.reads_masks()) {
      v_lane_offset =
          cute::cast_smem_ptr_to_uint(smem) + Product::VTile::lane_offset(by_runs(MatrixLane::rows_first(lane_id())));
    }
  }

  /// What shared memory holds before anything is copied there.
  CUTE_DEVICE void init_shared(Sequence const& sequence, FeatureTile const& tile) {
    if (!keeps_lanes(C) && threadIdx.x < 32) {
      auto& lane = reinterpret_cast<typename Shared::Lane*>(smem + Shared::kLanes)[threadIdx.x];
      lane.x = qv_lane_offset, lane.y = k_lane_offset;
      if constexpr (C.reads_masks()) lane.z = v_lane_offset;
    }
    if constexpr (C.reads_masks()) {
      if (threadIdx.x == 0) new (&Shared::masks(smem)) MaskSource(p, sequence, tile, C.element_bytes());
    }
    if constexpr (C.modifies_scores()) {
      for (int row = threadIdx.x; row < C.tile_m && p.alibi_slopes != nullptr; row += C.threads()) {
        *Shared::slopes(smem, row) = alibi_slope(p, tile.batch, query_row(p, tile, tile.row_begin + row).head);
      }
    }
    int const begin = tile.row_begin + tile_row();
    int const i_last = smaller(p.by_pack.quotient(begin + T::kRows - 1), sequence.queries - 1);
    CommonView const view(p, sequence, p.by_pack.quotient(begin), i_last);
    WarpPhases phases(view, begin, blocks, last_begin, C.tile_n);
    phases.q_begin = tile_row() * Product::kQRowBytes;
    first_phase = uniform(phases.first_phase);
    seen_until = uniform(phases.end_phase);
    if (lane_id() == 0) Shared::phases(smem, warp) = phases;
    if constexpr (C.modifies_scores()) {
      float const slope = p.alibi_slopes != nullptr ? alibi_slope(p, tile.batch, tile.head) : 0.f;
      if (lane_id() == 0) Shared::scores(smem, warp) = {slope, begin + sequence.offset, 0, put_off};
    }
  }

  // What the walk asks for.
  CUTE_DEVICE void take() const { Turn::take(warp); }
  CUTE_DEVICE void pass() const { Turn::pass(warp); }
  CUTE_DEVICE void before_turn(int phase) {
    if (phase >= 2 && !brings_in_softmax()) this->refill_v(phase - 2 + C.stages);
  }
  CUTE_DEVICE void in_softmax(int phase) const {
    if constexpr (Source::kBringsInSoftmax) {
      if (phase >= 1 && brings_in_softmax()) this->refill_v(phase - 1 + C.stages);
    }
  }
  CUTE_DEVICE void end_scores(int phase) { this->refill_k(phase + C.stages); }
  CUTE_DEVICE uint32_t q_lane() const { return Product::q_lane(lane_id(), tile_row()); }
  CUTE_DEVICE SharedWindow memory() const { return {}; }
  CUTE_DEVICE Lanes lanes() const {
    uint32_t const q = C.q_in_registers ? 0 : Shared::phases(smem, warp).q_begin;
    if constexpr (keeps_lanes(C)) {
      return {qv_lane_offset + q, k_lane_offset, uint32_t(v_lane(qv_lane_offset, v_lane_offset))};
    } else {
      auto const offsets = reinterpret_cast<typename Shared::Lane const*>(smem + Shared::kLanes)[lane_id()];
      if constexpr (C.reads_masks()) {
        return {offsets.x + q, offsets.y, offsets.z};
      } else {
        return {offsets.x + q, offsets.y, offsets.x};
      }
    }
  }
  CUTE_DEVICE int end_phase() const { return seen_until; }
  /// A branch in the midst of a turn, or of a phase, would hold up its mma. Two blocks of 256 threads branch, which
  /// takes fewer registers: a thread has 128.
  CUTE_DEVICE bool is_masked(int phase) const {
    constexpr bool branches = C.threads() * C.min_blocks >= 512;
    return __any_sync(0xffffffffu, !Shared::phases(smem, warp).template is_full<branches>(phase));
  }
  template <class Scores>
  CUTE_DEVICE void before_softmax(int phase, bool masked, Scores& scores) const {
    if (masked) block_at(phase).hide_by_range(by_row(scores));
  }
  /// Of masked rows: what is read for the scores of a phase, asked for before its turn, and added to them after it.
  template <class Asked>
  CUTE_DEVICE void ask_for_masks(int phase, Asked& asked) const {
    WarpPhases const& phases = Shared::phases(smem, warp);
    asked.ask(p, Shared::masks(smem), tile_row(), phases.last_begin - phase * C.tile_n);
  }
  template <class Asked, class Scores>
  CUTE_DEVICE void before_softmax(int phase, bool masked, Asked& asked, Scores& scores) const {
    asked.apply(p, by_row(scores), masked && hides_first(Asked::kBias),
                [&](int row) { return block_at(phase).visible(row); });
    if constexpr (!hides_first(Asked::kBias)) {
      __syncwarp();
      before_softmax(phase, masked, scores);
    }
  }
  /// Of rows that modify scores, in place of before_softmax.
  template <Modifier M>
  CUTE_DEVICE ScoreTerms<C, FeatureKeys, M> terms(int phase, bool masked, ModifiedBy<M>) const {
    return {*this, phase, masked};
  }
  CUTE_DEVICE RowMaxima maxima() const { return Shared::maxima(smem, tile_row()); }

  /// This warp's first row within the tile.
  CUTE_DEVICE int tile_row() const { return tile_row_of<C>(warp); }

  /// In which order ldmatrix takes keys.
  CUTE_DEVICE static MatrixLane by_runs(MatrixLane at) {
    return {C.reads_masks() ? MaskedOrder::of_row(at.row) : at.row, at.column};
  }
  CUTE_DEVICE static uint32_t k_lane() {
    return Product::KTile::lane_offset(by_runs(MatrixLane::columns_first(lane_id())));
  }
  CUTE_DEVICE static uint32_t v_lane(uint32_t, uint32_t v) { return v; }
  CUTE_DEVICE static uint32_t v_lane(uint32_t qv, std::nullptr_t) { return qv; }

  /// Of pages each tile takes longer to ask for.
  CUTE_DEVICE bool brings_in_softmax() const { return Source::kBringsInSoftmax && p.keys_stand == KeysStand::in_order; }
  CUTE_DEVICE WarpScores& warp_scores() const { return Shared::scores(smem, warp); }
  CUTE_DEVICE int first_key(int phase) const {
    int const back = C.modifies_scores() ? TilesBack{blocks, warp_scores().put_off}(phase) : phase;
    return Shared::phases(smem, warp).last_begin - back * C.tile_n;
  }
  CUTE_DEVICE ScoreBlock<C> block_at(int phase) const {
    int const row_begin = Shared::phases(smem, warp).row_begin;
    int const key = first_key(phase);
    if constexpr (C.modifies_scores()) {
      return {p, place().sequence, place().tile, {{row_begin}, Shared::slopes(smem, tile_row()), warp_scores()}, key};
    } else {
      return {p, place().sequence, place().tile, {row_begin}, key};
    }
  }
};

template <ForwardConfig C>
CUTE_DEVICE void tile_rows(FeatureParams const& p, char* smem, Sequence const& sequence, FeatureTile const& tile,
                           KeyWalk const& walk, int warp) {
  using T = ForwardTypes<C>;
  using Shared = FeatureTileLayout<C>;
  FeatureKeys<C> keys(p, smem, warp, walk);
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.score_unit * kLog2e);
  auto const producer = keys.make_producer(sequence, tile);
  keys.set_producer(producer);
  // A short document's block waits longer for its first tiles than it computes: they are asked for first.
  if (keys.blocks > 0) {
    if (threadIdx.x == 0) keys.init_pipelines(producer, sequence);
    load_query_tile<C>(p, smem, sequence, tile);
    cute::cp_async_fence();
    keys.init_shared(sequence, tile);
  }
  if (threadIdx.x == C.threads() - 1) new (&Shared::place(smem)) typename Shared::Place(p, sequence, tile, walk);
  if (keys.blocks > 0) {
    if (!keys.starts_alone()) {
      __syncthreads();  // the pipelines' barriers exist, and what the block works on is known
      keys.start();
    }
    wait_for_committed_cp_async();  // Q, the only committed group: K and V report to their pipelines
    __syncthreads();
    keys.finish_first();
    if constexpr (C.features == Features::ranges) transform_q<C>(p, smem);
    auto const walk_as = [&]<class Asked>()
                             FMHA_INLINE { TileWalk<C, FeatureKeys<C>, Asked>{smem, keys}.run(output, softmax); };
    if constexpr (C.modifies_scores()) {
      if (p.modifier == Modifier::any) {
        walk_as.template operator()<ModifiedBy<Modifier::any>>();
      } else if (p.modifier == Modifier::alibi) {
        walk_as.template operator()<ModifiedBy<Modifier::alibi>>();
      } else if (p.modifier == Modifier::softcap) {
        walk_as.template operator()<ModifiedBy<Modifier::softcap>>();
      } else {
        walk_as.template operator()<ModifiedBy<Modifier::dropout>>();
      }
    } else if constexpr (!C.reads_masks()) {
      walk_as.template operator()<std::nullptr_t>();
    } else if (p.bias_type != BiasType::none) {
      walk_as.template operator()<MaskFragment<C, ReadsScores::bias>>();
    } else if (!reads_mask(C).bytes || (reads_mask(C).bits && p.mask_bits != nullptr)) {
      if constexpr (reads_mask(C).bits) walk_as.template operator()<MaskFragment<C, ReadsScores::bits>>();
    } else if constexpr (reads_mask(C).bytes) {
      walk_as.template operator()<MaskFragment<C, ReadsScores::mask>>();
    }
  } else {
    __syncthreads();
  }
  write_tile_rows<C>(p, smem, output, softmax, keys.tile_row());
}

}  // namespace cutlass_fmha
