// What several sets of keys say of a query row, made one: the softmax states of key parts, tail parts and splits, and
// the log-sum-exp that a row leaves with.
//
// A set i has O_i = sum_j 2^(c s_j - r_i) V_j and l_i, the same sum of ones, under a reference r_i = c m_i (see
// online_softmax.cuh). Their union, with the largest m, has O = sum_i w_i O_i and l = sum_i w_i l_i with
// w_i = 2^(r_i - r), and leaves as O / l and ln(2) (r + log2 l). A set that is left as O_i / l_i and a log-sum-exp is
// one of l_i = 1 whose m_i is that, in natural units.
#pragma once

#include "online_softmax.cuh"

namespace cutlass_fmha {

/// a * b, never contracted with what follows into an fma.
CUTE_HOST_DEVICE float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

/// w of a set under the maximum `part` where the largest is `whole`. A reference is fl(c m) unless the row is coarse,
/// and the very same rounding must be subtracted here; beside a coarse row, the exact difference counts.
CUTE_HOST_DEVICE float merge_weight(float part, float whole, float scale_log2) {
  float const r_part = rounded_product(part, scale_log2), r_whole = rounded_product(whole, scale_log2);
  bool const fine = fabsf(r_part) <= kCoarse && fabsf(r_whole) <= kCoarse;
  // Where nothing is visible at all, whole is -inf too, and -inf - 0 makes the weight 0.
  return exp2_approx(fine ? r_part - r_whole : (part - (whole == -INFINITY ? 0.f : whole)) * scale_log2);
}

/// The state of the union: see() each set's maximum first, then add() each with the weight() of its O.
struct MergedState {
  float maximum = -INFINITY;
  float sum = 0.f;  ///< l, against that maximum; 0 where no key is visible

  CUTE_HOST_DEVICE void see(float part) { maximum = fmaxf(maximum, part); }
  CUTE_HOST_DEVICE float weight(float part, float scale_log2) const { return merge_weight(part, maximum, scale_log2); }
  CUTE_HOST_DEVICE void add(float weight, float part_sum) { sum = fmaf(weight, part_sum, sum); }
  CUTE_HOST_DEVICE float lse(float scale_log2) const { return log_sum_exp(rounded_product(maximum, scale_log2), sum); }
  /// O / l of what was summed up, times what `inverse` is of l; 0 where no key is visible, whatever V held.
  CUTE_HOST_DEVICE float normalised(float o, float inverse) const { return sum == 0.f ? 0.f : o * inverse; }
};

/// o += weight * four neighbouring numbers of a set's O.
CUTE_HOST_DEVICE void add_weighted(float* o, float weight, float4 const& part) {
  o[0] = fmaf(weight, part.x, o[0]);
  o[1] = fmaf(weight, part.y, o[1]);
  o[2] = fmaf(weight, part.z, o[2]);
  o[3] = fmaf(weight, part.w, o[3]);
}

/// The log-sum-exp of a part as the sum of two floats. One alone would be off by 1 where scores are 2^24 large, and the
/// weights of the parts by its exponential; their maxima are exact.
struct PartLse {
  float high, low;

  /// `unit`: the natural units that a score is counted in.
  CUTE_HOST_DEVICE PartLse(MergedState const& merged, float unit) : high(merged.maximum * unit), low(0.f) {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465430e-9f;  // whose sum is ln(2)
    if (merged.sum == 0.f) return;
    if (merged.sum != merged.sum) high = low = merged.sum;  // NaN, which no maximum shows
    // What the softmax subtracted is the rounded product, unless the row is coarse: see OnlineSoftmax.
    float const reference = rounded_product(merged.maximum, unit * kLog2e);
    bool const fine = fabsf(reference) <= kCoarse;
    low = logf(merged.sum) +
          (fine ? fmaf(reference, kLn2, -high) + reference * kLn2Low : fmaf(merged.maximum, unit, -high));
  }
};

/// The same of sets that left a log-sum-exp, natural: how they add up. `reference` is the greatest, and may be
/// infinite.
struct MergedLse {
  float reference;
  float sum;  ///< of the weights; 0 when all are -inf

  CUTE_HOST_DEVICE static float weight(float lse, float reference) {
    return lse == reference ? 1.f : expf(lse - reference);
  }
  /// Of keys with weights under their `maximum`, which sum up to `sum`, and of a sink: one more key, whose value is 0.
  CUTE_HOST_DEVICE static MergedLse with_sink(float maximum, float sum, float sink) {
    float const top = fmaxf(sum == 0.f ? -INFINITY : maximum, sink);
    float const keys = sum == 0.f ? 0.f : weight(maximum, top) * sum;
    return {top, keys + (sink == -INFINITY ? 0.f : weight(sink, top))};
  }
  CUTE_HOST_DEVICE bool empty() const { return sum == 0.f; }
  CUTE_HOST_DEVICE float lse() const { return empty() ? -INFINITY : lse_of_some(); }
  /// What lse() has beside the reference.
  CUTE_HOST_DEVICE float rest() const { return empty() ? 0.f : logf(sum); }
  /// Where some set has a key.
  CUTE_HOST_DEVICE float lse_of_some() const { return reference + logf(sum); }
};

}  // namespace cutlass_fmha
