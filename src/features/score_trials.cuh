// What the softmax of a score-mod row asks of a phase's scores: which of them it takes as they are, on trial, and what
// becomes of those that fail.
#pragma once

#include "scores.cuh"

namespace cutlass_fmha {

/// What a trial takes for the exponents of scores; in its midst, what is done in a softmax.
template <class Keys>
struct ScoreOfWalk : ScoreItself {
  static constexpr bool kPauses = Keys::kPauses;

  Keys const& keys;
  int phase;

  CUTE_DEVICE ScoreOfWalk(Keys const& keys, int phase) : keys(keys), phase(phase) {}
  CUTE_DEVICE void pause() const { keys.in_softmax(phase); }
};

/// Scores as tanh(x) by a polynomial in x^2, in log2 units, right up to a magnitude of q k.
template <int Terms, class Keys>
struct CapOnTrial : ScoreOfWalk<Keys> {
  CapSeries<Terms> const& series;
  float largest = 0.f;  ///< magnitude; what is no number fails the trial itself

  CUTE_DEVICE CapOnTrial(Keys const& keys, int phase, CapSeries<Terms> const& series)
      : ScoreOfWalk<Keys>(keys, phase), series(series) {}
  CUTE_DEVICE float exponent(float score, int, float, float subtracted) {
    float const square = score * score;
    float value = series.terms[Terms - 1];
    CUTE_UNROLL
    for (int n = Terms - 2; n >= 0; --n) value = fmaf(value, square, series.terms[n]);
    largest = fmaxf(largest, fabsf(score));
    return fmaf(value, score, -subtracted);
  }
  CUTE_DEVICE bool holds() const { return largest <= series.limit; }
};

/// Scores with ALiBi's distances where they are a line: that of all rows but for what is the same for all keys of a
/// row.
template <ForwardConfig C, class Keys>
struct AlibiOnTrial : ScoreOfWalk<Keys> {
  FeatureParams const& p;
  float slope;  ///< of that line, in log2 units
  float first;  ///< AlibiLine

  CUTE_DEVICE AlibiOnTrial(Keys const& keys, int phase, AlibiLine<C> const& line)
      : ScoreOfWalk<Keys>(keys, phase), p(keys.p), slope(line.slope * kLog2e), first(line.first) {}

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

/// What a phase's scores lack for the softmax of a score-mod row: OnlineSoftmax's terms. WarpScores::large: for so many
/// polynomials some were too large, and so will others be. What is known of the block is asked for anew where a trial
/// failed, since no register is left to keep it meanwhile.
template <ForwardConfig C, class Keys, Modifier M>
struct ScoreTerms {
  static constexpr bool kTried = M == Modifier::alibi || M == Modifier::softcap;  ///< a trial takes scores as they are

  Keys const& keys;
  int phase;
  bool masked;
  bool tried = false;  ///< there was a trial that pauses

  /// All that a trial doesn't.
  template <class Scores>
  CUTE_DEVICE void prepare(Scores&& scores) const {
    if constexpr (kTried) return;
    ScoreBlock<C> const block = keys.block_at(phase);
    if constexpr (M == Modifier::any) block.modify(scores);
    if (masked) block.hide_by_range(scores);
  }

  template <class Trial>
  CUTE_DEVICE bool fails(Trial const& trial) {
    if constexpr (M == Modifier::softcap) {
      int const large = uniform(keys.warp_scores().large);
      if (masked || large > 1) return true;
      tried = true;
      return large == 0 ? fails(trial, keys.p.near_cap) : fails(trial, keys.p.far_cap);
    } else if constexpr (M == Modifier::alibi) {
      tried = true;
      AlibiLine<C> const line(keys.p, keys.warp_scores(), keys.first_key(phase));
      // Without a branch around it, which takes registers: what is no line is rare.
      return (masked || !line.exists) | trial(AlibiOnTrial<C, Keys>(keys, phase, line));
    } else {
      return trial(ScoreItself{});
    }
  }
  template <class Trial, int Terms>
  CUTE_DEVICE bool fails(Trial const& trial, CapSeries<Terms> const& series) const {
    CapOnTrial<Terms, Keys> value(keys, phase, series);
    bool const failed = trial(value);
    if (failed) {
      bool const large = __any_sync(0xffffffffu, !value.holds());
      __syncwarp();  // all lanes have read what is written now
      if (lane_id() == 0) keys.warp_scores().large += large;
      __syncwarp();
    }
    return failed;
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
      if (Keys::kPauses && !tried) keys.in_softmax(phase);
      if (keys.is_masked(phase)) block.hide_by_range(scores);
    }
  }
  /// What becomes of probabilities.
  template <class Pairs>
  CUTE_DEVICE void finish(Pairs&& pairs) const {
    if constexpr (!kTried || !Keys::kPauses) keys.in_softmax(phase);
    if (M == Modifier::dropout || (M == Modifier::any && keys.p.dropout_threshold != 0)) {
      keys.block_at(phase).template drop_out<M == Modifier::dropout>(pairs);
    }
  }
};

}  // namespace cutlass_fmha
