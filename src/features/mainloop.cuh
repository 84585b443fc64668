// A scored row's walk over the keys: all threads bring a step's keys and values by cp.async, one step ahead or more,
// and one barrier a step keeps the ring of stages in order. Warps are in groups of kv_warps that share query rows; each
// warp of a group takes tile_n keys of a step, with an online softmax of its own.
#pragma once

#include "../core/key_parts.cuh"
#include "../core/product.cuh"
#include "place.cuh"

namespace cutlass_fmha {

/// Shared memory of a block: Q, rings of K and V tiles, and the state of the softmax. On the way out the tiles give way
/// to the key parts' O.
template <ForwardConfig C>
struct FeatureLayout {
  using Place = TilePlace<typename ForwardTypes<C>::Word>;
  static constexpr int kStepKeys = C.tile_n * C.kv_warps;
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kK = kStepKeys * C.head_dim * C.element_bytes();
  static constexpr int kV = kStepKeys * C.head_dim_v() * C.element_bytes();
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kK;
  static constexpr int kTiles = kVOffset + C.stages * kV;
  using KeyParts = KeyPartLayout<C, kTiles>;
  static constexpr int kPlace = KeyParts::kBytes;
  static constexpr int kViews = cute::ceil_div(kPlace + int(sizeof(Place)), 16) * 16;
  static constexpr int kBytes = kViews + C.warps * int(sizeof(CommonView));
  static_assert(kBytes <= 99 * 1024, "sm_89 and sm_120 have no more");

  CUTE_DEVICE static Place& place(char* smem) { return *reinterpret_cast<Place*>(smem + kPlace); }
  /// What a warp's queries see.
  CUTE_DEVICE static CommonView& view(char* smem, int warp) {
    return reinterpret_cast<CommonView*>(smem + kViews)[warp];
  }
};

template <ForwardConfig C>
struct FeatureMainloop {
  using T = ForwardTypes<C>;
  using Word = typename T::Word;
  using Shared = FeatureLayout<C>;
  using Order = KeyOrder<C>;
  using Product = WarpProduct<C, Shared::kStepKeys>;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using QFragments = typename Product::QFragments;

  using KLoader = RowLoader<C.head_dim, Shared::kStepKeys, C.threads(), C.element_bytes()>;
  using VLoader = RowLoader<C.head_dim_v(), Shared::kStepKeys, C.threads(), C.element_bytes()>;

  /// Whether registers are left, beside the fragments, for what can be computed anew in each step.
  static constexpr bool kRoomy = spare_registers(C) >= 56;

  /// This lane's addresses for ldmatrix in tiles of K and V, and which of them stay in registers.
  struct LaneOffsets {
    uint32_t k, v;

    CUTE_DEVICE LaneOffsets() {
      int const lane = lane_id();
      k = Product::k_lane(lane);
      v = Product::v_lane(lane);
    }
    CUTE_DEVICE void keep() {
      if constexpr (kRoomy) k = settled(k), v = settled(v);
    }
  };

  FeatureParams const& p;
  char* const smem;
  int const key_part;  ///< of the keys of a step
  int const tile_row;  ///< first row of this warp

  /// Before the block meets.
  CUTE_DEVICE void store_view(Sequence const& sequence, FeatureTile const& tile) const {
    int const begin = tile.row_begin + tile_row;
    int const i_last = smaller(p.by_pack.quotient(begin + T::kRows - 1), sequence.queries - 1);
    if (lane_id() == 0)
      Shared::view(smem, thread_id() / 32) = CommonView(p, sequence, p.by_pack.quotient(begin), i_last);
  }

  CUTE_DEVICE typename Shared::Place const& place() const { return Shared::place(smem); }

  CUTE_DEVICE RowMaxima maxima() const { return {Shared::KeyParts::maxima(smem) + key_part * C.tile_m + tile_row}; }

  /// Leaves the unnormalised O of this warp's part of the keys in `output`, its l in `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) const {
    using namespace cute;
    QFragments q_fragments;
    bool const in_order = p.block_counts == nullptr && p.page_table == nullptr && p.vectors && has_all_dimensions();
    int left = place().walk.tiles - 1;  // steps after this one
    LaneOffsets kept;
    kept.keep();
    CUTE_UNROLL
    for (int ahead = 0; ahead < C.stages - 1; ++ahead) load_anyhow(left - ahead);
    // This thread's chunks of the step that is loaded next, where steps are in order. Only the first step of a walk can
    // be cut by the end of the keys.
    uint32_t const to = settled(KLoader::first_chunk(thread_id()));
    Word const *k = nullptr, *v = nullptr;
    if (in_order) {
      int const begin = key_begin(left - C.stages + 1);
      k = first_chunk<KLoader>(place().k, p.k_stride, begin);
      v = first_chunk<VLoader>(place().v, p.v_stride, begin);
    }
    if constexpr (C.q_in_registers) {
      cp_async_wait<0>();  // Q, part of the first group
      __syncthreads();
      CUTE_UNROLL
      for (int d = 0; d < T::kDimSteps; ++d) load_q(d, q_fragments(_, _, d));
    }
    int begin = key_begin(left) + key_part * C.tile_n;
    CUTE_NO_UNROLL
    for (; left >= 0; --left, begin -= Shared::kStepKeys) {
      // All that needs no data is asked for before the barrier.
      if (!kRoomy || !in_order) begin = key_begin(left) + key_part * C.tile_n;
      CommonView const view = Shared::view(smem, thread_id() / 32);
      bool const seen = view.some_see(begin, C.tile_n), by_range = !view.all_see(begin, C.tile_n);
      cp_async_wait<C.stages - 2>();  // this step's group is complete, and Q's, which is part of the first
      __syncthreads();                // for all threads; and nobody reads the step before any more
      int const next = left - C.stages + 1;
      if (!in_order) {
        load_anyhow(next);
      } else {
        if (next >= 0) {
          KLoader::template load_whole<Order>(smem + Shared::kKOffset + stage(next) * Shared::kK + to, k,
                                              p.k_stride.seqlen);
          VLoader::template load_whole<Order>(smem + Shared::kVOffset + stage(next) * Shared::kV + to, v,
                                              p.v_stride.seqlen);
          k -= Shared::kStepKeys * p.k_stride.seqlen;
          v -= Shared::kStepKeys * p.v_stride.seqlen;
        }
        cp_async_fence();
      }
      if (!seen) continue;
      Scores scores;
      compute_scores(left, kRoomy ? kept : LaneOffsets(), q_fragments, scores);
      auto const& at = place();
      ScoreBlock<C> const block{p, at.sequence, at.tile, at.tile.row_begin + tile_row, begin};
      if (!p.raw_scores) block.modify(by_row(scores));
      if (by_range || p.mask != nullptr) block.hide(by_row(scores), by_range);
      Probabilities probabilities;
      softmax.template step<false>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), maxima());
      if (p.dropout_threshold != 0) block.drop_out(pairs_by_row<T>(probabilities));
      accumulate(left, kRoomy ? kept : LaneOffsets(), probabilities, output);
    }
  }

 private:
  // Steps are numbered by how many come after them.
  CUTE_DEVICE static uint32_t stage(int left) { return uint32_t(left) % C.stages; }

  CUTE_DEVICE bool has_all_dimensions() const { return p.head_dim == C.head_dim && p.head_dim_v == C.head_dim_v(); }

  CUTE_DEVICE int key_begin(int left) const { return place().walk.key_begin_before(p, left, Shared::kStepKeys); }

  /// Brings a step's keys and values, wherever they stand.
  CUTE_DEVICE void load_anyhow(int left) const {
    if (left >= 0) {
      int const begin = key_begin(left), thread = thread_id();
      char* const k_to = smem + Shared::kKOffset + stage(left) * Shared::kK + KLoader::first_chunk(thread);
      char* const v_to = smem + Shared::kVOffset + stage(left) * Shared::kV + VLoader::first_chunk(thread);
      if (is_whole(begin)) {
        KLoader::template load_whole<Order>(k_to, first_chunk<KLoader>(place().k, p.k_stride, begin),
                                            p.k_stride.seqlen);
        VLoader::template load_whole<Order>(v_to, first_chunk<VLoader>(place().v, p.v_stride, begin),
                                            p.v_stride.seqlen);
      } else {
        load_rows(k_to, v_to, thread, begin);
      }
    }
    cute::cp_async_fence();  // an empty group, where there is no step: the number of groups in flight stays the same
  }

  /// Whether all rows of a step are there, with all dimensions, one stride apart.
  CUTE_DEVICE bool is_whole(int begin) const {
    if (begin + Shared::kStepKeys > place().sequence.keys || !has_all_dimensions() || !p.vectors) return false;
    if (p.page_table == nullptr) return true;
    int const row = place().sequence.first_k + begin;
    return p.by_page_size.quotient(row) == p.by_page_size.quotient(row + Shared::kStepKeys - 1);
  }

  /// Where a key stands from the first row on.
  CUTE_DEVICE int64_t key_offset(Strides const& stride, int key) const {
    if (p.page_table == nullptr) return key * stride.seqlen;
    Sequence const& sequence = place().sequence;
    return key_row_offset(p, stride, sequence, sequence.first_k + key);
  }

  template <class Loader>
  CUTE_DEVICE Word const* first_chunk(Word const* first_row, Strides const& stride, int begin) const {
    int const thread = thread_id(), row = Order::of_row(Loader::first_row(thread));
    Word const* const from = first_row + Loader::column(thread);
    // The rows of a page follow each other.
    return p.page_table == nullptr ? from + (begin + row) * stride.seqlen
                                   : from + key_offset(stride, begin) + row * stride.seqlen;
  }

  /// Copies of rows that stand anywhere. A thread has the same rows of K and V.
  CUTE_DEVICE void load_rows(char* k_to, char* v_to, int thread, int begin) const {
    static_assert(KLoader::kRowsPerPass == VLoader::kRowsPerPass && KLoader::P::kWidth == VLoader::P::kWidth);
    Word const* const k = place().k + KLoader::column(thread);
    Word const* const v = place().v + VLoader::column(thread);
    CUTE_NO_UNROLL
    for (int pass = 0; pass < KLoader::kPasses; ++pass) {
      int const key = begin + Order::of_row(KLoader::first_row(thread)) + Order::of_row(pass * KLoader::kRowsPerPass);
      bool const there = key < place().sequence.keys;
      int const named = smaller(key, place().sequence.keys - 1);  // some row that exists
      KLoader::load_row(k_to, pass, k + key_offset(p.k_stride, named), there ? p.head_dim - KLoader::column(thread) : 0,
                        p.vectors);
      VLoader::load_row(v_to, pass, v + key_offset(p.v_stride, named),
                        there ? p.head_dim_v - VLoader::column(thread) : 0, p.vectors);
    }
  }

  template <class Fragment>
  CUTE_DEVICE void load_q(int step, Fragment&& fragment) const {
    Product::load_q(smem, Product::q_lane(lane_id(), tile_row), step, fragment);
  }

  /// scores = Q K^T of this warp's keys of a step.
  CUTE_DEVICE void compute_scores(int left, LaneOffsets lanes, QFragments const& q_fragments, Scores& scores) const {
    uint32_t const lane =
        lanes.k + key_part * (C.tile_n * Product::KTile::P::kRowBytes) + Shared::kKOffset + stage(left) * Shared::kK;
    Product::query_keys(
        q_fragments, [&](int d, auto&& q) FMHA_INLINE { load_q(d, q); },
        [&](int d, int n, auto&& k) FMHA_INLINE { Product::load_k(smem, 0, lane, d, n, k); },
        [](int, int) FMHA_INLINE {}, scores);
  }

  /// output += P V of this warp's keys of a step.
  CUTE_DEVICE void accumulate(int left, LaneOffsets lanes, Probabilities const& probabilities, Output& output) const {
    uint32_t const lane =
        lanes.v + key_part * (C.tile_n * Product::VTile::P::kRowBytes) + Shared::kVOffset + stage(left) * Shared::kV;
    Product::template add_values<false>(
        probabilities, [&](int n, int d, auto&& v) FMHA_INLINE { Product::load_v(smem, 0, lane, n, d, v); },
        []() FMHA_INLINE {}, output);
  }
};

}  // namespace cutlass_fmha
