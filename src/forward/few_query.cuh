// A warp's walk over its part of the keys, for problems with too few query rows to fill a GPU: there the time from
// launch to result is a chain of latencies, and what counts is that the chain is short and starts early.
//
// The warps of a group share their query rows; warp w takes key blocks w, w + kv_warps, ... from the last to the first.
// A tile of K or V is used by one warp (of each group) only, so it doesn't pass through shared memory: each lane loads
// 16 bytes at a time straight into the registers that its mma wants, no barrier anywhere, and a warp's first block is
// on its way before anything is computed. Two observations make 16-byte loads fit the 4-byte operands:
//   Q K^T  contracts over the head dimension, in any order, so long as Q and K take the same one. Lane t of a quad
//          loads dimensions 8t .. 8t + 7 of 32, and the mma's (step, k) is read as whatever they happen to be.
//   P V    has the head dimension as columns, which may be computed in any order too. Lane group g loads dimensions
//          8g .. 8g + 7 of 64, of the four keys that its operands are made of; column g of n8 tile i is 8g + i.
// A row of O then lies in a quad as 16 consecutive dimensions per lane: OutputColumns.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../core/mask.cuh"
#include "../core/product.cuh"

namespace cutlass_fmha {

/// 16 or 8 bytes. `Constant`: nobody writes them while the kernel runs. Volatile: issued where it stands, not at its
/// first use.
template <bool Constant, class Words, class Element>
CUTE_DEVICE void load_words(Words&& words, Element const* from) {
  constexpr bool kFour = cute::size(cute::remove_cvref_t<Words>{}) == 4;
  if constexpr (kFour && !Constant) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words(0)), "=r"(words(1)), "=r"(words(2)), "=r"(words(3))
                 : "l"(from));
  } else if constexpr (!Constant) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words(0)), "=r"(words(1)) : "l"(from));
  } else if constexpr (kFour) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words(0)), "=r"(words(1)), "=r"(words(2)), "=r"(words(3))
                 : "l"(from));
  } else {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(words(0)), "=r"(words(1)) : "l"(from));
  }
}

/// What a lane reads of a matrix: some rows from `first` on, in ascending order. Rows from `end` on (`Partial`: there
/// may be some) are replaced by the last one before, so that nothing outside the tensor is read. Such a row is masked
/// (K, V) or not written (Q), and the tile that holds its substitute is read anyway: no value comes in from elsewhere.
template <bool Partial, class Element>
struct RowWalk {
  Element const* at;
  int64_t stride;
  int const left;  ///< rows from `first` to the end
  int passed = 0;

  CUTE_DEVICE RowWalk(Element const* tensor, int64_t stride, int first, int end) : stride(stride), left(end - first) {
    at = tensor + (Partial && left <= 0 ? end - 1 : first) * stride;
    asm volatile("" : "+l"(this->stride));  // its multiples are not worth registers through the main loop
  }
  CUTE_DEVICE void advance(int rows) {
    passed += rows;
    if (!Partial || passed < left) at += rows * stride;
  }
};

/// Softmax state of the query rows of one warp in shared memory: what is merged in the end, (m, l) per row. The maxima
/// are the ones that OnlineSoftmax keeps out of registers.
struct FewQueryState {
  float2* rows;

  CUTE_DEVICE float get(int row) const {
    __syncwarp();
    return rows[accumulator_row(row, lane_id())].x;
  }
  CUTE_DEVICE void set(int row, float maximum) const {
    __syncwarp();
    int const lane = lane_id();
    if (lane % 4 == 0) rows[accumulator_row(row, lane)].x = maximum;
  }
  template <class Softmax>
  CUTE_DEVICE void set_sums(Softmax const& softmax) const {
    int const lane = lane_id();
    CUTE_UNROLL
    for (int row = 0; row < int(softmax.row_sum.size()); ++row) {
      float const sum = QuadOfLanes::sum(softmax.row_sum[row]);
      if (lane % 4 == 0) rows[accumulator_row(row, lane)].y = sum;
    }
  }
  template <int Rows>
  CUTE_DEVICE void set_empty() const {
    static_assert(Rows <= 32);
    int const row = lane_id();
    if (row < Rows) rows[row] = make_float2(-INFINITY, 0.f);
  }
};

template <ForwardConfig C>
struct FewQueryMainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;

  using Word = typename T::Word;
  static constexpr int kDimChunks = C.head_dim / 32;  // 16-byte chunks that a lane loads of a row of Q or K
  static constexpr int kPanels = T::P::kCount;        // chunks of a row of V,
  static constexpr int kWidth = T::P::kWidth / 8;     // of this many elements
  static constexpr bool kLoadAhead = C.stages > 1;
  static constexpr bool kConstant = !C.dependent_launch;  // see dependent_launch.cuh

  // Operands in the order in which they are loaded: the 8 elements of a chunk are (pair, k half, parity of the step).
  using QFragments = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>,
                               cute::Shape<cute::_2, cute::Int<kDimChunks>>>,
                   cute::Stride<cute::Stride<cute::_1, cute::Int<8 * kDimChunks>, cute::_2>, cute::Int<16 * kDimChunks>,
                                cute::Stride<cute::_4, cute::_8>>>{}));
  using KFragments = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<C.tile_n / 8>,
                               cute::Shape<cute::_2, cute::Int<kDimChunks>>>,
                   cute::Stride<cute::Stride<cute::_1, cute::_2>, cute::Int<8 * kDimChunks>,
                                cute::Stride<cute::_4, cute::_8>>>{}));
  // Of V, words of two neighbouring dimensions: (word, panel, key of four, step of 16 keys).
  using VWords = decltype(cute::make_tensor<uint32_t>(
      cute::Shape<cute::Int<kWidth / 2>, cute::Int<kPanels>, cute::_4, cute::Int<T::kKeySteps>>{}));
  using Probabilities = OperandA<T, T::kKeySteps>;

  ForwardParams const& params;
  Word const *q, *k, *v;  ///< of this head
  FewQueryState state;    ///< of this warp
  int row_begin;          ///< the warp's first query row
  int kv_warp;            ///< within its group
  int blocks;             ///< key blocks of which the warp's rows see some key

  /// Leaves the unnormalised O in `output`, which is zero at first, and the rest in `state`.
  CUTE_DEVICE void run(Output& output) const {
    if (blocks <= kv_warp) {
      state.template set_empty<T::kRows>();
      return;
    }
    int block = kv_warp + (blocks - 1 - kv_warp) / C.kv_warps * C.kv_warps;
    QFragments q_fragments;
    KFragments k_fragments;
    VWords v_words;
    Scores scores;
    Probabilities probabilities;
    typename T::Softmax softmax(params.scale_log2);
    // Besides sparing most problems the arithmetic of the other branch, this one keeps the loads together: ptxas would
    // move some of them down to their first use, but not past the point where two branches meet.
    if (row_begin + T::kRows <= params.seqlen_q && (block + 1) * C.tile_n <= params.seqlen_k) {
      load_all<false>(block, q_fragments, k_fragments, v_words);
    } else {
      load_all<true>(block, q_fragments, k_fragments, v_words);
    }
    take_sign(q_fragments);
    compute_scores(q_fragments, k_fragments, scores);
    if (kLoadAhead && block >= C.kv_warps) load_k<false>(block - C.kv_warps, k_fragments);
    update<true>(block, scores, probabilities, output, softmax);
    accumulate(probabilities, v_words, output);
    CUTE_NO_UNROLL
    while (block >= C.kv_warps) {
      if constexpr (C.dependent_launch) start_dependents();  // a block of one step has no middle
      block -= C.kv_warps;
      if constexpr (kLoadAhead) load_v<false>(block, v_words);
      if constexpr (!C.q_in_registers) {
        load_q<true>(q_fragments);
        take_sign(q_fragments);
      }
      if constexpr (!kLoadAhead) load_k<false>(block, k_fragments);
      compute_scores(q_fragments, k_fragments, scores);
      if (kLoadAhead && block >= C.kv_warps) load_k<false>(block - C.kv_warps, k_fragments);
      update<false>(block, scores, probabilities, output, softmax);
      if constexpr (!kLoadAhead) load_v<false>(block, v_words);  // not before: the trial takes S, P and O at once
      accumulate(probabilities, v_words, output);
    }
    state.set_sums(softmax);
  }

 private:
  template <bool Partial>
  CUTE_DEVICE void load_all(int block, QFragments& q_fragments, KFragments& k_fragments, VWords& v_words) const {
    load_q<Partial>(q_fragments);
    load_k<Partial>(block, k_fragments);
    load_v<Partial>(block, v_words);
  }

  /// Rows of Q or K, a lane's share of every eighth one.
  template <int Rows, class Walk, class Fragments>
  CUTE_DEVICE void load_rows(Walk walk, Fragments& fragments) const {
    using namespace cute;
    auto words = make_tensor(recast<uint32_t>(fragments).data(), Shape<_4, Int<kDimChunks>, Int<Rows / 8>>{});
    CUTE_UNROLL
    for (int r = 0; r < Rows / 8; ++r) {
      if (r > 0) walk.advance(8);
      CUTE_UNROLL
      for (int chunk = 0; chunk < kDimChunks; ++chunk) load_words<kConstant>(words(_, chunk, r), walk.at + 32 * chunk);
    }
  }
  template <bool Partial>
  CUTE_DEVICE void load_q(QFragments& fragments) const {
    int const lane = lane_id();
    load_rows<T::kRows>(
        RowWalk<Partial, Word>(q + lane % 4 * 8, params.q_stride.seqlen, row_begin + lane / 4, params.seqlen_q),
        fragments);
  }
  template <bool Partial>
  CUTE_DEVICE void load_k(int block, KFragments& fragments) const {
    int const lane = lane_id();
    load_rows<C.tile_n>(
        RowWalk<Partial, Word>(k + lane % 4 * 8, params.k_stride.seqlen, block * C.tile_n + lane / 4, params.seqlen_k),
        fragments);
  }

  /// The keys of a B operand: 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, a chunk of dimensions of each.
  template <bool Partial>
  CUTE_DEVICE void load_v(int block, VWords& words) const {
    using namespace cute;
    int const lane = lane_id();
    RowWalk<Partial, Word> walk(v + lane / 4 * kWidth, params.v_stride.seqlen, block * C.tile_n + lane % 4 * 2,
                                params.seqlen_k);
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int key = 0; key < 4; ++key) {
        if (step + key > 0) walk.advance(key % 2 == 1 ? 1 : 7);
        CUTE_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          load_words<kConstant>(words(_, panel, key, step), walk.at + panel * 8 * kWidth);
        }
      }
    }
  }

  /// Moves the sign of the softmax scale into Q, see set_scale().
  CUTE_DEVICE void take_sign(QFragments& fragments) const {
    auto words = cute::recast<uint32_t>(fragments);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(words); ++i) words(i) = (words(i) & params.q_and) ^ params.q_xor;
  }

  /// scores = Q K^T
  CUTE_DEVICE static void compute_scores(QFragments const& q, KFragments const& k, Scores& scores) {
    using namespace cute;
    clear(scores);
    CUTE_UNROLL
    for (int n = 0; n < C.tile_n / 8; ++n) {
      CUTE_UNROLL
      for (int step = 0; step < T::kDimSteps; ++step) multiply_n8<T>(q(_, _, step), k(_, n, step), scores, n);
    }
    repeat_mma_passes<typename T::Mma, T::kDimSteps>(scores);
  }

  /// output += P V
  CUTE_DEVICE static void accumulate(Probabilities const& probabilities, VWords const& words, Output& output) {
    using namespace cute;
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int n = 0; n < C.head_dim / 8; ++n) {
        int const panel = n / kWidth, i = n % kWidth;
        uint32_t const half = i % 2 == 0 ? 0x5410 : 0x7632;  // the low or the high elements of two words
        auto v = make_tensor<Element>(Shape<Shape<_2, _2>>{});
        auto operand = recast<uint32_t>(v);
        operand(0) = __byte_perm(words(i / 2, panel, 0, step), words(i / 2, panel, 1, step), half);
        operand(1) = __byte_perm(words(i / 2, panel, 2, step), words(i / 2, panel, 3, step), half);
        multiply_n8<T>(probabilities(_, _, step), v, output, n);
      }
      repeat_mma_passes<typename T::Mma>(output);
    }
  }

  /// Masks the scores where needed and turns them into probabilities.
  template <bool First>
  CUTE_DEVICE void update(int block, Scores& scores, Probabilities& probabilities, Output& output,
                          typename T::Softmax& softmax) const {
    using namespace cute;
    if ((block + 1) * C.tile_n > visible_keys(params, row_begin))
      apply_mask(params, by_row(scores), score_coordinates<C>(), row_begin, block * C.tile_n);
    softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), state);
  }
};

}  // namespace cutlass_fmha
