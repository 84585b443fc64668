// What becomes of a chunk of scores where a call says more than which keys are seen, and of their gradients: softcap,
// bias, ALiBi, masks, dropout. All of it is decided at run time, the same way for all lanes of a warp.
//
// Two operands come of a score. P, which dropout leaves or drops, is that of dV. The other is that of dS, which depends
// on dropped ones, too: P times the softcap's derivative, with the sign of what dropout drops.
#pragma once

#include "../features/scores.cuh"
#include "layout.cuh"

namespace cutlass_fmha {

/// S^T of a lane: rows are keys, columns queries. `Types`: of the chunk.
template <BackwardConfig C, class Types>
struct ScoredChunk {
  static constexpr int kRows = 2 * Types::kRowSteps, kPairs = Types::kQueries / 8;
  using Element = typename Types::Element;
  using Scores = typename Types::Scores;
  using Probabilities = typename Types::Probabilities;

  BackwardParams const& p;
  Sequence const& sequence;
  int head;        ///< of the queries
  int key, query;  ///< of the lane's first row and column; rows are 8 keys apart, pairs of columns 8 queries

  /// `terms(pair)`: the LSE of a pair of queries, in units of log2. `seen[row]`: by ranges, counted from `query` on.
  template <bool Masked, bool Capped, class Terms>
  CUTE_DEVICE void exponentiate(Scores const& scores, Probabilities& probabilities, Probabilities& factors,
                                VisibleQueries const (&seen)[kRows], Terms const& terms) const {
    auto rows = by_row(scores);
    auto pairs = pairs_by_row<Types>(probabilities), others = pairs_by_row<Types>(factors);
    float const unit = (Capped ? p.softcap : p.scale) * kLog2e;
    float slope = 0.f;
    if (p.alibi_slopes != nullptr) {
      slope = p.alibi_slopes[sequence.batch * p.alibi_stride[0] + head * p.alibi_stride[1]] * kLog2e;
    }
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      float2 const lse = terms(pair);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float added[] = {-lse.x, -lse.y}, derivative[] = {1.f, 1.f}, x[2];
        if (p.bias_type == BiasType::float32) {
          add_bias(static_cast<float const*>(p.bias), row, pair, added);
        } else if (p.bias_type == BiasType::same_as_q) {
          add_bias(static_cast<Element const*>(p.bias), row, pair, added);
        }
        if (slope != 0.f) add_alibi(slope, row, pair, added);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          x[i] = rows(row, 2 * pair + i);
          if constexpr (Capped) {
            x[i] = tanh_of_exp2(x[i] * p.cap_scale);
            derivative[i] = fmaf(-x[i], x[i], 1.f);
          }
          x[i] = exp2_approx(fmaf(x[i], unit, added[i]));
          if constexpr (Masked) {
            if (!seen[row].sees(8 * pair + i)) x[i] = 0.f;
          }
        }
        if (p.mask != nullptr) hide(row, pair, x);
        pairs(row, pair) = pack<Element>(x[0], x[1]);
        others(row, pair) =
            Capped ? pack<Element>(x[0] * derivative[0], x[1] * derivative[1]) : uint32_t(pairs(row, pair));
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

  /// Takes what dropout drops from P, and marks it in the other operand. Numbers are made for eight neighbouring keys
  /// of a query, which lie in eight lanes: each makes those of one of four rows and pairs, for one query of the pair,
  /// and gives the others theirs.
  CUTE_DEVICE void drop_out(Probabilities& probabilities, Probabilities& factors) const {
    if (p.dropout_threshold == 0) return;
    constexpr int kRowsAtOnce = kRows < 4 ? kRows : 4, kPairsAtOnce = 4 / kRowsAtOnce;
    static_assert(kRows % kRowsAtOnce == 0 && kPairs % kPairsAtOnce == 0);
    auto pairs = pairs_by_row<Types>(probabilities), others = pairs_by_row<Types>(factors);
    uint64_t const seed = *p.dropout_seed;
    int const sequence_head = sequence.batch * p.num_heads + head, lane = lane_id() / 4;
    CUTE_UNROLL
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; pair += kPairsAtOnce) {
        int const mine = lane / 2;
        PhiloxWords const made =
            dropout_numbers(seed, sequence_head, query + 8 * (pair + mine / kRowsAtOnce) + lane % 2,
                            key / 8 + row + mine % kRowsAtOnce);
        uint32_t given[4][2];
        exchange(made, lane, given);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint32_t const number0 = given[i][0] >> (lane % 2 * 16) & 0xffffu;
          uint32_t const number1 = given[i][1] >> (lane % 2 * 16) & 0xffffu;
          uint32_t const dropped =
              (number0 < p.dropout_threshold ? 0xffffu : 0u) | (number1 < p.dropout_threshold ? 0xffff0000u : 0u);
          int const r = row + i % kRowsAtOnce, n = pair + i / kRowsAtOnce;
          pairs(r, n) &= ~dropped;
          others(r, n) |= dropped & 0x80008000u;
        }
      }
    }
  }

  /// dP -> dS, rounded into `factors`; in `scores` it stays as it was. `terms(pair)`: D.
  template <class Terms>
  CUTE_DEVICE void differentiate(Probabilities& factors, Scores& scores, Terms const& terms) const {
    auto rows = by_row(scores);
    auto pairs = pairs_by_row<Types>(factors);
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      float2 const term = terms(pair);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        uint32_t const word = pairs(row, pair);
        float2 const factor = unpack<Element>(word & 0x7fff7fffu);
        float& x = rows(row, 2 * pair);
        float& y = rows(row, 2 * pair + 1);
        x = factor.x * ((word & 0x8000u ? 0.f : x * p.dropout_scale) - term.x);
        y = factor.y * ((word & 0x80000000u ? 0.f : y * p.dropout_scale) - term.y);
        pairs(row, pair) = pack<Element>(x, y);
      }
    }
    if (p.dbias != nullptr) add_bias_gradient(rows);
  }

 private:
  CUTE_DEVICE int64_t offset(ScoreStrides const& stride, int row, int pair) const {
    return sequence.batch * stride.batch + head * stride.head + (query + 8 * pair) * stride.query +
           (key + 8 * row) * stride.key;
  }
  CUTE_DEVICE bool exists(int row, int column) const {
    return key + 8 * row < sequence.keys && query + column < sequence.queries;
  }

  template <class Bias>
  CUTE_DEVICE void add_bias(Bias const* bias, int row, int pair, float (&added)[2]) const {
    Bias const* const from = bias + offset(p.bias_stride, row, pair);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (exists(row, 8 * pair + i)) added[i] = fmaf(float(from[i * p.bias_stride.query]), kLog2e, added[i]);
    }
  }
  CUTE_DEVICE void add_alibi(float slope, int row, int pair, float (&added)[2]) const {
    int const distance = query + 8 * pair + sequence.offset - (key + 8 * row);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) added[i] = fmaf(-slope, fabsf(float(distance + i)), added[i]);
  }
  CUTE_DEVICE void hide(int row, int pair, float (&x)[2]) const {
    uint8_t const* const from = p.mask + offset(p.mask_stride, row, pair);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (exists(row, 8 * pair + i) && from[i * p.mask_stride.query] == 0) x[i] = 0.f;
    }
  }

  /// Word `lane / 2` of what eight lanes made, by row or pair and query.
  CUTE_DEVICE static void exchange(PhiloxWords const& made, int lane, uint32_t (&given)[4][2]) {
    auto const swap_if = [](bool swaps, uint32_t& a, uint32_t& b) {
      uint32_t const before = a;
      a = swaps ? b : a;
      b = swaps ? before : b;
    };
    uint32_t words[4] = {made.word[0], made.word[1], made.word[2], made.word[3]};
    swap_if(lane & 2, words[0], words[1]), swap_if(lane & 2, words[2], words[3]);
    swap_if(lane & 4, words[0], words[2]), swap_if(lane & 4, words[1], words[3]);
    // words[i] is number i ^ lane / 2: what the lane whose number differs by 2 i or 2 i + 1 wants.
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      given[i][0] = __shfl_xor_sync(0xffffffffu, words[i], 8 * i);
      given[i][1] = __shfl_xor_sync(0xffffffffu, words[i], 8 * i + 4);
      swap_if(lane & 1, given[i][0], given[i][1]);
    }
    CUTE_UNROLL
    for (int n = 0; n < 2; ++n) {
      swap_if(lane & 2, given[0][n], given[1][n]), swap_if(lane & 2, given[2][n], given[3][n]);
      swap_if(lane & 4, given[0][n], given[2][n]), swap_if(lane & 4, given[1][n], given[3][n]);
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
