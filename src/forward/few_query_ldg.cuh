// Keys for the walk of step_walk.cuh that no other warp of a group wants: warp w takes blocks w, w + kv_warps, ...
//
// So a tile of K or V doesn't pass through shared memory: each lane loads 16 bytes at a time straight into the
// registers that its mma wants, and a warp's first block is on its way before anything is computed. Two observations
// make 16-byte loads fit the 4-byte operands:
//   Q K^T  contracts over the head dimension, in any order, so long as Q and K take the same one. Lane t of a quad
//          loads dimensions 8t .. 8t + 7 of 32, and the mma's (step, k) is read as whatever they happen to be.
//   P V    has the head dimension as columns, which may be computed in any order too. Lane group g loads dimensions
//          8g .. 8g + 7 of 64, of the four keys that its operands are made of; column g of n8 tile i is 8g + i.
// A row of O then lies in a quad as 16 consecutive dimensions per lane: LdgKeyParts.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../core/key_parts.cuh"
#include "step_walk.cuh"

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

template <ForwardConfig C>
struct LdgKeys {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;

  using Word = typename T::Word;
  static constexpr int kDimChunks = C.head_dim / 32;  // 16-byte chunks that a lane loads of a row of Q or K
  static constexpr int kPanels = T::P::kCount;        // chunks of a row of V,
  static constexpr int kWidth = T::P::kWidth / 8;     // of this many elements
  static constexpr bool kLoadAhead = C.stages > 1;
  static constexpr bool kFirstApart = true;
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
  struct Held {
    QFragments q;
    KFragments k;
    VWords v;
  };

  ForwardParams const& params;
  Word const *q, *k, *v;  ///< of this head
  RowMaxima row_maxima;
  int row_begin;  ///< the warp's first query row
  int kv_warp;    ///< within its group
  int blocks;     ///< key blocks of which the warp's rows see some key

  // What the walk asks for; steps are numbered by their blocks.
  CUTE_DEVICE RowMaxima maxima() const { return row_maxima; }
  CUTE_DEVICE int start(Held& held) const {
    int const block = kv_warp + (blocks - 1 - kv_warp) / C.kv_warps * C.kv_warps;
    // Besides sparing most problems the arithmetic of the other branch, this one keeps the loads together: ptxas would
    // move some of them down to their first use, but not past the point where two branches meet.
    if (row_begin + T::kRows <= params.seqlen_q && (block + 1) * C.tile_n <= params.seqlen_k) {
      load_all<false>(block, held);
    } else {
      load_all<true>(block, held);
    }
    take_sign(held.q);
    return block;
  }
  CUTE_DEVICE static bool more(int block) { return block >= C.kv_warps; }
  CUTE_DEVICE void next(int& block, Held& held) const {
    if constexpr (C.dependent_launch) start_dependents();  // a block of one step has no middle
    block -= C.kv_warps;
    if constexpr (kLoadAhead) load_v<false>(block, held.v);
    if constexpr (!C.q_in_registers) {
      load_q<true>(held.q);
      take_sign(held.q);
    }
    if constexpr (!kLoadAhead) load_k<false>(block, held.k);
  }
  template <bool First>
  CUTE_DEVICE void after_scores(int block, Held& held) const {
    if (kLoadAhead && block >= C.kv_warps) load_k<false>(block - C.kv_warps, held.k);
  }
  CUTE_DEVICE static int key_begin(int block) { return block * C.tile_n; }
  CUTE_DEVICE void before_softmax(int key_begin, Scores& scores) const {
    hide_unseen<C>(params, row_begin, key_begin, scores);
  }
  CUTE_DEVICE static void after_softmax(int, Probabilities&) {}
  template <bool First>
  CUTE_DEVICE void before_values(int block, Held& held) const {
    if constexpr (!First && !kLoadAhead) load_v<false>(block, held.v);  // the trial takes S, P and O at once
  }
  CUTE_DEVICE static void after_values(int) {}

  CUTE_DEVICE static void multiply(int, Held const& held, Scores& scores) {
    using namespace cute;
    clear(scores);
    CUTE_UNROLL
    for (int n = 0; n < C.tile_n / 8; ++n) {
      CUTE_UNROLL
      for (int step = 0; step < T::kDimSteps; ++step) multiply_n8<T>(held.q(_, _, step), held.k(_, n, step), scores, n);
    }
    repeat_mma_passes<typename T::Mma, T::kDimSteps>(scores);
  }
  CUTE_DEVICE static void add_values(int, Held const& held, Probabilities const& probabilities, Output& output) {
    using namespace cute;
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int n = 0; n < C.head_dim / 8; ++n) {
        int const panel = n / kWidth, i = n % kWidth;
        uint32_t const half = i % 2 == 0 ? 0x5410 : 0x7632;  // the low or the high elements of two words
        auto v = make_tensor<Element>(Shape<Shape<_2, _2>>{});
        auto operand = recast<uint32_t>(v);
        operand(0) = __byte_perm(held.v(i / 2, panel, 0, step), held.v(i / 2, panel, 1, step), half);
        operand(1) = __byte_perm(held.v(i / 2, panel, 2, step), held.v(i / 2, panel, 3, step), half);
        multiply_n8<T>(probabilities(_, _, step), v, output, n);
      }
      repeat_mma_passes<typename T::Mma>(output);
    }
  }

 private:
  template <bool Partial>
  CUTE_DEVICE void load_all(int block, Held& held) const {
    load_q<Partial>(held.q);
    load_k<Partial>(block, held.k);
    load_v<Partial>(block, held.v);
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
};

/// Where key parts of such rows meet.
///
/// A chunk of 8 dimensions is 8 floats here, in two pieces of 16 bytes. Where they lie in a row: a quad's lanes hold
/// the chunks (or, with panels of 32 dimensions, halves of them) that are written together, and must find them in
/// neighbouring pieces; so must the eight lanes that read together. The XOR keeps two neighbouring rows, which are
/// written together, in different banks.
template <ForwardConfig C>
struct LdgKeyParts : KeyPartStates<C, C.head_dim, 0> {
  using P = typename ForwardTypes<C>::P;
  static constexpr int kChunks = C.head_dim / 8;
  static constexpr int kPanelChunks = P::kChunks;  // 8 or 4: two chunks or one for each lane of a quad

  CUTE_DEVICE static int dimension(int place) { return chunk_at(unsigned(place) / 8) * 8; }
  CUTE_DEVICE static float4 const& at(char* smem, int key_part, int row, int place) {
    return piece(smem, key_part, row, unsigned(place) / 8, unsigned(place) / 4 % 2);
  }
  /// Lane t of a quad holds, in panel p, dimensions (2t + e) * W + i as element e of n8 tile i, where W = 8 (4) is the
  /// number of such tiles: LdgKeys.
  template <class Row>
  CUTE_DEVICE static void write(char* smem, int key_part, int row, int lane, Row const& o) {
    using namespace cute;
    constexpr int kWidth = P::kWidth / 8;
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      CUTE_UNROLL
      for (int group = 0; group < kWidth / 2; ++group) {  // four of the lane's dimensions
        int const e = group / (kWidth / 4), i = group % (kWidth / 4) * 4;
        int const chunk = panel * kPanelChunks + (lane % 4 * 2 + e) * kWidth / 8;
        auto value = [&](int j) { return o(e + 2 * (panel * kWidth + i + j)); };
        piece(smem, key_part, row, place_of(chunk), group % 2) = make_float4(value(0), value(1), value(2), value(3));
      }
    }
  }

 private:
  CUTE_DEVICE static int place_of(int chunk) {
    int const in_panel = chunk % kPanelChunks;
    return chunk - in_panel + (kPanelChunks == 8 ? in_panel % 2 * 4 + in_panel / 2 : in_panel);
  }
  CUTE_DEVICE static int chunk_at(unsigned place) {
    unsigned const in_panel = place % kPanelChunks;
    return place - in_panel + (kPanelChunks == 8 ? in_panel % 4 * 2 + in_panel / 4 : in_panel);
  }
  CUTE_DEVICE static float4& piece(char* smem, int key_part, int row, int place, int half) {
    int const index = (half * kChunks + place) ^ (row % 2 * 4);
    return reinterpret_cast<float4*>(LdgKeyParts::output(smem, key_part, row))[index];
  }
};

}  // namespace cutlass_fmha
