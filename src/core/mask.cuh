// What masks by ranges do to scores: see visibility.h.
#pragma once

#include <cute/tensor.hpp>

#include "visibility.h"

namespace cutlass_fmha {

/// Whether scores of a phase get a mask: a loop over phases either knows, or asks in each.
enum class Masked { yes, no, ask };

/// Sets the scores of invisible keys to -inf. `scores` is a (row, column) view of a fragment, `coordinates` the same
/// view of an identity tensor: (row, column) within the warp's tile, whose origin is (row_begin, key_begin).
template <class Scores, class Coordinates>
CUTE_HOST_DEVICE void apply_mask(ForwardParams const& p, Scores&& scores, Coordinates const& coordinates, int row_begin,
                                 int key_begin) {
  using namespace cute;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int const visible = visible_keys(p, row_begin + get<0>(coordinates(row, _0{}))) - key_begin;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if (get<1>(coordinates(_0{}, col)) >= visible) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace cutlass_fmha
