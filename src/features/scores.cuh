// What becomes of a block of scores between S = Q K^T and the softmax, and of its probabilities between that and P V:
// everything that params.h says of a score. All of it is decided at run time, the same way for all lanes of a warp.
#pragma once

#include <cfloat>

#include "../core/fragments.cuh"
#include "../core/mask.cuh"
#include "dropout.h"

namespace cutlass_fmha {

/// A packed query row: which query of which head.
struct QueryRow {
  int query, head;
};

CUTE_DEVICE QueryRow query_row(FeatureParams const& p, FeatureTile const& tile, int packed) {
  int const query = p.by_pack.quotient(packed);
  return {query, tile.head + packed - query * p.pack};
}

/// In which order the keys of a step stand in shared memory, and thus in the columns of its scores. The softmax and P V
/// don't mind. A lane has columns 2t and 2t + 1 of each eight; in order of lanes, these are keys 8t .. 8t + 7 of each
/// 32, so that a lane reads what belongs to its scores in pieces of eight. Columns in order are those of the few-query
/// rows.
template <ForwardConfig C>
struct KeyOrder {
  static constexpr bool kByLane = C.scored() && C.kv_warps == 1 && C.tile_n % 32 == 0;
  static constexpr int kRun = kByLane ? 8 : 2;  ///< keys that follow each other in a lane's columns

  /// The key in a row of the tile. Linear in the bits of the row's number.
  CUTE_HOST_DEVICE static constexpr int of_row(int row) {
    return kByLane ? row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2 : row;
  }
  /// The key in a lane's first column, and how far from it that of another one is.
  CUTE_DEVICE static int first(int lane) { return lane % 4 * kRun; }
  CUTE_HOST_DEVICE static constexpr int of_column(int col) {
    return kByLane ? col / 8 * 32 + col % 8 : col / 2 * 8 + col % 2;
  }
};

/// The factor that makes natural units of scores as the softmax gets them.
CUTE_DEVICE float score_unit(FeatureParams const& p) { return p.raw_scores ? p.scale : 1.f; }

/// The scores of one lane: the walk's tile begins at key_begin.
template <ForwardConfig C>
struct ScoreBlock {
  using T = ForwardTypes<C>;
  using Order = KeyOrder<C>;

  FeatureParams const& p;
  Sequence const& sequence;
  FeatureTile const& tile;
  int row_begin;  ///< of this warp, packed
  int key_begin;

  /// q k -> score, in natural units.
  template <class Scores>
  CUTE_DEVICE void modify(Scores&& scores) const {
    using namespace cute;
    float factor = p.scale;
    if (p.softcap != 0.f) {
      cap(scores);
      factor = 1.f;
    }
    if (p.bias_type == BiasType::float32) {
      add_bias(scores, static_cast<float const*>(p.bias), factor);
      factor = 1.f;
    } else if (p.bias_type == BiasType::same_as_q) {
      add_bias(scores, static_cast<typename T::Element const*>(p.bias), factor);
      factor = 1.f;
    }
    if (p.alibi_slopes != nullptr) {
      add_alibi(scores, factor);
    } else if (factor != 1.f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= factor;
    }
  }

  /// Hides the keys that a query doesn't see by ranges.
  template <class Scores>
  CUTE_DEVICE void hide_by_range(Scores&& scores) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      VisibleKeys visible = visible_keys(p, sequence, at(row).query);
      int const first = key_begin + Order::first(lane_id());
      visible.begin -= first, visible.end -= first, visible.prefix -= first;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        if (!visible.sees(Order::of_column(col))) scores(row, col) = -INFINITY;
      }
    }
  }

  /// Hides the keys that a query doesn't see. `by_range`: some of them by ranges.
  template <class Scores>
  CUTE_DEVICE void hide(Scores&& scores, bool by_range) const {
    if (by_range) hide_by_range(scores);
    if (p.mask == nullptr) return;
    if (p.mask_vectors && Order::kByLane && key_begin + C.tile_n <= sequence.keys) {
      hide_by_vectors(scores);
      return;
    }
    one_by_one(scores, p.mask, p.mask_stride,
               [&](float& score, float seen) { score = seen == 0.f ? -INFINITY : score; });
  }

  /// Drops probabilities: (row, pair) of two packed ones, each pair in an n8 tile of its own.
  template <class Pairs>
  CUTE_DEVICE void drop_out(Pairs&& pairs) const {
    using namespace cute;
    if (p.dropout_threshold == 0) return;
    uint64_t const seed = *p.dropout_seed;
    int const lane = lane_id();
    CUTE_UNROLL
    for (int row = 0; row < size<0>(pairs); ++row) {
      QueryRow const q = at(row);
      PhiloxWords numbers;
      CUTE_UNROLL
      for (int pair = 0; pair < size<1>(pairs); ++pair) {
        if (!Order::kByLane || pair % 4 == 0) {
          numbers = dropout_numbers(seed, tile.batch * p.num_heads + q.head, q.query, key(2 * pair) / 8);
        }
        uint32_t const chosen = numbers.word[Order::kByLane ? pair % 4 : 0];
        uint32_t const other = lane % 4 < 2 ? (lane % 4 == 0 ? numbers.word[0] : numbers.word[1])
                                            : (lane % 4 == 2 ? numbers.word[2] : numbers.word[3]);
        pairs(row, pair) = drop(pairs(row, pair), Order::kByLane ? chosen : other, p.dropout_threshold);
      }
    }
  }

 private:
  CUTE_DEVICE QueryRow at(int row) const { return query_row(p, tile, row_begin + accumulator_row(row, lane_id())); }
  CUTE_DEVICE int key(int col) const { return key_begin + Order::first(lane_id()) + Order::of_column(col); }
  CUTE_DEVICE bool exists(QueryRow const& q, int key) const {
    return q.query < sequence.queries && key < sequence.keys;
  }
  CUTE_DEVICE int64_t offset(ScoreStrides const& stride, QueryRow const& q) const {
    return tile.batch * stride.batch + q.head * stride.head + q.query * stride.query;
  }
  /// Of a row that some query stands in; the others read the last query's.
  CUTE_DEVICE QueryRow existing(int row) const {
    QueryRow q = at(row);
    q.query = larger(0, smaller(q.query, sequence.queries - 1));
    return q;
  }

  /// apply(score, what `tensor` says of it), 0 where that doesn't exist. Rows in a loop and a choice of scores for
  /// each: all loads at once would take more registers than there are.
  template <class Scores, class Value, class Apply>
  CUTE_DEVICE void one_by_one(Scores&& scores, Value const* tensor, ScoreStrides const& stride,
                              Apply const& apply) const {
    using namespace cute;
    CUTE_NO_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      QueryRow const q = at(row);
      Value const* const from = tensor + offset(stride, q) + key(0) * stride.key;
      float values[decltype(size<1>(scores))::value];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        values[col] = exists(q, key(col)) ? float(from[Order::of_column(col) * stride.key]) : 0.f;
      }
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
          if (r == row) apply(scores(r, col), values[col]);
        }
      }
    }
  }

  /// softcap tanh(scale s / softcap), by one exponential. tanh(x) = 1 - 2 / (1 + e^2x) is off by an ulp of 1 at most:
  /// what is near 0 is no more exact than what is near 1, as softcap scales it.
  template <class Scores>
  CUTE_DEVICE void cap(Scores&& scores) const {
    using namespace cute;
    float const inverse = fminf(__fdividef(2 * kLog2e, p.softcap), FLT_MAX);
    float const factor = fmaxf(-FLT_MAX, fminf(p.scale * inverse, FLT_MAX));  // a score of 0 stays one
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      scores(i) = p.softcap - __fdividef(2.f * p.softcap, 1.f + exp2_approx(scores(i) * factor));
    }
  }

  template <class Scores, class Bias>
  CUTE_DEVICE void add_bias(Scores&& scores, Bias const* bias, float factor) const {
    using namespace cute;
    if (p.bias_vectors && Order::kByLane && key_begin + C.tile_n <= sequence.keys) {
      add_bias_by_vectors(scores, bias, factor);
      return;
    }
    one_by_one(scores, bias, p.bias_stride, [&](float& score, float value) { score = fmaf(score, factor, value); });
  }

  /// Keeps what is loaded on one side from being asked for on the other: there is room for some 16 registers of it.
  CUTE_DEVICE static void bound_loads() { __syncwarp(); }

  /// Eight keys at a time, which all exist.
  template <class Scores, class Bias>
  CUTE_DEVICE void add_bias_by_vectors(Scores&& scores, Bias const* bias, float factor) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      if (row % 2 == 0) bound_loads();
      Bias const* const from = bias + offset(p.bias_stride, existing(row)) + key(0);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); col += 8) {
        if (sizeof(Bias) == 4 && col == 8) bound_loads();
        cute::array_aligned<Bias, 8> values;
        CUTE_UNROLL
        for (int part = 0; part < int(sizeof(Bias)) / 2; ++part) {
          reinterpret_cast<uint4*>(values.data())[part] =
              reinterpret_cast<uint4 const*>(from + Order::of_column(col))[part];
        }
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          scores(row, col + i) = fmaf(scores(row, col + i), factor, float(values[i]));
        }
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE void hide_by_vectors(Scores&& scores) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      if (row % 2 == 0) bound_loads();
      uint8_t const* const from = p.mask + offset(p.mask_stride, existing(row)) + key(0);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); col += 8) {
        uint2 const bytes = *reinterpret_cast<uint2 const*>(from + Order::of_column(col));
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (((i < 4 ? bytes.x : bytes.y) & (0xffu << (i % 4 * 8))) == 0) scores(row, col + i) = -INFINITY;
        }
      }
    }
  }

  /// scores * factor - slope |i + offset - j|
  template <class Scores>
  CUTE_DEVICE void add_alibi(Scores&& scores, float factor) const {
    using namespace cute;
    int const first = key(0);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      QueryRow const q = at(row);
      float const slope = p.alibi_slopes[tile.batch * p.alibi_stride[0] + q.head * p.alibi_stride[1]];
      float const beside = float(q.query + sequence.offset - first);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        float const distance = fabsf(beside - float(Order::of_column(col)));
        scores(row, col) = fmaf(scores(row, col), factor, -slope * distance);
      }
    }
  }
};

}  // namespace cutlass_fmha
