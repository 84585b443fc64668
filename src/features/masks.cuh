// What masked rows read for each score: a mask or a 16-bit bias. A lane has four keys of each 16 in its scores
// (MaskedOrder), asks for what belongs to them before the turn in which they are computed, and gets it in registers.
#pragma once

#include "../core/registers.cuh"
#include "scores.cuh"

namespace cutlass_fmha {

/// Where a thread block reads, in shared memory: what belongs to its first row, and how many come after that.
struct alignas(16) MaskSource {
  char const *bias, *mask;
  int rows_left;

  CUTE_DEVICE MaskSource(FeatureParams const& p, Sequence const& sequence, FeatureTile const& tile, int element_bytes)
      : bias(at(p.bias, p.bias_stride, tile, element_bytes)),
        mask(at(p.mask, p.mask_stride, tile, 1)),
        rows_left(larger(0, sequence.queries - 1 - tile.row_begin)) {}

 private:
  CUTE_DEVICE static char const* at(void const* tensor, ScoreStrides const& stride, FeatureTile const& tile,
                                    int bytes) {
    return static_cast<char const*>(tensor) +
           (tile.batch * stride.batch + tile.head * stride.head + tile.row_begin * stride.query) * bytes;
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

/// What belongs to a lane's scores of a phase.
template <ForwardConfig C>
struct MaskFragment {
  using T = ForwardTypes<C>;
  static constexpr int kRows = 2 * T::kRowSteps;
  uint32_t words[kRows][T::kKeySteps][2];  ///< a mask's run is one word

  /// For rows from `tile_row` on and keys from `key` on.
  CUTE_DEVICE void ask(FeatureParams const& p, MaskSource const& source, int tile_row, int key) {
    if (p.bias_type != BiasType::none) {
      ask<2>(p, source.bias, p.bias_stride, source.rows_left, tile_row, key);
    } else if (p.mask != nullptr) {
      ask<1>(p, source.mask, p.mask_stride, source.rows_left, tile_row, key);
    }
  }

  template <class Scores>
  CUTE_DEVICE void apply(FeatureParams const& p, Scores&& scores) const {
    if (p.bias_type != BiasType::none) {
      add_bias(scores, p.scale);
      return;
    }
    if (!p.raw_scores) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) scores(i) *= p.scale;
    }
    if (p.mask != nullptr) hide(scores);
  }

 private:
  /// Rows that don't exist read the last one's, and keys beyond the tensor its last ones'.
  template <int Count>
  CUTE_DEVICE void ask(FeatureParams const& p, char const* tensor, ScoreStrides const& stride, int rows_left,
                       int tile_row, int key) {
    constexpr int bytes = Count * 4 / kMaskRun;
    int const lane = lane_id(), in_run = lane % 4 * kMaskRun;
    char const* const from = tensor + int64_t(key + in_run) * bytes;
    char const* rows[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      uint32_t const named = smaller(tile_row + accumulator_row(row, lane), rows_left);
      rows[row] = from + uint64_t(named) * uint32_t(stride.query * bytes);
    }
    if (key + C.tile_n <= p.seqlen_k) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int step = 0; step < T::kKeySteps; ++step) ask_for<Count>(rows[row] + step * 16 * bytes, words[row][step]);
      }
    } else {
      CUTE_UNROLL
      for (int step = 0; step < T::kKeySteps; ++step) {
        int const beyond = smaller(16 * step, p.seqlen_k - kMaskRun - key - in_run) * bytes;
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) ask_for<Count>(rows[row] + beyond, words[row][step]);
      }
    }
  }

  CUTE_DEVICE static bool upper_first() { return lane_id() & 2; }

  template <class Scores>
  CUTE_DEVICE void add_bias(Scores& scores, float scale) const {
    bool const swapped = upper_first();
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int step = 0; step < T::kKeySteps; ++step) {
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
    uint32_t all = 0x01010101u;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int step = 0; step < T::kKeySteps; ++step) all &= words[row][step][0];
    }
    if (!__any_sync(0xffffffffu, all != 0x01010101u)) return;
    uint32_t const order = upper_first() ? 0x1032 : 0x3210;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int step = 0; step < T::kKeySteps; ++step) {
        uint32_t const run = __byte_perm(words[row][step][0], 0, order);
        CUTE_UNROLL
        for (int i = 0; i < kMaskRun; ++i) {
          if ((run & (0xffu << 8 * i)) == 0) scores(row, 4 * step + i) = -INFINITY;
        }
      }
    }
  }
};

}  // namespace cutlass_fmha
