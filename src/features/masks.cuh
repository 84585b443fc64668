// What masked rows read for each score: a mask or a 16-bit bias. A lane has four keys of each 16 in its scores
// (MaskedOrder), asks for what belongs to them before the turn in which they are computed, and gets it in registers.
#pragma once

#include "../core/registers.cuh"
#include "scores.cuh"

namespace cutlass_fmha {

/// Where a thread block reads, in shared memory: what belongs to its first row, and how many come after that.
struct alignas(16) MaskSource {
  char const *bias, *mask;
  uint32_t const* bits;  ///< of the queries from the first row's on
  int rows_left;

  CUTE_DEVICE MaskSource(FeatureParams const& p, Sequence const& sequence, FeatureTile const& tile, int element_bytes)
      : bias(at(p.bias, p.bias_stride, tile, element_bytes)),
        mask(at(p.mask, p.mask_stride, tile, 1)),
        bits(p.mask_bits + p.bits_stride.offset(tile.batch, tile.head, tile.row_begin / MaskBits::kQueries)),
        rows_left(larger(0, sequence.queries - 1 - tile.row_begin)) {}

 private:
  CUTE_DEVICE static char const* at(void const* tensor, ScoreStrides const& stride, FeatureTile const& tile,
                                    int bytes) {
    return static_cast<char const*>(tensor) + stride.offset(tile.batch, tile.head, tile.row_begin) * bytes;
  }
};

/// Loads that stay where they are written: before a turn.
template <int Words>
CUTE_DEVICE void ask_for(char const* from, uint32_t* run) {
  static_assert(Words == 1 || Words == 2);
  if constexpr (Words == 2) {
    asm volatile("ld.global.nc.L2::256B.v2.b32 {%0, %1}, [%2];" : "=r"(run[0]), "=r"(run[1]) : "l"(from));
  } else {
    asm volatile("ld.global.nc.L2::256B.b32 %0, [%1];" : "=r"(run[0]) : "l"(from));
  }
}

/// Scores of hidden keys become `value`. `seen(row)`: VisibleKeys; `of_run(row, step, hidden)`: of a lane's four keys
/// of 16, 16 bits for each that is hidden.
template <ForwardConfig C, class Scores, class Seen, class OfRun = std::nullptr_t>
CUTE_DEVICE void hide_scores(Scores& scores, Seen const& seen, float value, OfRun const& of_run = {}) {
  using Order = KeyOrder<C>;
  CUTE_UNROLL
  for (int row = 0; row < 2 * ForwardTypes<C>::kRowSteps; ++row) {
    VisibleKeys const visible = seen(row);
    CUTE_UNROLL
    for (int step = 0; step < ForwardTypes<C>::kKeySteps; ++step) {
      uint32_t hidden[2] = {};
      CUTE_UNROLL
      for (int i = 0; i < kMaskRun; ++i) {
        int const col = 4 * step + i;
        if (!visible.sees(Order::first(lane_id(), i / 2) + Order::of_column(col))) {
          scores(row, col) = value;
          hidden[i / 2] |= 0xffffu << 16 * (i % 2);
        }
      }
      if constexpr (!std::is_null_pointer_v<OfRun>) of_run(row, step, hidden);
    }
  }
}

/// What a launch reads: the walk is compiled for each, so that nothing is asked between scores and exponentials.
enum class ReadsScores { mask, bias, bits };

/// What belongs to a lane's scores of a phase.
template <ForwardConfig C, ReadsScores Kind>
struct MaskFragment {
  using T = ForwardTypes<C>;
  using Order = KeyOrder<C>;
  static constexpr bool kBias = Kind == ReadsScores::bias;
  static constexpr int kRows = 2 * T::kRowSteps;
  static constexpr int kWords = kBias ? 2 : 1;          ///< of a run of kMaskRun keys
  static constexpr int kBytes = kWords * 4 / kMaskRun;  ///< of a key
  uint32_t words[kRows][T::kKeySteps][kWords];

  /// For rows from `tile_row` on and keys from `key` on. Rows that don't exist read the last one's, and keys beyond the
  /// tensor its last ones'.
  CUTE_DEVICE void ask(FeatureParams const& p, MaskSource const& source, int tile_row, int key) {
    int const lane = lane_id(), in_run = lane % 4 * kMaskRun;
    char const* const from = (kBias ? source.bias : source.mask) + int64_t(key + in_run) * kBytes;
    uint32_t const stride = (kBias ? p.bias_stride : p.mask_stride).query * kBytes;
    char const* rows[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      uint32_t const named = smaller(tile_row + accumulator_row(row, lane), source.rows_left);
      rows[row] = from + uint64_t(named) * stride;
    }
    if (key + C.tile_n <= p.seqlen_k) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int step = 0; step < T::kKeySteps; ++step)
          ask_for<kWords>(rows[row] + step * 16 * kBytes, words[row][step]);
      }
    } else {
      CUTE_UNROLL
      for (int step = 0; step < T::kKeySteps; ++step) {
        int const beyond = smaller(16 * step, p.seqlen_k - kMaskRun - key - in_run) * kBytes;
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) ask_for<kWords>(rows[row] + beyond, words[row][step]);
      }
    }
  }

  /// q k -> score. `by_range`: some keys are hidden besides, `seen(row)` tells which (VisibleKeys, from the tile on).
  /// What is rare comes first: all else is then one run of instructions with the exponentials.
  template <class Scores, class Seen>
  CUTE_DEVICE void apply(FeatureParams const& p, Scores&& scores, bool by_range, Seen const& seen) {
    if constexpr (!kBias) {
      if (!p.raw_scores) {
        CUTE_UNROLL
        for (int i = 0; i < cute::size(scores); ++i) scores(i) *= p.scale;
      }
    }
    if (by_range) hide_by_range(scores, seen);
    if constexpr (kBias) {
      add(scores, p.scale);
    } else {
      hide(scores);
    }
  }

 private:
  /// Whether a lane's columns of every other n8 tile are those of a run's upper keys: MaskedOrder.
  CUTE_DEVICE static bool upper_first() { return lane_id() & 2; }

  /// A bias's runs become -inf where a key is hidden, whose score, 0 here, has a factor still.
  template <class Scores, class Seen>
  CUTE_DEVICE void hide_by_range(Scores& scores, Seen const& seen) {
    if constexpr (!kBias) {
      hide_scores<C>(scores, seen, -INFINITY);
    } else {
      constexpr uint32_t infinities = C.dtype == DType::float16 ? 0xfc00fc00u : 0xff80ff80u;
      hide_scores<C>(scores, seen, 0.f, [&](int row, int step, uint32_t const(&hidden)[2]) FMHA_INLINE {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          uint32_t const of_pair = upper_first() ? hidden[1 - i] : hidden[i];
          words[row][step][i] = (words[row][step][i] & ~of_pair) | (infinities & of_pair);
        }
      });
    }
  }

  template <class Scores>
  CUTE_DEVICE void add(Scores& scores, float scale) const {
    bool const swapped = upper_first();
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        auto const& run = words[row][step];
        uint32_t const pairs[] = {swapped ? run[1] : run[0], swapped ? run[0] : run[1]};
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float2 const added = unpack<typename T::Element>(pairs[i]);
          float &low = scores(row, 4 * step + 2 * i), &high = scores(row, 4 * step + 2 * i + 1);
          low = fmaf(low, scale, added.x), high = fmaf(high, scale, added.y);
        }
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE void hide(Scores& scores) const {
    uint32_t const order = upper_first() ? 0x1032 : 0x3210;
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        uint32_t const run = __byte_perm(words[row][step][0], 0, order);
        CUTE_UNROLL
        for (int i = 0; i < kMaskRun; ++i) {
          float& score = scores(row, 4 * step + i);
          score = run & 0xffu << 8 * i ? score : -INFINITY;
        }
      }
    }
  }
};

/// The same of a mask's bits.
template <ForwardConfig C>
struct MaskFragment<C, ReadsScores::bits> {
  using T = ForwardTypes<C>;
  using Order = KeyOrder<C>;
  static constexpr bool kBias = false;
  static constexpr int kRows = 2 * T::kRowSteps;
  /// Of a word, so many bytes are one load: those of 16 keys each by which all steps begin.
  static constexpr int kBytes = C.tile_n % 64 == 0 ? 4 : C.tile_n % 32 == 0 ? 2 : 1;
  static constexpr int kLoads = T::kKeySteps / kBytes;
  static constexpr int kWordBytes = MaskBits::kLanes * int(sizeof(uint32_t));  ///< of a word of each lane: 64 keys
  uint32_t words[T::kRowSteps][kLoads];

  /// Words go beyond the last key, to the end of a step of 64.
  CUTE_DEVICE void ask(FeatureParams const& p, MaskSource const& source, int tile_row, int key) {
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      uint32_t const group =
          smaller(uint32_t(tile_row) / MaskBits::kQueries + m, uint32_t(source.rows_left) / MaskBits::kQueries);
      auto const* const from =
          reinterpret_cast<char const*>(source.bits + uint64_t(group) * uint32_t(p.bits_stride.query) + lane_id());
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        uint32_t const step = uint32_t(key) / 16 + i * kBytes;  // of 16 keys
        words[m][i] = load(from + (kBytes == 4 ? step * kWordBytes / 4 : step / 4 * kWordBytes + step % 4));
      }
    }
  }

  template <class Scores, class Seen>
  CUTE_DEVICE void apply(FeatureParams const& p, Scores&& scores, bool by_range, Seen const& seen) {
    if (!p.raw_scores) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) scores(i) *= p.scale;
    }
    if (by_range) hide_scores<C>(scores, seen, -INFINITY);
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int i = 0; i < kMaskRun; ++i) {
          float& score = scores(row, 4 * step + i);
          uint32_t const bit = 1u << (step % kBytes * 8 + row % 2 * 4 + i);
          score = words[row / 2][step / kBytes] & bit ? score : -INFINITY;
        }
      }
    }
  }

 private:
  /// One that stays where it is written.
  CUTE_DEVICE static uint32_t load(char const* from) {
    uint32_t word = 0;
    if constexpr (kBytes == 4) {
      asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
    } else if constexpr (kBytes == 2) {
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(word) : "l"(from));
    } else {
      asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(word) : "l"(from));
    }
    return word;
  }
};

}  // namespace cutlass_fmha
