// Keys of scored rows for the walk of forward/step_walk.cuh where queries are many: every warp has rows of its own and
// takes all keys of a step. All threads bring those by cp.async, one step ahead or more, and one barrier a step keeps
// the ring of stages in order.
#pragma once

#include "../forward/step_walk.cuh"
#include "layout.cuh"

namespace cutlass_fmha {

/// Steps are numbered by how many come after them.
template <ForwardConfig C>
struct BlockKeys {
  using T = ForwardTypes<C>;
  using Word = typename T::Word;
  using Shared = FeatureLayout<C>;
  using Order = KeyOrder<C>;
  using Product = WarpProduct<C>;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using Held = typename Product::QFragments;
  using KLoader = RowLoader<C.head_dim, C.tile_n, C.threads(), C.element_bytes()>;
  using VLoader = RowLoader<C.head_dim_v(), C.tile_n, C.threads(), C.element_bytes()>;
  static_assert(C.kv_warps == 1, "a warp takes all keys of a step");

  static constexpr bool kFirstApart = false;  ///< rows may start with a sink
  /// Whether registers are left, beside the fragments, for what can be computed anew in each step.
  static constexpr bool kRoomy = spare_registers(C) >= 56;

  /// This lane's addresses for ldmatrix in tiles of K and V.
  struct LaneOffsets {
    uint32_t k, v;
  };

  FeatureParams const& p;
  char* const smem;
  int const tile_row;  ///< first row of this warp
  bool in_order;       ///< whether a step's rows follow those of the next one
  LaneOffsets kept;
  uint32_t to;                            ///< where this thread's chunks stand in a tile,
  Word const *k = nullptr, *v = nullptr;  ///< and in the step that is loaded next, where steps are in order
  int begin;                              ///< first key of the step
  int row_begin;                          ///< the warp's first row of the sequence
  bool by_range;                          ///< whether ranges hide some of its keys

  CUTE_DEVICE BlockKeys(FeatureParams const& p, char* smem, int tile_row) : p(p), smem(smem), tile_row(tile_row) {}

  /// Before the block meets.
  CUTE_DEVICE void store_view(Sequence const& sequence, FeatureTile const& tile) const {
    int const first = tile.row_begin + tile_row;
    int const i_last = smaller(p.by_pack.quotient(first + T::kRows - 1), sequence.queries - 1);
    if (lane_id() == 0)
      Shared::view(smem, thread_id() / 32) = CommonView(p, sequence, p.by_pack.quotient(first), i_last);
  }

  CUTE_DEVICE RowMaxima maxima() const { return {Shared::KeyParts::maxima(smem) + tile_row}; }

  // What the walk asks for.
  CUTE_DEVICE int start(Held& q) {
    in_order = p.block_counts == nullptr && p.page_table == nullptr && p.vectors && has_all_dimensions();
    int const left = place().walk.tiles - 1;
    kept = lanes_now();
    if constexpr (kRoomy) kept = {settled(kept.k), settled(kept.v)};
    CUTE_UNROLL
    for (int ahead = 0; ahead < C.stages - 1; ++ahead) load_anyhow(left - ahead);
    // Only the first step of a walk can be cut by the end of the keys.
    to = settled(KLoader::first_chunk(thread_id()));
    if (in_order) {
      int const begin = key_begin_of(left - C.stages + 1);
      k = first_chunk<KLoader>(place().k, p.k_stride, begin);
      v = first_chunk<VLoader>(place().v, p.v_stride, begin);
    }
    if constexpr (C.q_in_registers) {
      cute::cp_async_wait<0>();  // Q, part of the first group
      __syncthreads();
      CUTE_UNROLL
      for (int d = 0; d < T::kDimSteps; ++d) Product::load_q(smem, q_lane(), d, q(cute::_, cute::_, d));
    }
    begin = key_begin_of(left);
    return left;
  }
  CUTE_DEVICE static bool more(int left) { return left > 0; }
  CUTE_DEVICE void next(int& left, Held&) { --left, begin -= C.tile_n; }
  /// The block's turn to the step, and whether this warp's rows see any of its keys.
  CUTE_DEVICE bool sees(int left) {
    // All that needs no data is asked for before the barrier.
    if (!kRoomy || !in_order) begin = key_begin_of(left);
    CommonView const view = Shared::view(smem, thread_id() / 32);
    bool const seen = view.some_see(begin, C.tile_n);
    by_range = !view.all_see(begin, C.tile_n);
    cute::cp_async_wait<C.stages - 2>();  // this step's group is complete, and Q's, which is part of the first
    __syncthreads();                      // for all threads; and nobody reads the step before any more
    load_next(left - C.stages + 1);
    return seen;
  }
  CUTE_DEVICE void multiply(int left, Held const& kept_q, Scores& scores) const {
    uint32_t const lane = lanes().k + k_tile(left);
    Product::query_keys(
        kept_q, [&](int d, auto&& q) FMHA_INLINE { Product::load_q(smem, q_lane(), d, q); },
        [&](int d, int n, auto&& k) FMHA_INLINE { Product::load_k(smem, 0, lane, d, n, k); },
        [](int, int) FMHA_INLINE {}, scores);
  }
  template <bool First>
  CUTE_DEVICE static void after_scores(int, Held&) {}
  CUTE_DEVICE int key_begin(int) const { return begin; }
  CUTE_DEVICE void before_softmax(int, Scores& scores) {
    row_begin = place().tile.row_begin + tile_row;
    auto const block = this->block();
    if (!p.raw_scores) block.modify(by_row(scores));
    if (by_range || p.mask != nullptr) block.hide(by_row(scores), by_range);
  }
  CUTE_DEVICE void after_softmax(int, Probabilities& probabilities) const {
    if (p.dropout_threshold != 0) block().drop_out(pairs_by_row<T>(probabilities));
  }
  template <bool First>
  CUTE_DEVICE static void before_values(int, Held&) {}
  CUTE_DEVICE void add_values(int left, Held const&, Probabilities const& probabilities, Output& output) const {
    Product::add_tile(smem, probabilities, 0, lanes().v + v_tile(left), output);
  }
  CUTE_DEVICE static void after_values(int) {}

 private:
  CUTE_DEVICE typename Shared::Place const& place() const { return Shared::place(smem); }
  CUTE_DEVICE ScoreBlock<C> block() const { return {p, place().sequence, place().tile, row_begin, begin}; }
  CUTE_DEVICE static LaneOffsets lanes_now() {
    int const lane = lane_id();
    return {Product::k_lane(lane), Product::v_lane(lane)};
  }
  CUTE_DEVICE LaneOffsets lanes() const {
    if constexpr (kRoomy) return kept;
    return lanes_now();
  }
  CUTE_DEVICE uint32_t q_lane() const { return Product::q_lane(lane_id(), tile_row); }
  CUTE_DEVICE static uint32_t k_tile(int left) { return Shared::kKOffset + uint32_t(left) % C.stages * Shared::kK; }
  CUTE_DEVICE static uint32_t v_tile(int left) { return Shared::kVOffset + uint32_t(left) % C.stages * Shared::kV; }

  CUTE_DEVICE bool has_all_dimensions() const { return p.head_dim == C.head_dim && p.head_dim_v == C.head_dim_v(); }

  CUTE_DEVICE int key_begin_of(int left) const { return place().walk.key_begin_before(p, left, C.tile_n); }

  /// Brings a step's keys and values, of steps one after another.
  CUTE_DEVICE void load_next(int left) {
    if (!in_order) return load_anyhow(left);
    if (left >= 0) {
      KLoader::template load_whole<Order>(smem + k_tile(left) + to, k, p.k_stride.seqlen);
      VLoader::template load_whole<Order>(smem + v_tile(left) + to, v, p.v_stride.seqlen);
      k -= C.tile_n * p.k_stride.seqlen;
      v -= C.tile_n * p.v_stride.seqlen;
    }
    cute::cp_async_fence();
  }

  /// Brings a step's keys and values, wherever they stand.
  CUTE_DEVICE void load_anyhow(int left) const {
    if (left >= 0) {
      int const begin = key_begin_of(left), thread = thread_id();
      char* const k_to = smem + k_tile(left) + KLoader::first_chunk(thread);
      char* const v_to = smem + v_tile(left) + VLoader::first_chunk(thread);
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
    if (begin + C.tile_n > place().sequence.keys || !has_all_dimensions() || !p.vectors) return false;
    if (p.page_table == nullptr) return true;
    if (place().behind.has(begin, C.tile_n)) return false;  // its page may be gone
    int const row = place().sequence.first_k + begin;
    return p.by_page_size.quotient(row) == p.by_page_size.quotient(row + C.tile_n - 1);
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
      LeftBehind const& behind = place().behind;
      bool const there = key < place().sequence.keys && !behind.has(key, 1);
      int const named = behind.kept(smaller(key, place().sequence.keys - 1), 1);  // some row that exists
      KLoader::load_row(k_to, pass, k + key_offset(p.k_stride, named), there ? p.head_dim - KLoader::column(thread) : 0,
                        p.vectors);
      VLoader::load_row(v_to, pass, v + key_offset(p.v_stride, named),
                        there ? p.head_dim_v - VLoader::column(thread) : 0, p.vectors);
    }
  }
};

}  // namespace cutlass_fmha
