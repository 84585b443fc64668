// Dropout of the probabilities of a lane.
#pragma once

#include "dropout.h"
#include "lane_rows.cuh"

namespace cutlass_fmha {

/// Of two numbers, all bits of those that are kept.
CUTE_DEVICE uint32_t kept_pair(KeptNumbers const& kept, uint32_t numbers) {
  uint32_t y;
  asm("set.leu.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(numbers), "r"(kept.greatest));
  return y ^ kept.inverted;
}

template <ForwardConfig C, class Rows>
struct LaneDropout {
  using Order = KeyOrder<C>;

  FeatureParams const& p;
  FeatureTile const& tile;
  Rows const& rows;
  int key_begin;  ///< a multiple of 16

  /// (row, pair) of two packed probabilities, each pair in an n8 tile of its own.
  template <bool OneHead, class Pairs>
  CUTE_DEVICE void apply(Pairs&& pairs) const {
    if constexpr (OneHead) {
      in_order(pairs);
    } else if (p.pack != 1) {
      row_by_row(pairs);
    } else if constexpr (Order::kByLane) {
      by_runs(pairs);
    } else {
      in_order(pairs);
    }
  }

 private:
  /// Of the keys that a counter's numbers are of, the lane's first ones.
  CUTE_DEVICE uint32_t first_key() const {
    int const lane = lane_id() % 4;
    return uint32_t(key_begin) / 4 + (Order::kByLane ? lane / 2 * 4 : lane);
  }
  CUTE_DEVICE PhiloxWords numbers(uint64_t seed, QueryRow const& q, uint32_t key) const {
    return dropout_numbers(seed, tile.batch * p.num_heads + q.head, dropout_query(q.query), key, WideProduct{});
  }
  /// Of a head's rows.
  CUTE_DEVICE QueryRow query_at(int row) const { return {rows.row_begin + accumulator_row(row, lane_id()), tile.head}; }

  /// Where columns are in order, a lane has what a counter's numbers are of.
  template <class Pairs>
  CUTE_DEVICE void in_order(Pairs&& pairs) const {
    using namespace cute;
    uint64_t const seed = *p.dropout_seed;
    uint32_t const key = first_key();
    CUTE_UNROLL
    for (int row = 0; row < size<0>(pairs); row += 2) {
      QueryRow const q = query_at(row);
      CUTE_UNROLL
      for (int pair = 0; pair < size<1>(pairs); pair += 2) {
        PhiloxWords const made = numbers(seed, q, key + 2 * pair);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) pairs(row + i / 2, pair + i % 2) &= kept_pair(p.kept, made.word[i]);
      }
    }
  }

  /// Where a lane has runs of eight keys, half of a counter's numbers are its own, and half the next lane's.
  template <class Pairs>
  CUTE_DEVICE void by_runs(Pairs&& pairs) const {
    using namespace cute;
    uint64_t const seed = *p.dropout_seed;
    bool const upper = lane_id() % 2 != 0;
    uint32_t const key = first_key() + (upper ? 2 : 0);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(pairs); row += 2) {
      QueryRow const q = query_at(row);
      CUTE_UNROLL
      for (int call = 0; call < size<1>(pairs) / 2; ++call) {
        int const pair = call / 2 * 4 + call % 2;
        PhiloxWords const made = numbers(seed, q, key + 8 * (call / 2) + call % 2);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          uint32_t const low = made.word[2 * i], high = made.word[2 * i + 1];
          uint32_t const own = upper ? high : low, given = __shfl_xor_sync(0xffffffffu, upper ? low : high, 1);
          pairs(row + i, pair) &= kept_pair(p.kept, upper ? given : own);
          pairs(row + i, pair + 2) &= kept_pair(p.kept, upper ? own : given);
        }
      }
    }
  }

  /// Where rows are of any query. In a loop, for there are few of such calls.
  template <class Pairs>
  CUTE_DEVICE void row_by_row(Pairs&& pairs) const {
    using namespace cute;
    uint64_t const seed = *p.dropout_seed;
    uint32_t const key = first_key();
    constexpr int kPairs = decltype(size<1>(pairs))::value;
    CUTE_NO_UNROLL
    for (int row = 0; row < size<0>(pairs); ++row) {
      QueryRow const q = rows.at(p, tile, row);
      uint32_t kept[kPairs];
      if constexpr (Order::kByLane) {
        int const word = dropout_word(q.query, lane_id() % 2 * 8);
        CUTE_UNROLL
        for (int pair = 0; pair < kPairs; ++pair) {
          PhiloxWords const made = numbers(seed, q, key + pair / 4 * 8 + pair % 4);
          uint32_t const low = word % 2 == 0 ? made.word[0] : made.word[1];
          uint32_t const high = word % 2 == 0 ? made.word[2] : made.word[3];
          kept[pair] = kept_pair(p.kept, word < 2 ? low : high);
        }
      } else {
        bool const lower = dropout_word(q.query, 0) == 0;
        CUTE_UNROLL
        for (int pair = 0; pair < kPairs; pair += 2) {
          PhiloxWords const made = numbers(seed, q, key + 2 * pair);
          kept[pair] = kept_pair(p.kept, lower ? made.word[0] : made.word[2]);
          kept[pair + 1] = kept_pair(p.kept, lower ? made.word[1] : made.word[3]);
        }
      }
      CUTE_UNROLL
      for (int r = 0; r < size<0>(pairs); ++r) {
        CUTE_UNROLL
        for (int pair = 0; pair < kPairs; ++pair) {
          if (r == row) pairs(r, pair) &= kept[pair];
        }
      }
    }
  }
};

}  // namespace cutlass_fmha
