// Ranged rows: keys for the walk of forward/tile_walk.cuh wherever they stand, anywhere in a batch entry, among packed
// sequences or in pages, brought by cp.async, V by the first half of the warps, K by the second. The shared memory of
// such a row, and what leaves it.
#pragma once

#include "../core/merge.cuh"
#include "../forward/epilogue.cuh"
#include "../forward/tile_walk.cuh"
#include "place.cuh"

namespace cutlass_fmha {

/// What a warp asks for in every phase.
struct alignas(16) WarpPhases {
  int first_phase = 0, end_phase = 0;  ///< before and from which on it sees no key
  int full_begin = 0, full_end = 0;    ///< phases of which each of its rows sees every key,
  int prefix_begin = 0;                ///< and so they do from this one on
  int row_begin = 0;                   ///< its first packed row

  WarpPhases() = default;
  /// Of `blocks` phases, the first of which has the keys from `last_begin` on.
  CUTE_DEVICE WarpPhases(CommonView const& view, int row_begin, int blocks, int last_begin, int tile_n)
      : end_phase(blocks), row_begin(row_begin) {
    int const last = last_begin / tile_n;  // a tile's number; phase n has tile last - n
    auto const phase = [&](int tile) { return larger(0, smaller(last - tile, blocks)); };
    int const some_end = larger(view.some_end, view.prefix);
    first_phase = phase(ceil_div(some_end, tile_n) - 1);
    if (view.prefix == 0) end_phase = larger(first_phase, phase(view.some_begin / tile_n - 1));
    full_begin = phase(view.all_end / tile_n - 1);
    full_end = phase(ceil_div(view.all_begin, tile_n) - 1);
    prefix_begin = phase(view.prefix / tile_n - 1);
    if (view.prefix == 0 && some_end <= view.some_begin) first_phase = end_phase = blocks;
  }
  CUTE_DEVICE bool is_full(int phase) const {
    return (phase >= full_begin && phase < full_end) || phase >= prefix_begin;
  }
};

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, what the block works on, which pages the
/// next tiles are in, what warps and lanes read anew in each phase.
template <ForwardConfig C>
struct RangedLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kKTile = C.tile_n * C.head_dim * C.element_bytes();
  static constexpr int kVTile = C.tile_n * C.head_dim_v() * C.element_bytes();
  static constexpr int kRuns = C.tile_n / kPageRun;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kKTile;
  static constexpr int kBarriers = kVOffset + C.stages * kVTile;
  static constexpr int kPlace = kBarriers + 2 * KvPipeline<C>::kBytes;
  static constexpr int kWarps = cute::ceil_div(kPlace + int(sizeof(TilePlace)), 16) * 16;
  static constexpr int kPages = kWarps + C.warps * int(sizeof(WarpPhases));
  static constexpr int kLanes = kPages + 4 * C.stages * kRuns * int(sizeof(int));
  static constexpr int kMaxima = kLanes + 32 * int(sizeof(uint2));
  static constexpr int kBytes = kMaxima + C.tile_m * int(sizeof(float));
  static_assert(kBytes <= 99 * 1024, "sm_89 and sm_120 have no more");

  CUTE_DEVICE static TilePlace& place(char* smem) { return *reinterpret_cast<TilePlace*>(smem + kPlace); }
  CUTE_DEVICE static WarpPhases& phases(char* smem, int warp) {
    return reinterpret_cast<WarpPhases*>(smem + kWarps)[warp];
  }
  /// Which pages a tile's runs are in, asked for by the threads that copy K or V. Two turns of a ring: those of a tile
  /// are asked for when the tile before it in its stage is.
  CUTE_DEVICE static int* pages(char* smem, bool values, uint32_t tile) {
    return reinterpret_cast<int*>(smem + kPages) + ((values ? 2 * C.stages : 0) + tile % (2 * C.stages)) * kRuns;
  }
  CUTE_DEVICE static RowMaxima maxima(char* smem, int tile_row) {
    return {reinterpret_cast<float*>(smem + kMaxima) + tile_row};
  }
};

template <ForwardConfig C>
struct RangedKeys {
  using T = ForwardTypes<C>;
  using Shared = RangedLayout<C>;
  using Product = WarpProduct<C>;
  using Order = KeyOrder<C>;
  using Turn = Turns<C.warps, C.ping_pong>;
  static constexpr int kHalfThreads = C.threads() / 2;
  static constexpr bool kEndsEarly = true, kMaskedFirst = false;
  /// Whether registers are left for where the next tile of keys in order stands.
  static constexpr bool kKeepsSource = spare_registers(C) >= 56;
  static constexpr bool kAsksInTurn = true;
  static constexpr int kPassAt = T::kKeySteps / 2;
  using KLoader = RowLoader<C.head_dim, C.tile_n, kHalfThreads>;
  using VLoader = RowLoader<C.head_dim_v(), C.tile_n, kHalfThreads>;
  static_assert(KLoader::kRowsPerPass == VLoader::kRowsPerPass && KLoader::P::kWidth == VLoader::P::kWidth,
                "a thread has the same chunk of K and V");

  struct Lanes {
    uint32_t q_offset, k_offset, v_offset;

    CUTE_DEVICE uint32_t q() const { return q_offset; }
    CUTE_DEVICE uint32_t k() const { return k_offset; }
    CUTE_DEVICE uint32_t v() const { return v_offset; }
  };

  FeatureParams const& p;
  char* const smem;
  int const warp;        ///< the same for all lanes, and the compiler knows it
  int const blocks;      ///< key tiles that the thread block walks
  int const last_begin;  ///< the first key of phase 0, unless a list of blocks says which keys a phase has
  int first_phase = 0, seen_until = 0;  ///< WarpPhases
  KvPipeline<C> const k_pipe, v_pipe;
  uint32_t const qv_lane_offset, k_lane_offset;
  uint32_t const destination;          ///< of this thread's chunk in a tile
  uint16_t const* in_order = nullptr;  ///< its chunk of the next tile to bring, of V or of K, where keys are in order

  CUTE_DEVICE RangedKeys(FeatureParams const& p, char* smem, int warp, KeyWalk const& walk)
      : p(p),
        smem(smem),
        warp(warp),
        blocks(uniform(walk.tiles)),
        last_begin(uniform((walk.first + walk.skipped + walk.tiles - 1) * C.tile_n)),
        k_pipe{cute::cast_smem_ptr_to_uint(smem + Shared::kBarriers)},
        v_pipe{cute::cast_smem_ptr_to_uint(smem + Shared::kBarriers) + KvPipeline<C>::kBytes},
        qv_lane_offset(Product::v_lane(lane_id())),
        k_lane_offset(Product::k_lane(lane_id())),
        destination(settled(KLoader::first_chunk(half_thread()))) {}

  /// What shared memory holds before anything is copied there.
  CUTE_DEVICE void init_shared(Sequence const& sequence, FeatureTile const& tile) {
    if (threadIdx.x == 0) {
      k_pipe.init(kHalfThreads, C.threads());
      v_pipe.init(kHalfThreads, C.threads());
    }
    if (threadIdx.x < 32) {
      reinterpret_cast<uint2*>(smem + Shared::kLanes)[threadIdx.x] = {qv_lane_offset, k_lane_offset};
    }
    int const begin = tile.row_begin + tile_row();
    int const i_last = smaller(p.by_pack.quotient(begin + T::kRows - 1), sequence.queries - 1);
    CommonView const view(p, sequence, p.by_pack.quotient(begin), i_last);
    WarpPhases const phases(view, begin, blocks, last_begin, C.tile_n);
    first_phase = uniform(phases.first_phase);
    seen_until = uniform(phases.end_phase);
    if (lane_id() == 0) Shared::phases(smem, warp) = phases;
  }

  /// Starts the first loads of K and V.
  CUTE_DEVICE void prologue() {
    if constexpr (kKeepsSource) in_order = first_row() + (last_begin + first_key()) * stride().seqlen;
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      refill_k<true>(tile);
      refill_v<true>(tile);
    }
  }

  // What the walk asks for.
  CUTE_DEVICE void take() const { Turn::take(warp); }
  CUTE_DEVICE void pass() const { Turn::pass(warp); }
  CUTE_DEVICE bool second_group() const { return warp >= C.warps / 2; }
  CUTE_DEVICE void before_turn(int phase) {
    if (phase >= 2) refill_v<false>(phase - 2 + C.stages);
  }
  CUTE_DEVICE void end_scores(int phase) { refill_k<false>(phase + C.stages); }
  CUTE_DEVICE uint32_t q_lane() const { return qv_lane_offset + tile_row() * Product::kQRowBytes; }
  CUTE_DEVICE Lanes lanes() const {
    uint32_t const q = C.q_in_registers ? 0 : tile_row() * Product::kQRowBytes;
    if constexpr (is_roomy(C)) {
      return {qv_lane_offset + q, k_lane_offset, qv_lane_offset};
    } else {
      uint2 const offsets = reinterpret_cast<uint2 const*>(smem + Shared::kLanes)[lane_id()];
      return {offsets.x + q, offsets.y, offsets.x};
    }
  }
  CUTE_DEVICE int end_phase() const { return seen_until; }
  CUTE_DEVICE bool is_masked(int phase) const {
    return __any_sync(0xffffffffu, !Shared::phases(smem, warp).is_full(phase));
  }
  template <class Scores>
  CUTE_DEVICE void before_softmax(int phase, bool masked, Scores& scores) const {
    if (!masked) return;
    ScoreBlock<C> const block{p, place().sequence, place().tile, Shared::phases(smem, warp).row_begin,
                              key_begin(phase)};
    block.hide_by_range(by_row(scores));
  }
  template <class Probabilities>
  CUTE_DEVICE void after_softmax(int, Probabilities&) const {}
  CUTE_DEVICE RowMaxima maxima() const { return Shared::maxima(smem, tile_row()); }

  /// This warp's first row within the tile.
  CUTE_DEVICE int tile_row() const { return tile_row_of<C>(warp); }

 private:
  CUTE_DEVICE static int half_thread() { return thread_id() % kHalfThreads; }
  CUTE_DEVICE TilePlace const& place() const { return Shared::place(smem); }
  CUTE_DEVICE int key_begin(int phase) const { return last_begin - phase * C.tile_n; }

  template <bool First>
  CUTE_DEVICE void refill_k(int tile) {
    if (second_group()) refill<KLoader, First>(k_pipe, Shared::kKOffset, Shared::kKTile, p.k_stride, p.head_dim, tile);
  }
  template <bool First>
  CUTE_DEVICE void refill_v(int tile) {
    if (!second_group())
      refill<VLoader, First>(v_pipe, Shared::kVOffset, Shared::kVTile, p.v_stride, p.head_dim_v, tile);
  }

  /// Brings a tile of K or of V, the next one of its ring, if there is one. Only the first tile can be a partial one,
  /// and where pages were not looked up ahead: `First`.
  template <class Loader, bool First>
  CUTE_DEVICE void refill(KvPipeline<C> const& pipe, int ring, int tile_bytes, Strides const& stride, int head_dim,
                          int tile) {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    char* const to = smem + ring + pipe.stage(tile) * tile_bytes + destination;
    bool const is_in_order = p.keys_stand == KeysStand::in_order;
    bool const whole = !First || tile > 0 || last_begin + C.tile_n <= place().sequence.keys;
    if ((is_in_order && whole) || (!First && p.keys_stand == KeysStand::whole_pages)) {
      uint16_t const* const from = is_in_order ? source(stride, tile) : source_in_page(stride, tile);
      Loader::template load_dimensions<Order>(to, from, stride.seqlen, dimensions(head_dim));
    } else {
      bring_rows<Loader, First>(to, stride, dimensions(head_dim), tile);
    }
    if (!is_in_order && looks_ahead()) ask_for_pages(tile + C.stages);
    if constexpr (kKeepsSource) in_order -= C.tile_n * stride.seqlen;
    pipe.producer_commit_cp_async(tile);
  }

  /// From this thread's column on.
  CUTE_DEVICE static int dimensions(int head_dim) { return head_dim - KLoader::column(half_thread()); }

  /// Of K or of V: whichever this thread copies.
  CUTE_DEVICE Strides const& stride() const { return second_group() ? p.k_stride : p.v_stride; }
  /// This thread's chunk of its first row of a tile, where keys are in order.
  CUTE_DEVICE uint16_t const* source(Strides const& stride, int tile) const {
    return kKeepsSource ? in_order : first_row() + (key_begin(tile) + first_key()) * stride.seqlen;
  }
  /// And where the tile lies in one page.
  CUTE_DEVICE uint16_t const* source_in_page(Strides const& stride, int tile) const {
    int const page = Shared::pages(smem, !second_group(), tile)[0];
    return first_row() + page_row_offset(p, stride, page, place().sequence.first_k + key_begin(tile) + first_key());
  }
  /// This thread's chunk of the row that keys are counted from.
  CUTE_DEVICE uint16_t const* first_row() const {
    return (second_group() ? place().k : place().v) + KLoader::column(half_thread());
  }
  /// Of this thread's rows in a tile, the first one's key.
  CUTE_DEVICE static int first_key() { return Order::of_row(KLoader::first_row(half_thread())); }

  /// Whether pages are looked up ahead.
  CUTE_DEVICE bool looks_ahead() const {
    return p.keys_stand == KeysStand::whole_pages || p.keys_stand == KeysStand::page_runs;
  }
  /// By a thread for each run of a tile.
  CUTE_DEVICE void ask_for_pages(int tile) const {
    int const run = half_thread();
    if (run >= Shared::kRuns || tile >= blocks) return;
    Sequence const& s = place().sequence;
    int const row = s.first_k + key_begin(tile) + run * kPageRun;
    int const* const entry = p.page_table + s.batch * p.page_table_stride + p.by_page_size.quotient(row);
    cute::SM80_CP_ASYNC_CACHEALWAYS<int>::copy(*entry, Shared::pages(smem, !second_group(), tile)[run]);
  }
  /// Rows that stand anywhere; keys that don't exist become zeros.
  template <class Loader, bool First>
  CUTE_DEVICE void bring_rows(char* to, Strides const& stride, int dimensions, int tile) const {
    Sequence const& s = place().sequence;
    int const begin = key_begin(tile);
    uint16_t const* const from = first_row();
    CUTE_NO_UNROLL
    for (int pass = 0; pass < Loader::kPasses; ++pass) {
      int const key = first_key() + Order::of_row(pass * Loader::kRowsPerPass);
      int const named = smaller(begin + key, s.keys - 1);  // some row that exists
      int64_t offset = named * stride.seqlen;
      if (p.page_table != nullptr) {
        int const row = s.first_k + named;
        int const page = !First && looks_ahead() ? Shared::pages(smem, !second_group(), tile)[key / kPageRun]
                                                 : page_number(p, s, row);
        offset = page_row_offset(p, stride, page, row);
      }
      Loader::load_vectors(to, pass, from + offset, begin + key < s.keys ? dimensions : 0);
    }
  }
};

/// A row's keys, and the sink of its head where this part of the keys counts it: one more key, whose value is 0.
struct RowEnd {
  float factor;  ///< of O
  float lse;     ///< natural log

  /// `maximum`, `reference`, `sum`: the state of the keys, in units of scores. `unit`: of those, in natural units.
  CUTE_DEVICE RowEnd(float maximum, float reference, float sum, float unit, float sink) {
    bool const empty = sum == 0.f;
    float const r = reference == -INFINITY ? rounded_product(maximum, unit * kLog2e) : reference;
    float above = 0.f;  // by how much the sink exceeds r, in log2 units; exactly, also where r is coarse
    float keys = 1.f, total = sum;
    if (sink != -INFINITY) {
      above = reference == -INFINITY ? fmaf(-maximum, unit, sink) * kLog2e : fmaf(sink, kLog2e, -reference);
      keys = empty ? 0.f : exp2_approx(fminf(0.f, -above));
      total = fmaf(keys, sum, empty ? 1.f : exp2_approx(fminf(0.f, above)));
    }
    bool const by_sink = sink != -INFINITY && (empty || above > 0.f);
    factor = empty ? 0.f : keys / total;
    lse = by_sink ? log_sum_exp(sink * kLog2e, total) : log_sum_exp(r, total);
  }
};

/// O and LSE of this warp's rows.
template <ForwardConfig C>
CUTE_DEVICE void write_ranged(FeatureParams const& p, char* smem, typename ForwardTypes<C>::OutputFragment& output,
                              typename ForwardTypes<C>::Softmax const& softmax, int tile_row) {
  using namespace cute;
  using Shared = RangedLayout<C>;
  static_assert(Panels<C.head_dim>::kWidth == Panels<C.head_dim_v()>::kWidth, "rows of O lie within those of Q");
  TilePlace const& place = Shared::place(smem);
  Sequence const& s = place.sequence;
  FeatureTile const& tile = place.tile;
  int const lane = lane_id();
  auto rows = by_row(output);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    QueryRow const at = query_row(p, tile, tile.row_begin + tile_row + accumulator_row(row, lane));
    bool const counts = at.query < s.queries;
    float const sink = p.sinks != nullptr ? p.sinks[at.head] : -INFINITY;
    RowEnd const end(Shared::maxima(smem, tile_row).get(row), softmax.reference[row],
                     QuadOfLanes::sum(softmax.row_sum[row]), score_unit(p), sink);
    float const factor = counts ? end.factor : 0.f;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(rows); ++col) rows(row, col) = factor == 0.f ? 0.f : rows(row, col) * factor;
    if (at.query >= s.rows_q) continue;
    if (p.lse != nullptr && lane % 4 == 0) {
      p.lse[lse_row(p, s, at)] = counts ? end.lse : -INFINITY;
    }
  }
  stage_rows<C>(smem, tile_row, rows, lane);
  __syncwarp();
  for_staged_chunks<C, 1>(smem, tile_row, lane, [&](int row, int column, uint128_t const& chunk) {
    QueryRow const at = query_row(p, tile, tile.row_begin + tile_row + row);
    if (at.query >= s.rows_q || column >= p.head_dim_v) return;
    *reinterpret_cast<uint128_t*>(output_row(p, s, at) + column) = chunk;
  });
}

/// Each warp has query rows of its own and walks all their keys.
template <ForwardConfig C>
CUTE_DEVICE void ranged_rows(FeatureParams const& p, char* smem, Sequence const& sequence, FeatureTile const& tile,
                             KeyWalk const& walk, int warp) {
  using T = ForwardTypes<C>;
  using Shared = RangedLayout<C>;
  if (threadIdx.x == 0) new (&Shared::place(smem)) TilePlace(p, sequence, tile, walk);
  RangedKeys<C> keys(p, smem, warp, walk);
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(score_unit(p) * kLog2e);
  if (keys.blocks > 0) {
    keys.init_shared(sequence, tile);
    load_query_tile<C>(p, smem, sequence, tile);
    cute::cp_async_fence();
    __syncthreads();  // the pipelines' barriers exist, and what the block works on is known
    keys.prologue();
    wait_for_committed_cp_async();  // Q, the only committed group: K and V report to their pipelines
    __syncthreads();
    transform_q<C>(p, smem);
    TileWalk<C, RangedKeys<C>>{smem, keys}.run(output, softmax);
  } else {
    __syncthreads();
  }
  write_ranged<C>(p, smem, output, softmax, keys.tile_row());
}

}  // namespace cutlass_fmha
