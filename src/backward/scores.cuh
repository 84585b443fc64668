// What becomes of a chunk of scores where a call says more than which keys are seen, and of their gradients: softcap,
// bias, ALiBi, masks, dropout. All of it is decided at run time, the same way for all lanes of a warp.
//
// Two operands come of a score. P, which dropout leaves or drops, is that of dV. The other is that of dS, which depends
// on dropped ones, too: P times the softcap's derivative, with the sign of what dropout drops.
#pragma once

#include "../features/scores.cuh"
#include "layout.cuh"

namespace cutlass_fmha {

/// What a call does to scores besides hiding some by ranges. What most calls have is code of its own: the loop over
/// steps is longer than the instruction cache otherwise, and branches around what a call doesn't have cost more than
/// what it has.
enum class ScoreKind {
  plain,   ///< nothing, but what dropout may drop
  capped,  ///< a softcap
  alibi,   ///< ALiBi's distances
  any,     ///< masks, biases, or several of these
};

FMHA_HOST_DEVICE inline ScoreKind score_kind(BackwardParams const& p) {
  bool const capped = p.softcap != 0.f, alibi = p.alibi_slopes != nullptr;
  if (p.mask != nullptr || p.bias_type != BiasType::none || (capped && alibi)) return ScoreKind::any;
  return capped ? ScoreKind::capped : alibi ? ScoreKind::alibi : ScoreKind::plain;
}

/// Where dP of a pair of queries begins, of all of a lane's keys.
template <class Scores>
CUTE_DEVICE void start_pair(Scores& scores, int pair, float2 first) {
  CUTE_UNROLL
  for (int m = 0; m < cute::size<1>(Scores{}); ++m) {
    auto piece = scores(cute::_, m, pair);  // of two keys
    piece(0) = piece(2) = first.x;
    piece(1) = piece(3) = first.y;
  }
}

/// S^T of a lane: rows are keys, columns queries. `Types`: of the chunk.
template <BackwardConfig C, class Types>
struct ScoredChunk {
  static constexpr int kRows = 2 * Types::kRowSteps, kPairs = Types::kQueries / 8;
  /// Of which a mask or a bias is read at once; where more of them spill, fewer.
  static constexpr int kPairsRead = kRows < 4 && C.arch == 90 ? 4 : 2;
  using Element = typename Types::Element;
  using Scores = typename Types::Scores;
  using Probabilities = typename Types::Probabilities;

  BackwardParams const& p;
  Sequence const& sequence;
  int head;        ///< of the queries
  int key, query;  ///< of the lane's first row and column; rows are 8 keys apart, pairs of columns 8 queries

  /// `terms(pair)`: the LSE of a pair of queries, in units of log2. `seen[row]`: by ranges, counted from `query` on.
  template <bool Masked, ScoreKind Kind, class Terms>
  CUTE_DEVICE void exponentiate(Scores const& scores, Probabilities& probabilities, Probabilities& factors,
                                VisibleQueries const (&seen)[kRows], Terms const& terms) const {
    auto rows = by_row(scores);
    auto pairs = pairs_by_row<Types>(probabilities), others = pairs_by_row<Types>(factors);
    bool const capped = Kind == ScoreKind::capped || (Kind == ScoreKind::any && p.softcap != 0.f);
    float const unit = (capped ? p.softcap : p.scale) * kLog2e;
    float slope = 0.f;
    if (Kind == ScoreKind::alibi || (Kind == ScoreKind::any && p.alibi_slopes != nullptr)) {
      slope = alibi_slope(p, sequence.batch, head) * kLog2e;
    }
    float const distance = float(query + sequence.offset - key);  // of the first row and column
    CUTE_UNROLL
    for (int first = 0; first < kPairs; first += kPairsRead) {
      float biases[kRows][2 * kPairsRead] = {};
      uint32_t hidden = 0;
      if constexpr (Kind == ScoreKind::any) {
        auto const add = [&](int row, int column, float x) FMHA_INLINE { biases[row][column] = x * kLog2e; };
        if (p.bias_type == BiasType::float32) read(static_cast<float const*>(p.bias), p.bias_stride, first, add);
        if (p.bias_type == BiasType::same_as_q) read(static_cast<Element const*>(p.bias), p.bias_stride, first, add);
        if (p.mask != nullptr) {
          read(p.mask, p.mask_stride, first, [&](int row, int column, float seen) FMHA_INLINE {
            hidden |= uint32_t(seen == 0.f) << (row * 2 * kPairsRead + column);
          });
        }
      }
      CUTE_UNROLL
      for (int pair = first; pair < first + kPairsRead && pair < kPairs; ++pair) {
        float2 const lse = terms(pair);
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
          float x[2], derivative[] = {1.f, 1.f};
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const column = 2 * (pair - first) + i;
            float added = i == 0 ? -lse.x : -lse.y;
            if constexpr (Kind == ScoreKind::any) added += biases[row][column];
            if constexpr (Kind == ScoreKind::alibi || Kind == ScoreKind::any) {
              added = fmaf(-slope, fabsf(distance + float(8 * pair + i - 8 * row)), added);
            }
            x[i] = rows(row, 2 * pair + i);
            if (capped) {
              x[i] = tanh_of_exp2(x[i] * p.cap_scale);
              derivative[i] = __saturatef(fmaf(-x[i], x[i], 1.f));  // 0 of what is no number: it may be hidden
            }
            x[i] = exp2_approx(fmaf(x[i], unit, added));
            if constexpr (Masked) {
              if (!seen[row].sees(8 * pair + i)) x[i] = 0.f;
            }
            if constexpr (Kind == ScoreKind::any) {
              if (hidden >> (row * 2 * kPairsRead + column) & 1) x[i] = 0.f;
            }
          }
          pairs(row, pair) = pack<Element>(x[0], x[1]);
          others(row, pair) =
              capped ? pack<Element>(x[0] * derivative[0], x[1] * derivative[1]) : uint32_t(pairs(row, pair));
        }
      }
    }
  }

  /// Hides what block lists don't name. `pieces`: of the warp's keys, from query piece 0 of the tile on; `first`: the
  /// chunk's first.
  CUTE_DEVICE void hide_pieces(uint32_t pieces, int first, Probabilities& probabilities, Probabilities& factors) const {
    static_assert(kListedQueries == 16);
    auto pairs = pairs_by_row<Types>(probabilities), others = pairs_by_row<Types>(factors);
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        if (pieces >> ((first + pair / 2) * (C.tile_n / kListedKeys) + 8 * row / kListedKeys) & 1) continue;
        pairs(row, pair) = others(row, pair) = 0;
      }
    }
  }

  /// Takes what dropout drops from P, and marks it in the other operand. A counter's numbers are of two queries eight
  /// apart and of keys that two lanes have: each makes those of one query of its pairs, and takes the other's.
  CUTE_DEVICE void drop_out(Probabilities& probabilities, Probabilities& factors) const {
    if (p.dropout_threshold == 0) return;
    static_assert(kPairs % 2 == 0);
    auto pairs = pairs_by_row<Types>(probabilities), others = pairs_by_row<Types>(factors);
    uint64_t const seed = *p.dropout_seed;
    int const sequence_head = sequence.batch * p.num_heads + head, odd = lane_id() / 4 % 2;
    // Of an even key the low halves, the first query's being the lane's own; of an odd one the high ones.
    uint32_t const both = odd ? 0x3276u : 0x5410u;
    uint32_t const own_query = dropout_query(query + odd), own_key = dropout_key(key);
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; pair += 2) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; row += 2) {
        PhiloxWords const made =
            dropout_numbers(seed, sequence_head, own_query + 4 * pair, own_key + 2 * row, WideProduct{});
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint32_t const others_numbers = __shfl_xor_sync(0xffffffffu, made.word[i], 4);
          uint32_t numbers;
          asm("prmt.b32 %0, %1, %2, %3;" : "=r"(numbers) : "r"(made.word[i]), "r"(others_numbers), "r"(both));
          uint32_t const stays = kept_pair(p.kept, numbers);
          pairs(row + i % 2, pair + i / 2) &= stays;
          others(row + i % 2, pair + i / 2) |= ~stays & 0x80008000u;
        }
      }
    }
  }

  /// Where dP begins: -D, but where dropout scales what is added. `minus_d(pair)`: of two queries.
  template <class MinusD>
  CUTE_DEVICE void start(Scores& scores, MinusD const& minus_d) const {
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      start_pair(scores, pair, p.dropout_threshold == 0 ? minus_d(pair) : float2{});
    }
  }

  /// dP, or dP - D as start() says, -> dS, rounded into `factors`; in `scores` it stays as it was.
  template <class MinusD>
  CUTE_DEVICE void differentiate(Probabilities& factors, Scores& scores, MinusD const& minus_d) const {
    if (p.dropout_threshold == 0) {
      differentiate<false>(factors, scores, minus_d);
    } else {
      differentiate<true>(factors, scores, minus_d);
    }
    if (p.dbias != nullptr) add_bias_gradient(by_row(scores));
  }

 private:
  template <bool Dropped, class MinusD>
  CUTE_DEVICE void differentiate(Probabilities& factors, Scores& scores, MinusD const& minus_d) const {
    auto rows = by_row(scores);
    auto pairs = pairs_by_row<Types>(factors);
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      float2 const term = Dropped ? minus_d(pair) : float2{};
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        uint32_t const word = pairs(row, pair);
        float2 const factor = unpack<Element>(Dropped ? word & 0x7fff7fffu : word);
        float& x = rows(row, 2 * pair);
        float& y = rows(row, 2 * pair + 1);
        if constexpr (Dropped) {
          x = fmaf(word & 0x8000u ? 0.f : x, p.dropout_scale, term.x);
          y = fmaf(word & 0x80000000u ? 0.f : y, p.dropout_scale, term.y);
        }
        x *= factor.x;
        y *= factor.y;
        pairs(row, pair) = pack<Element>(x, y);
      }
    }
  }

  CUTE_DEVICE int64_t offset(ScoreStrides const& stride, int row, int pair) const {
    return stride.offset(sequence.batch, head, query + 8 * pair, key + 8 * row);
  }
  CUTE_DEVICE bool exists(int row, int column) const {
    return key + 8 * row < sequence.keys && query + column < sequence.queries;
  }

  /// use(row, column, what a tensor says of the score): of pairs from `first` on, all on their way at once. What
  /// doesn't exist, and is hidden, has its neighbour's.
  template <class Value, class Use>
  CUTE_DEVICE void read(Value const* tensor, ScoreStrides const& stride, int first, Use const& use) const {
    Value values[kRows][2 * kPairsRead];
    Value const* const from = tensor + stride.offset(sequence.batch, head, 0);
    CUTE_UNROLL
    for (int column = 0; column < 2 * kPairsRead; ++column) {
      int const i = smaller(query + 8 * (first + column / 2) + column % 2, sequence.queries - 1);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        values[row][column] = from[i * stride.query + smaller(key + 8 * row, sequence.keys - 1) * stride.key];
      }
    }
    CUTE_UNROLL
    for (int column = 0; column < 2 * kPairsRead; ++column) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) use(row, column, float(values[row][column]));
    }
  }

  /// Summed over what the bias is broadcast along, as far as a warp has it; the rest by fp32 reductions.
  template <class Rows>
  CUTE_DEVICE void add_bias_gradient(Rows const& rows) const {
    float* const to = p.dbias + offset(p.dbias_stride, 0, 0);
    auto const add = [&](int row, int column, float x) FMHA_INLINE {
      float* const at = to + 8 * row * p.dbias_stride.key + column * p.dbias_stride.query;
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory");
    };
    if (p.dbias_stride.query == 0) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float sum = 0.f;
        CUTE_UNROLL
        for (int n = 0; n < 2 * kPairs; ++n) sum += rows(row, n);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane_id() % 4 == 0 && key + 8 * row < sequence.keys) add(row, 0, sum);
      }
      return;
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int n = 0; n < 2 * kPairs; ++n) {
        int const column = n / 2 * 8 + n % 2;
        if (exists(row, column)) add(row, column, rows(row, n));
      }
    }
  }
};

}  // namespace cutlass_fmha
