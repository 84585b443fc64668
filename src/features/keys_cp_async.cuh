// Keys by cp.async, for ranged and score-mod rows: V by the first half of the warps, K by the second.
#pragma once

#include "walk.cuh"

namespace cutlass_fmha {

template <ForwardConfig C>
struct CpAsyncFeatureKeys : FeatureWalk<C> {
  using Base = FeatureWalk<C>;
  using Shared = typename Base::Shared;
  using Order = KeyOrder<C>;
  using Word = typename ForwardTypes<C>::Word;
  using Base::p, Base::smem, Base::warp, Base::blocks, Base::k_pipe, Base::v_pipe;
  using Base::second_group, Base::place, Base::looks_ahead;
  static constexpr int kHalfThreads = C.threads() / 2;
  static constexpr bool kAsksInTurn = true, kBringsInSoftmax = false;
  static constexpr int kPassAt = ForwardTypes<C>::kKeySteps / 2;
  using KLoader = RowLoader<C.head_dim, C.tile_n, kHalfThreads, C.element_bytes()>;
  using VLoader = RowLoader<C.head_dim_v(), C.tile_n, kHalfThreads, C.element_bytes()>;
  static_assert(KLoader::kRowsPerPass == VLoader::kRowsPerPass && KLoader::P::kWidth == VLoader::P::kWidth,
                "a thread has the same chunk of K and V");

  /// Whether a thread keeps where its next chunk comes from, and goes to: sm_120's compiler spills that beside the
  /// largest O. (Tiles of score mods are in an order of their own.)
  static constexpr bool kKeepsSource = C.arch != 120 || is_roomy(C) || C.modifies_scores();

  uint32_t const destination;      ///< of this thread's chunk in a tile
  Word const* in_order = nullptr;  ///< its chunk of the next tile to bring, of V or of K, where keys are in order

  CUTE_DEVICE CpAsyncFeatureKeys(FeatureParams const& p, char* smem, int warp, KeyWalk const& walk)
      : Base(p, smem, warp, walk), destination(settled(KLoader::first_chunk(thread_id() % kHalfThreads))) {}

  struct Producer {};  ///< all threads are
  CUTE_DEVICE Producer make_producer(Sequence const&, FeatureTile const&) const { return {}; }
  CUTE_DEVICE void set_producer(Producer const&) const {}
  /// By one thread.
  CUTE_DEVICE void init_pipelines(Producer const&, Sequence const&) const {
    k_pipe.init(kHalfThreads, C.threads());
    v_pipe.init(kHalfThreads, C.threads());
  }
  CUTE_DEVICE static bool starts_alone() { return false; }
  /// Starts the first loads of K and V.
  CUTE_DEVICE void start() {
    int const thread = thread_id();
    Strides const& stride = second_group() ? p.k_stride : p.v_stride;
    if constexpr (kKeepsSource) in_order = source_in_order(stride, 0, thread);
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      refill_k<true>(tile);
      refill_v<true>(tile);
    }
  }
  CUTE_DEVICE void finish_first() const {}
  template <bool First = false>
  CUTE_DEVICE void refill_k(int tile) {
    if (second_group()) refill<KLoader, First>(k_pipe, Shared::kKOffset, Shared::kKTile, p.k_stride, p.head_dim, tile);
  }
  template <bool First = false>
  CUTE_DEVICE void refill_v(int tile) {
    if (!second_group())
      refill<VLoader, First>(v_pipe, Shared::kVOffset, Shared::kVTile, p.v_stride, p.head_dim_v, tile);
  }

 private:
  /// Brings a tile of K or of V, the next one of its ring, if there is one. Only the first tile can be a partial one.
  /// What most launches need is all that stands in the way: every phase waits for it.
  template <class Loader, bool First>
  CUTE_DEVICE void refill(KvPipeline<C> const& pipe, int ring, int tile_bytes, Strides const& stride, int head_dim,
                          int tile) {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    uint32_t const chunk = kKeepsSource ? destination : KLoader::first_chunk(thread_id() % kHalfThreads);
    char* const to = smem + ring + pipe.stage(tile) * tile_bytes + chunk;
    constexpr int kDimensions = cute::is_same_v<Loader, KLoader> ? C.head_dim : C.head_dim_v();
    if (!First && p.keys_stand == KeysStand::in_order && head_dim == kDimensions) {
      Loader::template load_whole<Order>(to, next_in_order(stride, tile), stride.seqlen);
    } else {
      bring_anyhow<Loader, First>(to, stride, head_dim, tile);
    }
    if constexpr (kKeepsSource) in_order -= step_after(tile) * C.tile_n * stride.seqlen;
    pipe.producer_commit_cp_async(tile);
  }

  /// In tiles; read anew.
  CUTE_DEVICE int step_after(int tile) const {
    return C.modifies_scores() ? TilesBack{blocks, Shared::scores(smem, warp).put_off}.step(tile) : 1;
  }

  /// Pages are looked up ahead but for the first tiles: `First`.
  template <class Loader, bool First>
  CUTE_DEVICE void bring_anyhow(char* to, Strides const& stride, int head_dim, int tile) const {
    // Asked anew: what follows from it is not computed ahead of the branch.
    int const thread = thread_id();
    int const dimensions = head_dim - KLoader::column(thread % kHalfThreads);  // from this thread's column on
    bool const is_in_order = p.keys_stand == KeysStand::in_order;
    bool const whole = !First || tile > 0 || key_begin(0) + C.tile_n <= place().sequence.keys;
    if ((is_in_order && whole) || (!First && p.keys_stand == KeysStand::whole_pages)) {
      Word const* const from = is_in_order ? next_in_order(stride, tile) : source_in_page(stride, tile, thread);
      Loader::template load_dimensions<Order>(to, from, stride.seqlen, dimensions);
    } else {
      bring_rows<Loader, First>(to, stride, dimensions, tile, thread);
    }
    if (int const next = tile + C.stages; !is_in_order && looks_ahead() && next < blocks) {
      ask_for_page<C>(p, smem, thread < kHalfThreads, next, key_begin(next), thread % kHalfThreads);
    }
  }

  CUTE_DEVICE Word const* next_in_order(Strides const& stride, int tile) const {
    return kKeepsSource ? in_order : source_in_order(stride, tile, thread_id());
  }
  /// Its chunk of its first row in a tile.
  CUTE_DEVICE Word const* source_in_order(Strides const& stride, int tile, int thread) const {
    return first_row(thread) + (key_begin(tile) + first_key(thread)) * stride.seqlen;
  }
  /// Read anew: copies that ask are rare.
  CUTE_DEVICE int key_begin(int tile) const { return Shared::phases(smem, warp).last_begin - tile * C.tile_n; }
  /// Where a thread's tile lies in one page, its chunk of its first row there.
  CUTE_DEVICE Word const* source_in_page(Strides const& stride, int tile, int thread) const {
    int const page = Shared::pages(smem, thread < kHalfThreads, tile)[0];
    int const row = place().sequence.first_k + key_begin(tile) + first_key(thread);
    return first_row(thread) + page_row_offset(p, stride, page, row);
  }
  /// Its chunk of the row that keys are counted from, of V or of K: whichever it copies.
  CUTE_DEVICE Word const* first_row(int thread) const {
    return (thread < kHalfThreads ? place().v : place().k) + KLoader::column(thread % kHalfThreads);
  }
  /// Of its rows in a tile, the first one's key.
  CUTE_DEVICE static int first_key(int thread) { return Order::of_row(KLoader::first_row(thread % kHalfThreads)); }

  /// Rows that stand anywhere; keys that don't exist, or that a window left behind, become zeros.
  template <class Loader, bool First>
  CUTE_DEVICE void bring_rows(char* to, Strides const& stride, int dimensions, int tile, int thread) const {
    Sequence const& s = place().sequence;
    int const begin = key_begin(tile);
    Word const* const from = first_row(thread);
    CUTE_NO_UNROLL
    for (int pass = 0; pass < Loader::kPasses; ++pass) {
      int const key = first_key(thread) + Order::of_row(pass * Loader::kRowsPerPass);
      LeftBehind const& behind = place().behind;
      int const named = behind.kept(smaller(begin + key, s.keys - 1), 1);  // some row that exists
      bool const there = begin + key < s.keys && !behind.has(begin + key, 1);
      int64_t offset = named * stride.seqlen;
      if (p.page_table != nullptr) {
        int const row = s.first_k + named;
        int const page = !First && looks_ahead() ? Shared::pages(smem, thread < kHalfThreads, tile)[key / kPageRun]
                                                 : page_number(p, s, row);
        offset = page_row_offset(p, stride, page, row);
      }
      Loader::load_vectors(to, pass, from + offset, there ? dimensions : 0);
    }
  }
};

}  // namespace cutlass_fmha
