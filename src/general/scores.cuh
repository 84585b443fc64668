// What becomes of a block of scores between S = Q K^T and the softmax, and of its probabilities between that and P V:
// everything that params.h says of a score. All of it is decided at run time, the same way for all lanes of a warp.
#pragma once

#include "../forward/fragments.cuh"
#include "dropout.h"
#include "sequence.h"

namespace cutlass_fmha {

/// A packed query row: which query of which head.
struct QueryRow {
  int query, head;
};

CUTE_DEVICE QueryRow query_row(GeneralParams const& p, GeneralTile const& tile, int packed) {
  int const query = p.by_pack.quotient(packed);
  return {query, tile.head + packed - query * p.pack};
}

/// tanh by one exponential. Off by an ulp of 1 at most: what is near 0 is no more exact than what is near 1, as softcap
/// scales it.
CUTE_DEVICE float tanh_by_exp2(float x) {
  constexpr float kTwoLog2e = 2.8853900817779268f;
  return 1.f - __fdividef(2.f, 1.f + exp2_approx(x * kTwoLog2e));
}

/// The scores of one lane: the walk's tile begins at key_begin.
template <ForwardConfig C>
struct ScoreBlock {
  using T = ForwardTypes<C>;

  GeneralParams const& p;
  Sequence const& sequence;
  GeneralTile const& tile;
  int row_begin;  ///< of this warp, packed
  int key_begin;

  /// q k -> score, in natural units.
  template <class Scores>
  CUTE_DEVICE void modify(Scores&& scores) const {
    using namespace cute;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= p.scale;
    if (p.softcap != 0.f) {
      float const inverse = 1.f / p.softcap;
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = p.softcap * tanh_by_exp2(scores(i) * inverse);
    }
    if (p.bias_type == BiasType::float32) {
      add_bias(scores, static_cast<float const*>(p.bias));
    } else if (p.bias_type == BiasType::same_as_q) {
      add_bias(scores, static_cast<typename T::Element const*>(p.bias));
    }
    if (p.alibi_slopes != nullptr) add_alibi(scores);
  }

  /// Hides the keys that a query doesn't see. `by_range`: some of them by ranges.
  template <class Scores>
  CUTE_DEVICE void hide(Scores&& scores, bool by_range) const {
    using namespace cute;
    if (by_range) {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(scores); ++row) {
        VisibleKeys const visible = visible_keys(p, sequence, at(row).query);
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
          if (!visible.sees(key(col))) scores(row, col) = -INFINITY;
        }
      }
    }
    if (p.mask == nullptr) return;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      QueryRow const q = at(row);
      uint8_t const* const mask = p.mask + offset(p.mask_stride, q);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        if (!exists(q, key(col)) || mask[key(col) * p.mask_stride.key] == 0) scores(row, col) = -INFINITY;
      }
    }
  }

  /// Drops probabilities: (row, pair) of two packed ones, each pair in an n8 tile of its own.
  template <class Pairs>
  CUTE_DEVICE void drop_out(Pairs&& pairs) const {
    using namespace cute;
    if (p.dropout_threshold == 0) return;
    uint64_t const seed = *p.dropout_seed;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(pairs); ++row) {
      QueryRow const q = at(row);
      PhiloxWords numbers;
      CUTE_UNROLL
      for (int pair = 0; pair < size<1>(pairs); ++pair) {
        int const begin = key_begin + 8 * pair;
        // A tile begins at a multiple of its own size, so that the compiler knows most of these conditions.
        if (pair == 0 || pair * 8 % (C.tile_n % 32 == 0 ? 32 : 16) == 0) {
          numbers = dropout_numbers(seed, tile.batch * p.num_heads + q.head, q.query, begin / 32, lane_id() % 4);
        }
        int const word = C.tile_n % 32 == 0 ? pair % 4 : begin % 32 / 8;
        uint32_t const chosen = word < 2 ? (word == 0 ? numbers.word[0] : numbers.word[1])
                                         : (word == 2 ? numbers.word[2] : numbers.word[3]);
        pairs(row, pair) = drop(pairs(row, pair), chosen, p.dropout_threshold);
      }
    }
  }

 private:
  CUTE_DEVICE QueryRow at(int row) const { return query_row(p, tile, row_begin + accumulator_row(row, lane_id())); }
  /// Column col of a lane: two neighbours in each n8 tile.
  CUTE_DEVICE int key(int col) const { return key_begin + lane_id() % 4 * 2 + col / 2 * 8 + col % 2; }
  CUTE_DEVICE bool exists(QueryRow const& q, int key) const {
    return q.query < sequence.queries && key < sequence.keys;
  }
  CUTE_DEVICE int64_t offset(ScoreStrides const& stride, QueryRow const& q) const {
    return tile.batch * stride.batch + q.head * stride.head + q.query * stride.query;
  }

  template <class Scores, class Bias>
  CUTE_DEVICE void add_bias(Scores&& scores, Bias const* bias) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      QueryRow const q = at(row);
      Bias const* const from = bias + offset(p.bias_stride, q);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        if (exists(q, key(col))) scores(row, col) += float(from[key(col) * p.bias_stride.key]);
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE void add_alibi(Scores&& scores) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      QueryRow const q = at(row);
      float const slope = p.alibi_slopes[tile.batch * p.alibi_stride[0] + q.head * p.alibi_stride[1]];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) -= slope * float(abs(q.query + sequence.offset - key(col)));
      }
    }
  }
};

}  // namespace cutlass_fmha
