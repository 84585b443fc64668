// The online softmax: the epilogue of S = Q K^T and the prologue of O += P V.
//
// For one query row and key blocks j = 1, 2, ... with scores s_j (Milakov & Gimelshein 2018; Rabe & Staats 2021;
// FlashAttention-2, Dao 2023), in log2 units (c = scale * log2(e)), with any reference r in place of the running
// maximum:
//     p_j  = 2^(c s_j - r)          l += sum(p_j)          O += p_j V_j
//     and, when r is raised to r':  l *= 2^(r - r'),       O *= 2^(r - r')
//     at the end                    O /= l,                LSE = ln(2) (r + log2 l)
// The result does not depend on r as long as nothing overflows and l does not vanish. So r need not be the maximum: a
// block is first tried against the old r, without looking for a maximum at all. Its sum tells whether that was good: a
// sum that is small enough bounds every p_j in it, and the block is done. Otherwise (one vote of the warp) r is raised
// to the true running maximum, l and O are rescaled, and the block is computed again from the scores, which are still
// in registers. A row whose keys were all masked so far has r = -inf, which makes the trial infinite or NaN and thus
// fails it: such rows come to their first maximum that way.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/tensor.hpp>

#include "approximate.cuh"

/// Of lambdas: inlined before the loops around them are unrolled, which gives ptxas a better order.
#define FMHA_INLINE __attribute__((always_inline))

namespace cutlass_fmha {

/// Two floats, rounded to nearest even, as one register of an mma operand.
template <class Element>
CUTE_HOST_DEVICE uint32_t pack(float low, float high) {
  constexpr bool kHalf = cute::is_same_v<Element, cutlass::half_t>;
#ifdef __CUDA_ARCH__
  uint32_t packed;
  if constexpr (kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
#else
  static_assert(kHalf || cute::is_same_v<Element, cutlass::bfloat16_t>);
  return uint32_t(Element(low).raw()) | uint32_t(Element(high).raw()) << 16;
#endif
}

/// A chunk of 16 bytes.
template <class Element>
CUTE_DEVICE uint4 pack_chunk(float const (&x)[8]) {
  return make_uint4(pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]),
                    pack<Element>(x[6], x[7]));
}

/// The floats that pack() made a register of.
template <class Element>
CUTE_HOST_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
    return {float(Element::bitcast(uint16_t(pair))), float(Element::bitcast(uint16_t(pair >> 16)))};
  } else {
    uint32_t const words[] = {pair << 16, pair & 0xffff0000u};
    float values[2];
    std::memcpy(values, words, sizeof(values));
    return {values[0], values[1]};
  }
}

/// LSE (natural log) of a row whose probabilities relative to 2^r sum up to l; -inf where no key was visible.
CUTE_HOST_DEVICE float log_sum_exp(float r, float l) {
  constexpr float kLn2 = 0.6931471805599453f;
  return l == 0.f ? -INFINITY : (r + log2f(l)) * kLn2;
}

/// Scores whose magnitude in log2 units exceeds this get careful treatment, see OnlineSoftmax: half a unit in the last
/// place of 2^14 is 2^-10.5 in the exponent, less than P's rounding to fp16.
constexpr float kCoarse = 16384.f;

#ifdef __CUDACC__
/// A row of an mma accumulator lies in four neighbouring lanes.
struct QuadOfLanes {
  CUTE_DEVICE static float max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
  CUTE_DEVICE static float sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
  CUTE_DEVICE static bool any(bool x) { return __any_sync(0xffffffffu, x); }
};
#else
struct QuadOfLanes;
#endif

/// One thread holds whole rows: how the recurrence runs on the host, for the tests.
struct SingleThread {
  CUTE_HOST_DEVICE static float max(float x) { return x; }
  CUTE_HOST_DEVICE static float sum(float x) { return x; }
  CUTE_HOST_DEVICE static bool any(bool x) { return x; }
};

/// What a trial takes for the exponents of a row of scores: these. subtracted(row, r): what its exponents lack but for
/// r; exponent(score, column, scale_log2, subtracted); holds(): whether all of them were right; kPauses: pause() is
/// called once three quarters of the exponentials are made.
struct ScoreItself {
  static constexpr bool kPauses = false;

  CUTE_HOST_DEVICE float subtracted(int, float reference) const { return reference; }
  CUTE_HOST_DEVICE float exponent(float score, int, float scale_log2, float subtracted) const {
    return fmaf(score, scale_log2, -subtracted);
  }
  CUTE_HOST_DEVICE bool holds() const { return true; }
};

/// Scores that are what the softmax takes: see OnlineSoftmax::step.
struct ScoresAsTheyAre {
  template <class Trial>
  CUTE_HOST_DEVICE bool fails(Trial const& trial) const {
    return trial(ScoreItself{});
  }
  template <class Scores>
  CUTE_HOST_DEVICE void settle(Scores const&) const {}
};

/// State of `Rows` query rows of one thread. P is stored as `Element`, which bounds how far a trial may overshoot.
///
/// Scores whose magnitude in log2 units exceeds kCoarse get careful treatment: there, r = fl(c m) for a maximum m is
/// off by so much that 2^(c m - r) is no longer near 1. Such rows keep r = -inf, so that every block of theirs goes
/// through the careful branch, which takes the exact difference s - m first. The maxima m are needed in that branch
/// only; `maxima` keeps them out of registers: get(row) returns what the warp's last set(row, m) stored.
template <int Rows, class Element, class Exchange = QuadOfLanes>
struct OnlineSoftmax {
  /// Largest accepted sum of a trial block, over the rows of a thread. 2^15 keeps each p a finite fp16 number; bf16
  /// could take far more, 2^20 leaves 2^107 for l and O to grow in.
  static constexpr float kTrialLimit = cute::is_same_v<Element, cutlass::half_t> ? 32768.f : 1048576.f;

  using PerRow = cute::array<float, Rows>;

  float scale_log2;
  PerRow reference;  ///< r, in log2 units; -inf before the row has seen a key, and for coarse rows
  PerRow row_sum;    ///< l, this thread's share

  CUTE_HOST_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
    CUTE_UNROLL
    for (int row = 0; row < Rows; ++row) {
      reference[row] = -INFINITY;
      row_sum[row] = 0.f;
    }
  }

  /// Instead of a first block: a row starts as if it had seen one key of this score whose value is 0, counted by one of
  /// the threads that share the row (`counts`), or none, with a score of -inf.
  template <class Maxima>
  CUTE_HOST_DEVICE void start(int row, float score, bool counts, Maxima&& maxima) {
    maxima.set(row, score);
    reference[row] = fabsf(score * scale_log2) <= kCoarse ? score * scale_log2 : -INFINITY;
    row_sum[row] = counts && score != -INFINITY ? 1.f : 0.f;
  }

  /// Turns a block of scores into probabilities. scores: (row, column); pairs: (row, column / 2) of two packed
  /// Elements; output: (row, column) of the accumulator of O. `First`: nothing was accumulated yet.
  /// `terms`: what scores still lack. fails(trial) calls trial(value), see ScoreItself, or says that no trial is worth
  /// it. Where one failed, settle(scores) makes them what they should be.
  template <bool First, class Scores, class Pairs, class Output, class Maxima, class Terms = ScoresAsTheyAre>
  CUTE_HOST_DEVICE void step(Scores const& scores, Pairs&& pairs, Output&& output, Maxima&& maxima,
                             Terms&& terms = {}) {
    PerRow block_sum;
    bool raise = true;
    if constexpr (!First) {
      raise = terms.fails([&](auto&& value) FMHA_INLINE {
        PerRow subtracted;
        CUTE_UNROLL
        for (int row = 0; row < Rows; ++row)
          subtracted[row] = value.subtracted(row, reference[row]), block_sum[row] = 0.f;
        CUTE_UNROLL
        for (int pair = 0; pair < cute::size<1>(pairs); ++pair) {
          if constexpr (cute::remove_cvref_t<decltype(value)>::kPauses) {
            if (pair == cute::size<1>(pairs) * 3 / 4) {
              made_by_now(block_sum, pairs, pair);
              value.pause();
            }
          }
          CUTE_UNROLL
          for (int row = 0; row < Rows; ++row) {
            block_sum[row] += exponentiate(scores, pairs, row, pair, [&](float score, int col) {
              return value.exponent(score, col, scale_log2, subtracted[row]);
            });
          }
        }
        float all = block_sum[0];  // a sum, not a maximum: fmaxf would drop a NaN
        CUTE_UNROLL
        for (int row = 1; row < Rows; ++row) all += block_sum[row];
        return Exchange::any(!(all <= kTrialLimit) || !value.holds());
      });
    }
    if (raise) {
      terms.settle(scores);
      CUTE_UNROLL
      for (int row = 0; row < Rows; ++row) {
        float const maximum = raise_reference<First>(scores, output, maxima, row), r = reference[row];
        block_sum[row] = 0.f;
        CUTE_UNROLL
        for (int pair = 0; pair < cute::size<1>(pairs); ++pair) {
          block_sum[row] += exponentiate(scores, pairs, row, pair, [&](float score, int) {
            return r == -INFINITY ? (score - maximum) * scale_log2 : fmaf(score, scale_log2, -r);
          });
        }
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < Rows; ++row) row_sum[row] += block_sum[row];
  }

  /// O *= factor / l in place; returns LSE (natural log) per row: -inf, and O = 0, where no key was visible. Rows with
  /// none are rare, and this code runs once: an instruction per element less counts more than the branch for them.
  template <class Output, class Maxima>
  CUTE_HOST_DEVICE PerRow finalize(Output&& output, Maxima&& maxima, float factor = 1.f) const {
    PerRow lse;
    CUTE_UNROLL
    for (int row = 0; row < Rows; ++row) {
      float const sum = Exchange::sum(row_sum[row]);
      bool const empty = sum == 0.f;
      float const inverse = reciprocal(sum) * factor;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(output); ++col) output(row, col) *= inverse;
      if (Exchange::any(empty)) {
        CUTE_UNROLL
        for (int col = 0; col < cute::size<1>(output); ++col) output(row, col) = empty ? 0.f : output(row, col);
      }
      float const maximum = maxima.get(row) * scale_log2;  // by all lanes: get() synchronises the warp
      float const r = reference[row] == -INFINITY ? maximum : reference[row];
      lse[row] = log_sum_exp(r, sum);
    }
    return lse;
  }

 private:
  /// The compiler would make all probabilities after what stands between them otherwise.
  template <class Pairs>
  CUTE_HOST_DEVICE static void made_by_now(PerRow& sums, Pairs&& pairs, int made) {
#ifdef __CUDA_ARCH__
    CUTE_UNROLL
    for (int row = 0; row < Rows; ++row) {
      asm volatile("" : "+f"(sums[row]));
      CUTE_UNROLL
      for (int pair = 0; pair < made; ++pair) asm volatile("" : "+r"(pairs(row, pair)));
    }
#endif
  }

  /// To a unit in the last place or two of a float, of which O keeps 11 bits at most.
  CUTE_HOST_DEVICE static float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    return __fdividef(1.f, x);
#else
    return 1.f / x;
#endif
  }

  /// Two neighbouring probabilities of a row, stored as a pair; returns their sum before rounding.
  template <class Scores, class Pairs, class Exponent>
  CUTE_HOST_DEVICE static float exponentiate(Scores const& scores, Pairs&& pairs, int row, int pair,
                                             Exponent const& exponent) {
    float const p0 = exp2_approx(exponent(scores(row, 2 * pair), 2 * pair));
    float const p1 = exp2_approx(exponent(scores(row, 2 * pair + 1), 2 * pair + 1));
    pairs(row, pair) = pack<Element>(p0, p1);
    return p0 + p1;
  }

  /// Raises r to the running maximum m and rescales what was accumulated against the old one. Returns what a row
  /// without r must subtract from its scores: m, and 0 where nothing is visible yet, for 2^(-inf - 0) = 0.
  template <bool First, class Scores, class Output, class Maxima>
  CUTE_HOST_DEVICE float raise_reference(Scores const& scores, Output&& output, Maxima&& maxima, int row) {
    float block = scores(row, 0);
    CUTE_UNROLL
    for (int col = 1; col < cute::size<1>(scores); ++col) block = fmaxf(block, scores(row, col));
    float const old = First ? -INFINITY : maxima.get(row);
    block = Exchange::max(block);
    float const m = fmaxf(old, block);
    maxima.set(row, m);
    bool const fine = fabsf(m * scale_log2) <= kCoarse;
    float const raised = fine ? m * scale_log2 : -INFINITY;
    if constexpr (!First) {
      float const change = fine && reference[row] != -INFINITY ? reference[row] - raised : (old - m) * scale_log2;
      float const factor = old == -INFINITY ? 0.f : exp2_approx(change);
      row_sum[row] *= factor;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(output); ++col) output(row, col) *= factor;
    }
    reference[row] = raised;
    return m == -INFINITY ? 0.f : m;
  }
};

}  // namespace cutlass_fmha
