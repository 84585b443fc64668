// The main loop of general rows for few queries, all of which every warp of a block has: the warps divide the keys, and
// each brings its own to shared memory, by cp.async, as many steps ahead as there are stages. No warp waits for another
// before the end, so that a block keeps its loads in flight, which is what decoding is bound by.
#pragma once

#include "mainloop.cuh"

namespace cutlass_fmha {

/// Fills tiles of `Rows` rows, 8 or 4 of them at a time, with the lanes of one warp.
template <int HeadDim, int Rows>
struct WarpTile {
  using P = Panels<HeadDim>;
  static constexpr int kChunks = P::kWidth / 8;
  static constexpr int kRowsPerPass = 32 / kChunks;
  static constexpr int kPasses = Rows / kRowsPerPass;
  static constexpr int kBytes = Rows * HeadDim * 2;
  static_assert(Rows % 8 == 0 && (kRowsPerPass == 4 || kRowsPerPass == 8));

  CUTE_DEVICE static int first_row(int lane) { return lane / kChunks; }
  CUTE_DEVICE static int column(int lane) { return lane % kChunks * 8; }

  /// Where a lane's chunk of a pass stands in a tile. Four rows on, the swizzle flips one bit of the chunk's number.
  CUTE_DEVICE static uint32_t offset(int lane, int pass) {
    uint32_t const first = 2 * uint32_t(typename P::template Layout<Rows>{}(first_row(lane), column(lane)));
    return (first ^ (kRowsPerPass == 4 && pass % 2 == 1 ? 64 : 0)) + pass * kRowsPerPass * P::kWidth * 2;
  }

  /// One pass: a lane's chunk of each panel of a row. `dimensions`: how many the row has from the lane's column on; 0
  /// or fewer where the row isn't there, and then nothing is read. The rest of a chunk becomes zeros.
  CUTE_DEVICE static void load(char* tile, uint32_t offset, uint16_t const* from, int dimensions) {
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      auto& to = *reinterpret_cast<cute::uint128_t*>(tile + offset + panel * Rows * P::kWidth * 2);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(from + panel * P::kWidth), to, dimensions > panel * P::kWidth);
    }
  }
  /// The same of rows of any alignment and any number of dimensions.
  CUTE_DEVICE static void load_elements(char* tile, uint32_t offset, uint16_t const* from, int dimensions) {
    CUTE_NO_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      auto* const to = reinterpret_cast<uint16_t*>(tile + offset + panel * Rows * P::kWidth * 2);
      CUTE_NO_UNROLL
      for (int e = 0; e < 8; ++e)
        to[e] = panel * P::kWidth + e < dimensions ? from[panel * P::kWidth + e] : uint16_t(0);
    }
  }
};

template <ForwardConfig C>
struct SharesMainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Shared = GeneralLayout<C>;
  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m>;
  using KTile = LdmatrixTile<C.head_dim, C.tile_n>;
  using VTile = LdmatrixTile<C.head_dim_v(), C.tile_n>;
  using KCopy = WarpTile<C.head_dim, C.tile_n>;
  using VCopy = WarpTile<C.head_dim_v(), C.tile_n>;
  using Step = typename GeneralMainloop<C>::StepA;
  using QFragments = typename GeneralMainloop<C>::QFragments;
  using Probabilities = typename GeneralMainloop<C>::Probabilities;
  /// Keys whose rows follow each other wherever a sequence begins with a page: pages are multiples of so many.
  static constexpr int kRun = 16;
  static_assert(C.kv_warps == C.warps && T::kRows == C.tile_m, "every warp has all rows of the tile");
  static_assert(int(KCopy::kRowsPerPass) == int(VCopy::kRowsPerPass), "a lane copies the same rows of K and of V");

  GeneralParams const& p;
  char* const smem;
  Sequence const& sequence;
  GeneralTile const& tile;
  KeyWalk const& walk;
  int const share;  ///< of the keys of a step
  int const lane;
  uint16_t const *const k, *const v;     ///< this lane's column of the sequence's entry and head
  int const k_dimensions, v_dimensions;  ///< from that column on
  bool const regular;                    ///< rows of whole vectors, and no run of keys lies in two pages
  CommonView const view;                 ///< what the tile's queries see

  CUTE_DEVICE SharesMainloop(GeneralParams const& p, char* smem, Sequence const& sequence, GeneralTile const& tile,
                             KeyWalk const& walk, int share)
      : p(p),
        smem(smem),
        sequence(sequence),
        tile(tile),
        walk(walk),
        share(share),
        lane(threadIdx.x % 32),
        k(slice(p.k, p.k_stride) + KCopy::column(lane)),
        v(slice(p.v, p.v_stride) + VCopy::column(lane)),
        k_dimensions(p.head_dim - KCopy::column(lane)),
        v_dimensions(p.head_dim_v - VCopy::column(lane)),
        regular(p.vectors && (p.page_table == nullptr || sequence.first_k % kRun == 0)),
        view(p, sequence, p.by_pack.quotient(tile.row_begin), last_query()) {}

  CUTE_DEVICE RowMaxima maxima() const { return {Shared::Shares::maxima(smem) + share * C.tile_m}; }

  /// Leaves the unnormalised O of this warp's share of the keys in `output`, its l in `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) const {
    using namespace cute;
    // Groups of copies: K and V of each step, Q with the first K.
    load_k(0);
    load_query_tile<C>(p, smem, sequence, tile);
    cp_async_fence();
    load_v(0);
    CUTE_UNROLL
    for (int step = 1; step < C.stages; ++step) load(step);
    cp_async_wait<2 * C.stages - 1>();  // Q
    __syncthreads();                    // all of it
    QFragments q_fragments;
    if constexpr (C.q_in_registers) {
      CUTE_UNROLL
      for (int d = 0; d < T::kDimSteps; ++d) load_q(d, q_fragments(_, _, d));
    }
    CUTE_NO_UNROLL
    for (int step = 0; step < walk.tiles; ++step) {
      cp_async_wait<2 * C.stages - 1>();
      __syncwarp();  // this step's K is there for all lanes
      Scores scores;
      compute_scores(step, q_fragments, scores);
      int const key_begin = this->key_begin(step);
      ScoreBlock<C> const block{p, sequence, tile, tile.row_begin, key_begin};
      if (!p.raw_scores) block.modify(by_row(scores));
      bool const by_range = !view.all_see(key_begin, C.tile_n);
      if (by_range || p.mask != nullptr) block.hide(by_row(scores), by_range);
      Probabilities probabilities;
      softmax.template step<false>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), maxima());
      if (p.dropout_threshold != 0) block.drop_out(pairs_by_row<T>(probabilities));
      cp_async_wait<2 * C.stages - 2>();
      __syncwarp();  // and its V
      accumulate(step, probabilities, output);
      __syncwarp();  // nobody reads this step any more
      load(step + C.stages);
    }
  }

 private:
  CUTE_DEVICE uint16_t const* slice(void const* tensor, Strides const& stride) const {
    int const head_kv = tile.head / (p.num_heads / p.num_heads_kv);
    return static_cast<uint16_t const*>(tensor) + head_kv * stride.head + key_entry_offset(p, stride, sequence);
  }
  CUTE_DEVICE int last_query() const {
    return smaller(p.by_pack.quotient(tile.row_begin + C.tile_m - 1), sequence.queries - 1);
  }
  CUTE_DEVICE int key_begin(int step) const { return walk.key_begin(step, Shared::kStepKeys) + share * C.tile_n; }
  CUTE_DEVICE uint32_t k_tile(int step) const {
    return Shared::kKOffset + (uint32_t(step) % C.stages * C.kv_warps + share) * KCopy::kBytes;
  }
  CUTE_DEVICE uint32_t v_tile(int step) const {
    return Shared::kVOffset + (uint32_t(step) % C.stages * C.kv_warps + share) * VCopy::kBytes;
  }

  /// Empty groups, where there is no step: the number of groups in flight stays the same.
  CUTE_DEVICE void load(int step) const {
    load_k(step);
    cute::cp_async_fence();
    load_v(step);
  }
  CUTE_DEVICE void load_k(int step) const {
    if (step < walk.tiles) copy_tile<KCopy>(k_tile(step), k, p.k_stride, key_begin(step), k_dimensions);
  }
  CUTE_DEVICE void load_v(int step) const {
    if (step < walk.tiles) copy_tile<VCopy>(v_tile(step), v, p.v_stride, key_begin(step), v_dimensions);
    cute::cp_async_fence();
  }

  template <class Tile>
  CUTE_DEVICE void copy_tile(uint32_t to, uint16_t const* tensor, Strides const& stride, int begin,
                             int dimensions) const {
    if (!regular) return copy_rows<Tile>(to, tensor, stride, begin, dimensions);
    constexpr int kRunPasses = kRun / Tile::kRowsPerPass;
    int const first = Tile::first_row(lane), keys = sequence.keys - begin - first;
    CUTE_UNROLL
    for (int run = 0; run < C.tile_n / kRun; ++run) {
      int const row = sequence.first_k + smaller(begin + run * kRun, sequence.keys - 1);
      uint16_t const* from = tensor + key_row_offset(p, stride, sequence, row) + first * stride.seqlen;
      CUTE_UNROLL
      for (int pass = run * kRunPasses; pass < (run + 1) * kRunPasses; ++pass) {
        Tile::load(smem + to, Tile::offset(lane, pass), from, pass * Tile::kRowsPerPass < keys ? dimensions : 0);
        from += Tile::kRowsPerPass * stride.seqlen;
      }
    }
  }
  /// The same where pages end anywhere or rows are not aligned.
  template <class Tile>
  CUTE_DEVICE void copy_rows(uint32_t to, uint16_t const* tensor, Strides const& stride, int begin,
                             int dimensions) const {
    CUTE_NO_UNROLL
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      int const key = begin + Tile::first_row(lane) + pass * Tile::kRowsPerPass;
      int const row = sequence.first_k + smaller(key, sequence.keys - 1);  // there may be none; then nothing is read
      uint16_t const* const from = tensor + key_row_offset(p, stride, sequence, row);
      int const there = key < sequence.keys ? dimensions : 0;
      if (p.vectors) {
        Tile::load(smem + to, Tile::offset(lane, pass), from, there);
      } else {
        Tile::load_elements(smem + to, Tile::offset(lane, pass), from, there);
      }
    }
  }

  template <class Fragment>
  CUTE_DEVICE void load_q(int step, Fragment&& fragment) const {
    uint32_t const offset = QTile::lane_offset(lane % 16, lane / 16 * 8);
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_matrix<cute::SM75_U32x4_LDSM_N>(smem, QTile::piece(offset, m, step), fragment(cute::_, m));
    }
  }

  /// scores = Q K^T of this warp's keys of a step.
  CUTE_DEVICE void compute_scores(int step, QFragments const& q_fragments, Scores& scores) const {
    using namespace cute;
    clear(scores);
    uint32_t const offset = KTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    CUTE_UNROLL
    for (int d = 0; d < T::kDimSteps; ++d) {
      Step q;
      if constexpr (C.q_in_registers) {
        cute::copy(q_fragments(_, _, d), q);
      } else {
        load_q(d, q);
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        auto k = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U32x4_LDSM_N>(smem, k_tile(step) + KTile::piece(offset, n, d), k);
        multiply<T>(q, k, scores, n);
      }
    }
  }

  /// output += P V of this warp's keys of a step.
  CUTE_DEVICE void accumulate(int step, Probabilities const& probabilities, Output& output) const {
    using namespace cute;
    uint32_t const offset = VTile::lane_offset(lane % 16, lane / 16 * 8);
    CUTE_UNROLL
    for (int k = 0; k < T::kKeySteps; ++k) {
      CUTE_UNROLL
      for (int n = 0; n < T::kValueSteps; ++n) {
        auto v = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});
        load_matrix<SM75_U16x8_LDSM_T>(smem, v_tile(step) + VTile::piece(offset, k, n), v);
        multiply<T>(probabilities(_, _, k), v, output, n);
      }
    }
  }
};

}  // namespace cutlass_fmha
