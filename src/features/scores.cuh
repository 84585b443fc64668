// What becomes of a block of scores between S = Q K^T and the softmax, and of its probabilities between that and P V:
// everything that params.h says of a score. What is decided at run time is so the same way for all lanes of a warp.
#pragma once

#include <cstddef>

#include "lane_dropout.cuh"

namespace cutlass_fmha {

/// ALiBi's distances from a step's keys where a warp's rows are of one head, and no key that they see comes after its
/// query, or none before: a line in j.
template <ForwardConfig C>
struct AlibiLine {
  bool exists;
  float slope;
  float first;  ///< the lane's first key, counted from that beside the query of its first row

  CUTE_DEVICE AlibiLine(FeatureParams const& p, WarpScores const& warp, int key_begin) {
    int const begin = uniform(key_begin - warp.beside);
    bool const before = p.keys_before || begin + C.tile_n - 1 <= 0;
    exists = before || begin >= ForwardTypes<C>::kRows - 1;
    slope = before ? warp.slope : -warp.slope;
    first = float(begin + KeyOrder<C>::first(lane_id()) - accumulator_row(0, lane_id()));
  }
};

/// The scores of one lane: the walk's tile begins at key_begin.
template <ForwardConfig C>
struct ScoreBlock {
  using T = ForwardTypes<C>;
  using Order = KeyOrder<C>;
  using Rows = cute::conditional_t<C.modifies_scores(), StagedRows, ComputedRows>;

  FeatureParams const& p;
  Sequence const& sequence;
  FeatureTile const& tile;
  Rows rows;
  int key_begin;

  /// q k -> score, in units of p.score_unit.
  template <class Scores>
  CUTE_DEVICE void modify(Scores&& scores) const {
    using namespace cute;
    float factor = p.scale;
    if (p.softcap != 0.f) {
      cap(scores);
      factor = p.softcap;
    }
    if constexpr (C.scored()) {
      if (p.bias_type == BiasType::float32) {
        add_bias(scores, static_cast<float const*>(p.bias), factor);
        factor = 1.f;
      } else if (p.bias_type == BiasType::same_as_q) {
        add_bias(scores, static_cast<typename T::Element const*>(p.bias), factor);
        factor = 1.f;
      }
    }
    if (p.alibi_slopes != nullptr) {
      add_alibi(scores, factor);
    } else if (factor != p.score_unit) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= factor;
    }
  }

  /// q k -> score, in units of the softcap.
  template <class Scores>
  CUTE_DEVICE void cap(Scores&& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) scores(i) = tanh_of_exp2(scores(i) * p.cap_scale);
  }

  /// scores * factor - slope |i + offset - j|
  template <class Scores>
  CUTE_DEVICE void add_alibi(Scores&& scores, float factor) const {
    using namespace cute;
    int const first = key(0);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      float const slope = rows.slope(p, tile, row), beside = float(at(row).query + sequence.offset - first);
      if (C.scored() && p.keys_before) {  // no visible key comes after its query
        float const last = -slope * beside;
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
          scores(row, col) = fmaf(scores(row, col), factor, fmaf(slope, float(Order::of_column(col)), last));
        }
      } else {
        add_distances(scores, row, factor, slope, beside);
      }
    }
  }
  /// The same where all rows of a warp are of one head.
  template <class Scores>
  CUTE_DEVICE void add_alibi_of_head(Scores&& scores) const {
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(scores); ++row) {
      float const beside = float(rows.warp.beside + accumulator_row(row, lane_id()) - key(0));
      add_distances(scores, row, p.scale, rows.warp.slope, beside);
    }
  }

  /// Which keys a row's query sees by ranges, from the tile's first one on.
  CUTE_DEVICE VisibleKeys visible(int row) const {
    VisibleKeys visible = visible_keys(p, sequence, at(row).query);
    visible.begin -= key_begin, visible.end -= key_begin, visible.prefix -= key_begin;
    return visible;
  }

  /// Hides the keys that a query doesn't see by ranges.
  template <class Scores>
  CUTE_DEVICE void hide_by_range(Scores&& scores) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      VisibleKeys const seen = visible_keys(p, sequence, at(row).query);
      CUTE_UNROLL
      for (int pair = 0; pair < Order::kPairs; ++pair) {
        VisibleKeys visible = seen;
        int const first = key_begin + Order::first(lane_id(), pair);
        visible.begin -= first, visible.end -= first, visible.prefix -= first;
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
          if (Order::pair_of(col) == pair && !visible.sees(Order::of_column(col))) scores(row, col) = -INFINITY;
        }
      }
    }
  }

  /// Hides the keys that a query doesn't see. `by_range`: some of them by ranges.
  template <class Scores>
  CUTE_DEVICE void hide(Scores&& scores, bool by_range) const {
    if (by_range) hide_by_range(scores);
    if (p.mask == nullptr) return;
    if constexpr (Order::kByLane) {
      if (p.mask_vectors && key_begin + C.tile_n <= sequence.keys) {
        hide_by_vectors(scores);
        return;
      }
    }
    one_by_one(scores, p.mask, p.mask_stride,
               [&](float& score, float seen) { score = seen == 0.f ? -INFINITY : score; });
  }

  /// Drops probabilities: (row, pair) of two packed ones. `OneHead`: all rows of the tile are of its head.
  template <bool OneHead = false, class Pairs>
  CUTE_DEVICE void drop_out(Pairs&& pairs) const {
    if (C.scored() && p.dropout_threshold == 0) return;
    LaneDropout<C, Rows>{p, tile, rows, key_begin}.template apply<OneHead>(pairs);
  }

 private:
  CUTE_DEVICE QueryRow at(int row) const { return rows.at(p, tile, row); }
  CUTE_DEVICE int key(int col) const { return key_begin + Order::first(lane_id()) + Order::of_column(col); }
  template <class Scores>
  CUTE_DEVICE static void add_distances(Scores&& scores, int row, float factor, float slope, float beside) {
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      float const distance = fabsf(beside - float(Order::of_column(col)));
      scores(row, col) = fmaf(scores(row, col), factor, -slope * distance);
    }
  }
  CUTE_DEVICE bool exists(QueryRow const& q, int key) const {
    return q.query < sequence.queries && key < sequence.keys;
  }
  CUTE_DEVICE int64_t offset(ScoreStrides const& stride, QueryRow const& q) const {
    return stride.offset(tile.batch, q.head, q.query);
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

  template <class Scores, class Bias>
  CUTE_DEVICE void add_bias(Scores&& scores, Bias const* bias, float factor) const {
    using namespace cute;
    if constexpr (Order::kByLane) {
      if (p.bias_vectors && key_begin + C.tile_n <= sequence.keys) {
        add_bias_by_vectors(scores, bias, factor);
        return;
      }
    }
    one_by_one(scores, bias, p.bias_stride, [&](float& score, float value) { score = fmaf(score, factor, value); });
  }

  /// Keeps what is loaded or computed on one side from being begun on the other: there is room for some 16 registers.
  CUTE_DEVICE static void bound_work() { __syncwarp(); }

  /// A lane's keys that follow each other, which all exist, at a time.
  template <class Scores, class Bias>
  CUTE_DEVICE void add_bias_by_vectors(Scores&& scores, Bias const* bias, float factor) const {
    using namespace cute;
    using Run = cute::array_aligned<Bias, Order::kRun, (sizeof(Bias) * Order::kRun < 16 ? 8 : 16)>;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      if (row % 2 == 0 || sizeof(Bias) == 4) bound_work();
      Bias const* const from = bias + offset(p.bias_stride, existing(row)) + key(0);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); col += Order::kRun) {
        if (sizeof(Bias) == 4 && col == 8) bound_work();
        Run const values = *reinterpret_cast<Run const*>(from + Order::of_column(col));
        CUTE_UNROLL
        for (int i = 0; i < Order::kRun; ++i) {
          scores(row, col + i) = fmaf(scores(row, col + i), factor, float(values[i]));
        }
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE void hide_by_vectors(Scores&& scores) const {
    using namespace cute;
    using Run = cute::array_aligned<uint32_t, Order::kRun / 4, Order::kRun>;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      if (row % 2 == 0) bound_work();
      uint8_t const* const from = p.mask + offset(p.mask_stride, existing(row)) + key(0);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); col += Order::kRun) {
        Run const bytes = *reinterpret_cast<Run const*>(from + Order::of_column(col));
        CUTE_UNROLL
        for (int i = 0; i < Order::kRun; ++i) {
          if ((bytes[i / 4] & (0xffu << (i % 4 * 8))) == 0) scores(row, col + i) = -INFINITY;
        }
      }
    }
  }
};

}  // namespace cutlass_fmha
