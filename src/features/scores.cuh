// What becomes of a block of scores between S = Q K^T and the softmax, and of its probabilities between that and P V:
// everything that params.h says of a score. All of it is decided at run time, the same way for all lanes of a warp.
#pragma once

#include <cstddef>

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

/// run(at): at(row) is what a row of the tile stands for, without a division where each row is a query. What runs once
/// in a block costs by its length.
template <ForwardConfig C, class Run>
CUTE_DEVICE void with_query_rows(FeatureParams const& p, FeatureTile const& tile, Run const& run) {
  if (!C.scored() && p.pack == 1) {
    run([&](int row) { return QueryRow{tile.row_begin + row, tile.head}; });
  } else {
    run([&](int row) { return query_row(p, tile, tile.row_begin + row); });
  }
}

/// In which order ldmatrix takes the keys of a tile's 16 rows, where a lane is to have four that follow each other: 4t
/// .. 4t + 3, two of each n8 tile. Lanes 2 and 3 have the upper two first, so that each n8 tile has eight rows of
/// different places in the swizzle.
struct MaskedOrder {
  CUTE_HOST_DEVICE static constexpr int of_row(int row) {
    return row % 8 / 2 * 4 + ((row / 8) ^ (row % 8 / 4)) * 2 + row % 2;
  }
};

/// In which order the keys of a step stand in shared memory, and thus in the columns of its scores. The softmax and P V
/// don't mind. A lane has columns 2t and 2t + 1 of each eight; in order of lanes, these are keys 8t .. 8t + 7 of each
/// 32, so that a lane reads what belongs to its scores in pieces of eight. Columns in order are those of the few-query
/// rows, and of rows to whose scores nothing belongs.
template <ForwardConfig C>
struct KeyOrder {
  static constexpr bool kByLane = C.scored() && C.kv_warps == 1 && C.tile_n % 32 == 0;
  static constexpr int kRun = kByLane ? 8 : 2;  ///< keys that follow each other in a lane's columns
  /// Masked rows read keys in another order than they stand in: MaskedOrder.
  static constexpr int kPairs = C.reads_masks() ? 2 : 1;

  /// The key in a row of the tile. Linear in the bits of the row's number.
  CUTE_HOST_DEVICE static constexpr int of_row(int row) {
    return kByLane ? row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2 : row;
  }
  /// The key in a lane's first column, and how far from it that of another one is.
  CUTE_DEVICE static int first(int lane) { return lane % 4 * kRun; }
  /// Of columns of every other n8 tile.
  CUTE_DEVICE static int first(int lane, int pair) {
    return kPairs == 1 ? first(lane) : MaskedOrder::of_row(8 * pair + lane % 4 * 2);
  }
  CUTE_HOST_DEVICE static constexpr int pair_of(int col) { return kPairs == 1 ? 0 : col / 2 % 2; }
  CUTE_HOST_DEVICE static constexpr int of_column(int col) {
    if (kPairs > 1) return col / 4 * 16 + col % 2;
    return kByLane ? col / 8 * 32 + col % 8 : col / 2 * 8 + col % 2;
  }
};

CUTE_DEVICE float alibi_slope(FeatureParams const& p, FeatureTile const& tile, int head) {
  return p.alibi_slopes[tile.batch * p.alibi_stride[0] + head * p.alibi_stride[1]];
}

// Where the rows of a lane's scores stand: `row` counts those that the lane has of its warp's accumulator.

/// Found anew at each use.
struct ComputedRows {
  int row_begin;  ///< of this warp, packed

  CUTE_DEVICE QueryRow at(FeatureParams const& p, FeatureTile const& tile, int row) const {
    return query_row(p, tile, row_begin + accumulator_row(row, lane_id()));
  }
  CUTE_DEVICE float slope(FeatureParams const& p, FeatureTile const& tile, int row) const {
    return alibi_slope(p, tile, at(p, tile, row).head);
  }
};

/// What a warp asks for in every phase about its scores.
struct alignas(16) WarpScores {
  float slope;  ///< ALiBi's, where its rows are of one head
  int beside;   ///< the key beside its first query then
  int large;    ///< see ScoreTerms
};

/// The same, but for slopes, which are in shared memory.
struct StagedRows : ComputedRows {
  float const* slopes;  ///< of this warp's rows
  WarpScores& warp;

  CUTE_DEVICE float slope(FeatureParams const&, FeatureTile const&, int row) const {
    return slopes[accumulator_row(row, lane_id())];
  }
};

/// Four bytes of two words, each number with its highest bit eight times: `which` names them with 8 added.
CUTE_DEVICE uint32_t signs_of_bytes(uint32_t low, uint32_t high, uint32_t which) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(which));
  return y;
}

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
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of_exp2(scores(i) * p.cap_scale);
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
      if constexpr (C.modifies_scores() && !tells_modifiers_apart(C)) {
        if (add_alibi_line(scores, factor)) return;
      }
      add_alibi(scores, factor);
    } else if (factor != p.score_unit) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= factor;
    }
  }

  /// q k -> score, in units of p.score_unit, where scores are only capped.
  template <class Scores>
  CUTE_DEVICE void cap(Scores&& scores) const {
    float const factor = p.softcap / p.score_unit;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = fmaf(-2.f * factor, reciprocal_approx(1.f + exp2_approx(scores(i) * p.cap_scale)), factor);
    }
  }

  /// scores * factor - slope |i + offset - j|
  template <class Scores>
  CUTE_DEVICE void add_alibi(Scores&& scores, float factor) const {
    using namespace cute;
    int const first = key(0);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      float const slope = rows.slope(p, tile, row), beside = float(at(row).query + sequence.offset - first);
      if (C.scored() && p.keys_before) {  // no visible key comes after its query; other rows have AlibiOnTrial then
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

  /// Drops probabilities: (row, pair) of two packed ones, each pair in an n8 tile of its own.
  template <class Pairs>
  CUTE_DEVICE void drop_out(Pairs&& pairs) const {
    using namespace cute;
    if (C.scored() && p.dropout_threshold == 0) return;
    uint64_t const seed = *p.dropout_seed;
    auto const drop_pair = [&](int row, int pair, uint32_t numbers)
                               FMHA_INLINE { pairs(row, pair) = drop(pairs(row, pair), numbers, p.dropout_threshold); };
    constexpr int kRows = decltype(size<0>(pairs))::value, kPairs = decltype(size<1>(pairs))::value;
    if constexpr (Order::kByLane) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int pair = 0; pair < kPairs; pair += 4) {
          PhiloxWords const numbers = numbers_of(seed, row, key(2 * pair) / 8);
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) drop_pair(row, pair + i, numbers.word[i]);
        }
      }
    } else if constexpr (C.modifies_scores()) {
      drop_out_by_quads(pairs, seed);
    } else {
      int const lane = lane_id() % 4;
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int pair = 0; pair < kPairs; ++pair) {
          PhiloxWords const numbers = numbers_of(seed, row, key(2 * pair) / 8);
          drop_pair(row, pair,
                    lane < 2 ? (lane == 0 ? numbers.word[0] : numbers.word[1])
                             : (lane == 2 ? numbers.word[2] : numbers.word[3]));
        }
      }
    }
  }

 private:
  CUTE_DEVICE QueryRow at(int row) const { return rows.at(p, tile, row); }
  CUTE_DEVICE int key(int col) const { return key_begin + Order::first(lane_id()) + Order::of_column(col); }
  CUTE_DEVICE PhiloxWords numbers_of(uint64_t seed, int row, int eighth) const {
    QueryRow const q = at(row);
    return dropout_numbers(seed, tile.batch * p.num_heads + q.head, q.query, eighth);
  }

  /// The eight keys that numbers are made for lie in four lanes. Each makes those of one of four rows, or of two rows
  /// and pairs, and finds out which are kept; the others get that, four times eight in a word, and take theirs.
  template <class Pairs>
  CUTE_DEVICE void drop_out_by_quads(Pairs&& pairs, uint64_t seed) const {
    using namespace cute;
    constexpr int kRows = decltype(size<0>(pairs))::value, kPairs = decltype(size<1>(pairs))::value;
    constexpr int kRowsAtOnce = kRows < 4 ? kRows : 4, kPairsAtOnce = 4 / kRowsAtOnce;
    constexpr int kCalls = kPairs / kPairsAtOnce;  // of a lane
    static_assert(kRows == kRowsAtOnce && kPairs % kPairsAtOnce == 0);
    uint32_t const lane = lane_id() & 3;
    QueryRow const q = at(lane % kRowsAtOnce);
    int const sequence_head = tile.batch * p.num_heads + q.head;
    int const eighth = (key_begin >> 3) + int(lane) / kRowsAtOnce;
    KeptHalves const kept_halves(p.dropout_threshold);
    // A lane's own: halves of word `lane`, each a byte of two words' bytes, which are `lane / 2` bits lower.
    uint32_t const own_bytes = lane % 2 ? 0xbbaau : 0x9988u;
    CUTE_UNROLL
    for (int first = 0; first < kCalls; first += 4) {
      uint32_t kept = 0;
      CUTE_UNROLL
      for (int call = first; call < first + 4 && call < kCalls; ++call) {
        PhiloxWords const made =
            dropout_numbers(seed, sequence_head, q.query, eighth + call * kPairsAtOnce, WideProduct{});
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          uint32_t const bytes =
              signs_of_bytes(kept_halves(made.word[2 * i]), kept_halves(made.word[2 * i + 1]), 0xfdb9);
          kept |= bytes & 0x80808080u >> (2 * (call - first) + i);
        }
      }
      CUTE_UNROLL
      for (int maker = 0; maker < 4; ++maker) {
        uint32_t const given = __shfl_sync(0xffffffffu, kept, maker, 4) << lane / 2;
        CUTE_UNROLL
        for (int call = first; call < first + 4 && call < kCalls; ++call) {
          pairs(maker % kRowsAtOnce, call * kPairsAtOnce + maker / kRowsAtOnce) &=
              signs_of_bytes(given << 2 * (call - first), 0, own_bytes);
        }
      }
    }
  }
  /// add_alibi() where a lane's rows are of one head and no key that they see comes after its query, or none before: a
  /// line in j. False elsewhere.
  template <class Scores>
  CUTE_DEVICE bool add_alibi_line(Scores&& scores, float factor) const {
    using namespace cute;
    if (p.pack != 1) return false;
    int const begin = uniform(rows.warp.beside);
    float const upwards = rows.warp.slope;
    bool const before = p.keys_before || key_begin + C.tile_n - 1 <= begin;
    if (!before && key_begin < begin + T::kRows - 1) return false;
    float const slope = before ? upwards : -upwards;
    float const first = slope * float(key_begin + Order::first(lane_id()) - begin - accumulator_row(0, lane_id()));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      float const of_row = fmaf(slope, -float(accumulator_row(row, 0)), first);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        float const added = fmaf(slope, float(Order::of_column(col)), of_row);
        scores(row, col) = fmaf(scores(row, col), factor, added);
      }
    }
    return true;
  }

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

/// tanh(x) / x by a polynomial in x^2, negative, and from -1 to -2 up to x = 1, where it is right: outside, and for
/// what is no number, another bit of its exponent or its sign differs. In units of p.score_unit.
struct CapOnTrial : ScoreItself {
  FeatureParams const& p;
  uint32_t common = 0xffffffffu;  ///< of all values

  CUTE_DEVICE explicit CapOnTrial(FeatureParams const& p) : p(p) {}
  CUTE_DEVICE float exponent(float score, int, float scale_log2, float subtracted) {
    float const square = score * score;
    float value = p.cap_terms[kCapTerms - 1];
    CUTE_UNROLL
    for (int n = kCapTerms - 2; n >= 0; --n) value = fmaf(value, square, p.cap_terms[n]);
    common &= __float_as_uint(value);
    return fmaf(-value * score, scale_log2, -subtracted);
  }
  CUTE_DEVICE bool holds() const { return (common & 0xbf800000u) == 0xbf800000u; }
};

/// Scores with ALiBi's distances where a lane's rows are of one head, and no key that they see comes after its query,
/// or none before: a line in j, which is that of all rows but for what is the same for all keys of a row.
template <ForwardConfig C>
struct AlibiOnTrial : ScoreItself {
  FeatureParams const& p;
  float slope;  ///< of that line, in log2 units
  float first;  ///< the lane's first key, counted from that beside the query of its first row

  CUTE_DEVICE float subtracted(int row, float reference) const {
    return fmaf(-slope, first - float(accumulator_row(row, 0)), reference);
  }
  CUTE_DEVICE float exponent(float score, int col, float, float subtracted) const {
    return fmaf(score, p.scale_log2, fmaf(slope, float(KeyOrder<C>::of_column(col)), -subtracted));
  }
};

/// What is known of a phase's scores in a walk of score-mod rows.
template <Modifier M>
struct ModifiedBy {
  static constexpr Modifier kModifier = M;
};

/// What a phase's scores lack for the softmax of a score-mod row: OnlineSoftmax's terms. WarpScores::large: some were
/// too large for the polynomial, and so will others be. What is known of the block is asked for anew where a trial
/// failed, since no register is left to keep it meanwhile.
template <ForwardConfig C, class Keys, Modifier M>
struct ScoreTerms {
  static constexpr bool kTried = M == Modifier::alibi || M == Modifier::softcap;  ///< a trial takes scores as they are

  Keys const& keys;
  int phase;
  bool masked;

  /// All that a trial doesn't.
  template <class Scores>
  CUTE_DEVICE void prepare(Scores&& scores) const {
    if constexpr (kTried) return;
    ScoreBlock<C> const block = keys.block_at(phase);
    if constexpr (M == Modifier::any) block.modify(scores);
    if (masked) block.hide_by_range(scores);
  }

  template <class Trial>
  CUTE_DEVICE bool fails(Trial const& trial) const {
    if constexpr (M == Modifier::softcap) {
      if (masked || __any_sync(0xffffffffu, keys.warp_scores().large)) return true;
      CapOnTrial value(keys.p);
      bool const failed = trial(value);
      if (failed) {
        bool const large = __any_sync(0xffffffffu, !value.holds());
        __syncwarp();  // all lanes have read what is written now
        if (lane_id() == 0) keys.warp_scores().large = large;
        __syncwarp();
      }
      return failed;
    } else if constexpr (M == Modifier::alibi) {
      int const first = uniform(keys.first_key(phase) - keys.warp_scores().beside);
      bool const before = keys.p.keys_before || first + C.tile_n - 1 <= 0;
      bool const is_line = !masked && (before || first >= ForwardTypes<C>::kRows - 1);
      float const upwards = keys.warp_scores().slope * kLog2e;
      // Without a branch around it, which takes registers: what is no line is rare.
      return !is_line |
             trial(AlibiOnTrial<C>{{},
                                   keys.p,
                                   before ? upwards : -upwards,
                                   float(first + KeyOrder<C>::first(lane_id()) - accumulator_row(0, lane_id()))});
    } else {
      return trial(ScoreItself{});
    }
  }
  template <class Scores>
  CUTE_DEVICE void settle(Scores&& scores) const {
    if constexpr (kTried) {
      ScoreBlock<C> const block = keys.block_at(phase);
      if constexpr (M == Modifier::softcap) {
        block.cap(scores);
      } else {
        block.add_alibi_of_head(scores);
      }
      if (keys.is_masked(phase)) block.hide_by_range(scores);
    }
  }
  /// What becomes of probabilities.
  template <class Pairs>
  CUTE_DEVICE void finish(Pairs&& pairs) const {
    if (M == Modifier::dropout || (M == Modifier::any && keys.p.dropout_threshold != 0)) {
      keys.block_at(phase).drop_out(pairs);
    }
  }
};

}  // namespace cutlass_fmha
