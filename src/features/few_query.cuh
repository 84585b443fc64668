// Keys of scored rows for the walk of forward/step_walk.cuh: all warps of a block have its queries and divide the
// keys. Each brings its own to shared memory, by cp.async, as many steps ahead as there are stages, and waits for no
// other before the end: a block keeps its loads in flight, which is what decoding is bound by.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../forward/step_walk.cuh"
#include "layout.cuh"

namespace cutlass_fmha {

/// Fills tiles of `Rows` rows, 8 or 4 of them at a time, with the lanes of one warp.
template <int HeadDim, int Rows, int ElementBytes>
struct WarpTile {
  using Word = Bits<ElementBytes>;
  using P = Panels<HeadDim, ElementBytes>;
  static constexpr int kChunks = P::kChunks;
  static constexpr int kRowsPerPass = 32 / kChunks;
  static constexpr int kPasses = Rows / kRowsPerPass;
  static constexpr int kBytes = Rows * HeadDim * ElementBytes;
  static_assert(Rows % 8 == 0 && (kRowsPerPass == 4 || kRowsPerPass == 8));

  CUTE_DEVICE static int first_row(int lane) { return lane / kChunks; }
  CUTE_DEVICE static int column(int lane) { return lane % kChunks * P::kChunk; }

  /// Where a lane's chunk of a pass stands in a tile, by that of the first pass. Four rows on, the swizzle flips one
  /// bit of the chunk's number.
  CUTE_DEVICE static uint32_t offset(uint32_t first, int pass) {
    return (first ^ (kRowsPerPass == 4 && pass % 2 == 1 ? 64 : 0)) + pass * kRowsPerPass * P::kRowBytes;
  }
  CUTE_DEVICE static uint32_t first_offset(int lane) {
    return P::template byte_offset<Rows>(first_row(lane), column(lane));
  }

  /// One pass: a lane's chunk of each panel of a row. `dimensions`: how many the row has from the lane's column on; 0
  /// or fewer where the row isn't there, and then nothing is read. The rest of a chunk becomes zeros.
  CUTE_DEVICE static void load(char* tile, uint32_t offset, Word const* from, int dimensions) {
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      auto& to = *reinterpret_cast<cute::uint128_t*>(tile + offset + panel * Rows * P::kRowBytes);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(from + panel * P::kWidth), to, dimensions > panel * P::kWidth);
    }
  }
  /// The same of rows of any alignment and any number of dimensions.
  CUTE_DEVICE static void load_elements(char* tile, uint32_t offset, Word const* from, int dimensions) {
    CUTE_NO_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      auto* const to = reinterpret_cast<Word*>(tile + offset + panel * Rows * P::kRowBytes);
      CUTE_NO_UNROLL
      for (int e = 0; e < P::kChunk; ++e)
        to[e] = panel * P::kWidth + e < dimensions ? from[panel * P::kWidth + e] : Word(0);
    }
  }
};

/// The rows of k or v that one lane copies.
template <class Word>
struct LaneRows {
  Word const* column;  ///< of the sequence's entry and head
  int64_t stride;      ///< from row to row
  uint32_t offset;     ///< of the lane's first chunk in a tile
  int dimensions;      ///< from that column on
  Word const* next;    ///< the lane's first row of the next step; where there are pages, of page 0
};

template <ForwardConfig C>
struct FewQueryFeatureKeys {
  using T = ForwardTypes<C>;
  using Word = typename T::Word;
  using Rows = LaneRows<Word>;
  using Shared = FeatureLayout<C>;
  using Product = WarpProduct<C>;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using Held = typename Product::QFragments;
  using KCopy = WarpTile<C.head_dim, C.tile_n, C.element_bytes()>;
  using VCopy = WarpTile<C.head_dim_v(), C.tile_n, C.element_bytes()>;
  /// Keys whose rows follow each other wherever a sequence begins with a page: pages are multiples of so many.
  static constexpr int kRun = 16, kRuns = C.tile_n / kRun;
  static constexpr bool kFirstApart = false;         ///< rows may start with a sink
  static constexpr int kYounger = 2 * C.stages - 1;  ///< what a step waits for is always the oldest group of copies
  static_assert(C.kv_warps == C.warps && T::kRows == C.tile_m, "every warp has all rows of the tile");
  static_assert(int(KCopy::kRowsPerPass) == int(VCopy::kRowsPerPass), "a lane copies the same rows of K and of V");

  FeatureParams const& p;
  char* const smem;
  Sequence const& sequence;
  FeatureTile const& tile;
  KeyWalk const& walk;
  int const key_part;  ///< of the keys of a step
  int const lane;
  int const last_begin;   ///< the first key of step 0, unless a list of blocks says which keys a step has
  bool const regular;     ///< rows of whole vectors, and no run of keys lies in two pages
  bool const listed;      ///< by a list of blocks
  CommonView const view;  ///< what the tile's queries see
  bool const whole;       ///< step 0 has all of its keys, and then each step; so has the first run that is seen
  Rows k, v;
  uint32_t const k_offset, v_offset;  ///< this lane's for ldmatrix
  int page[kRuns];                    ///< of the runs of the step whose K is loaded next
  int64_t v_first[kRuns];             ///< where those of the step whose V is loaded next begin

  CUTE_DEVICE FewQueryFeatureKeys(FeatureParams const& p, char* smem, Sequence const& sequence, FeatureTile const& tile,
                                  KeyWalk const& walk, int key_part)
      : p(p),
        smem(smem),
        sequence(sequence),
        tile(tile),
        walk(walk),
        key_part(key_part),
        lane(lane_id()),
        last_begin((walk.first + walk.skipped + walk.tiles - 1) * Shared::kStepKeys + key_part * C.tile_n),
        regular(p.vectors && (p.page_table == nullptr || sequence.first_k % kRun == 0)),
        listed(walk.blocks != nullptr),
        view(p, sequence, p.by_pack.quotient(tile.row_begin), last_query()),
        whole(larger(last_begin + C.tile_n, first_run() + kRun) <= sequence.keys),
        k(lane_rows<KCopy>(p.k, p.k_stride, p.head_dim)),
        v(lane_rows<VCopy>(p.v, p.v_stride, p.head_dim_v)),
        k_offset(settled(Product::k_lane(lane))),
        v_offset(settled(Product::v_lane(lane))) {}

  CUTE_DEVICE RowMaxima maxima() const { return {Shared::KeyParts::maxima(smem) + key_part * C.tile_m}; }

  /// Asks for the first steps, each K and each V as a group of copies, and with the first of them for Q.
  CUTE_DEVICE void request_first() {
    copy_k(0);
    load_query_tile<C>(p, smem, sequence, tile);
    cute::cp_async_fence();
    load_v(0);
    CUTE_UNROLL
    for (int step = 1; step < C.stages; ++step) {
      load_k(step);
      load_v(step);
    }
  }

  // What the walk asks for, after that.
  CUTE_DEVICE int start(Held& q) const {
    cute::cp_async_wait<kYounger>();
    __syncthreads();  // all of Q
    Product::keep_q(smem, Product::q_lane(lane, 0), q);
    return 0;
  }
  CUTE_DEVICE bool more(int step) const { return step + 1 < walk.tiles; }
  CUTE_DEVICE static void next(int& step, Held&) { ++step; }
  CUTE_DEVICE static bool sees(int) { return true; }
  CUTE_DEVICE void multiply(int step, Held const& kept, Scores& scores) const {
    cute::cp_async_wait<kYounger>();
    __syncwarp();  // this step's K is there for all lanes
    Product::query_tile(smem, kept, Product::q_lane(lane, 0), k_tile(step), k_offset, scores);
  }
  template <bool First>
  CUTE_DEVICE void after_scores(int step, Held&) {
    __syncwarp();  // nobody reads K any more
    load_k(step + C.stages);
    if (C.dependent_launch && step == walk.tiles / 2) start_dependents();
  }
  CUTE_DEVICE int key_begin(int step) const {
    return listed ? walk.key_begin(p, step, Shared::kStepKeys) + key_part * C.tile_n
                  : last_begin - step * Shared::kStepKeys;
  }
  CUTE_DEVICE void before_softmax(int key_begin, Scores& scores) const {
    auto const block = this->block(key_begin);
    if (!p.raw_scores) block.modify(by_row(scores));
    bool const by_range = !view.all_see(key_begin, C.tile_n);
    if (by_range || p.mask != nullptr) block.hide(by_row(scores), by_range);
  }
  CUTE_DEVICE void after_softmax(int key_begin, Probabilities& probabilities) const {
    if (p.dropout_threshold != 0) block(key_begin).drop_out(pairs_by_row<T>(probabilities));
  }
  template <bool First>
  CUTE_DEVICE static void before_values(int, Held&) {}
  CUTE_DEVICE void add_values(int step, Held const&, Probabilities const& probabilities, Output& output) const {
    cute::cp_async_wait<kYounger>();
    __syncwarp();  // the same of its V
    Product::add_tile(smem, probabilities, v_tile(step), v_offset, output);
  }
  CUTE_DEVICE void after_values(int step) {
    __syncwarp();
    load_v(step + C.stages);
  }

 private:
  template <class Tile>
  CUTE_DEVICE Rows lane_rows(void const* tensor, Strides const& stride, int head_dim) const {
    int const column = Tile::column(lane), head_kv = tile.head / (p.num_heads / p.num_heads_kv);
    auto const* const from =
        static_cast<Word const*>(tensor) + head_kv * stride.head + key_entry_offset(p, stride, sequence) + column;
    int const first = (p.page_table == nullptr ? sequence.first_k + last_begin : 0) + Tile::first_row(lane);
    return {from, stride.seqlen, settled(Tile::first_offset(lane)), int(settled(head_dim - column)),
            settled(from + first * stride.seqlen)};
  }
  CUTE_DEVICE int last_query() const {
    return smaller(p.by_pack.quotient(tile.row_begin + C.tile_m - 1), sequence.queries - 1);
  }
  CUTE_DEVICE LeftBehind behind() const { return {{view.some_begin, view.some_end, view.prefix}}; }
  /// Without a prefix, the first run of which a key is seen.
  CUTE_DEVICE int first_run() const { return view.some_begin & -kRun; }
  CUTE_DEVICE ScoreBlock<C> block(int key_begin) const { return {p, sequence, tile, tile.row_begin, key_begin}; }
  CUTE_DEVICE uint32_t k_tile(int step) const {
    return Shared::kKOffset + (uint32_t(step) % C.stages * C.kv_warps + key_part) * KCopy::kBytes;
  }
  CUTE_DEVICE uint32_t v_tile(int step) const {
    return Shared::kVOffset + (uint32_t(step) % C.stages * C.kv_warps + key_part) * VCopy::kBytes;
  }

  // Steps are loaded one after another, K and V of each. Where there is none, the group is empty: their number stays
  // the same.
  CUTE_DEVICE void copy_k(int step) {
    if (step >= walk.tiles) return;
    int64_t k_first[kRuns];
    if (p.page_table != nullptr) turn_pages(step, k_first);
    copy_tile<KCopy>(k_tile(step), k, p.k_stride, k_first, step);
  }
  CUTE_DEVICE void load_k(int step) {
    copy_k(step);
    cute::cp_async_fence();
  }
  CUTE_DEVICE void load_v(int step) {
    if (step < walk.tiles) copy_tile<VCopy>(v_tile(step), v, p.v_stride, v_first, step);
    cute::cp_async_fence();
  }

  /// Where keys are in pages: the first row of a run of a step, also of one after the last. In place of a run that a
  /// window left behind, whose page may be gone, one of the first that are there.
  CUTE_DEVICE int row_of_run(int step, int run) const {
    int const key = smaller(last_begin - step * Shared::kStepKeys + run * kRun, sequence.keys - 1);
    int const kept = view.prefix > 0 ? 0 : first_run();
    return sequence.first_k + (key < kept || behind().has(key, kRun) ? kept : key);
  }
  /// Where the runs of a step stand in their pages, and a look at what pages the next step's are in: it takes as long
  /// as a copy does, so the answer is for the next call.
  CUTE_DEVICE void turn_pages(int step, int64_t (&k_first)[kRuns]) {
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      int const row = row_of_run(step, run);
      if (step == 0) page[run] = page_number(p, sequence, row);
      k_first[run] = page_row_offset(p, p.k_stride, page[run], row);
      v_first[run] = page_row_offset(p, p.v_stride, page[run], row);
      page[run] = page_number(p, sequence, row_of_run(step + 1, run));
    }
  }

  /// From the last keys to the first: steps after step 0 are whole, unless a list of blocks says which keys they have.
  template <class Tile>
  CUTE_DEVICE void copy_tile(uint32_t to, Rows& rows, Strides const& stride, int64_t const (&first)[kRuns],
                             int step) const {
    if (!regular) {
      copy_rows<Tile>(to, rows, stride, key_begin(step));
    } else if (listed || (step == 0 && !whole)) {
      copy_some_keys<Tile>(to, rows, stride, key_begin(step));
    } else if (p.page_table == nullptr) {
      copy_run<Tile, C.tile_n>(to, rows.next, 0, rows);
    } else {
      CUTE_UNROLL
      for (int run = 0; run < kRuns; ++run) copy_run<Tile, kRun>(to, rows.next + first[run], run * kRun, rows);
    }
    if (p.page_table == nullptr) rows.next -= Shared::kStepKeys * rows.stride;
  }
  /// Rows that follow each other, from the tile's row `first` on.
  template <class Tile, int Count>
  CUTE_DEVICE void copy_run(uint32_t to, Word const* from, int first, Rows const& rows) const {
    CUTE_UNROLL
    for (int row = 0; row < Count; row += Tile::kRowsPerPass) {
      Tile::load(smem + to, Tile::offset(rows.offset, (first + row) / Tile::kRowsPerPass), from, rows.dimensions);
      from += Tile::kRowsPerPass * rows.stride;
    }
  }
  /// The same where keys may be missing: at the end, or those that a window left behind.
  template <class Tile>
  CUTE_DEVICE void copy_some_keys(uint32_t to, Rows const& rows, Strides const& stride, int begin) const {
    constexpr int kRunPasses = kRun / Tile::kRowsPerPass;
    int const first = Tile::first_row(lane), keys = sequence.keys - begin - first;
    CUTE_UNROLL
    for (int run = 0; run < C.tile_n / kRun; ++run) {
      bool const gone = behind().has(begin + run * kRun, kRun);
      int const row = sequence.first_k + behind().kept(smaller(begin + run * kRun, sequence.keys - 1), kRun);
      Word const* from = rows.column + key_row_offset(p, stride, sequence, row) + first * rows.stride;
      CUTE_UNROLL
      for (int pass = run * kRunPasses; pass < (run + 1) * kRunPasses; ++pass) {
        Tile::load(smem + to, Tile::offset(rows.offset, pass), from,
                   pass * Tile::kRowsPerPass < keys && !gone ? rows.dimensions : 0);
        from += Tile::kRowsPerPass * rows.stride;
      }
    }
  }
  /// The same where pages end anywhere or rows are not aligned.
  template <class Tile>
  CUTE_DEVICE void copy_rows(uint32_t to, Rows const& rows, Strides const& stride, int begin) const {
    CUTE_NO_UNROLL
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      int const key = begin + Tile::first_row(lane) + pass * Tile::kRowsPerPass;
      // There may be none, or a window left it behind; then nothing is read.
      int const row = sequence.first_k + behind().kept(smaller(key, sequence.keys - 1), 1);
      Word const* const from = rows.column + key_row_offset(p, stride, sequence, row);
      int const there = key < sequence.keys && !behind().has(key, 1) ? rows.dimensions : 0;
      if (p.vectors) {
        Tile::load(smem + to, Tile::offset(rows.offset, pass), from, there);
      } else {
        Tile::load_elements(smem + to, Tile::offset(rows.offset, pass), from, there);
      }
    }
  }
};

}  // namespace cutlass_fmha
