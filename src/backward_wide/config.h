// The compile-time description of a row that computes gradients of float32, or of head dims above 256.
#pragma once

#include "../config.h"

namespace cutlass_fmha {

/// tile_m and tile_n: query rows or keys that a thread block owns, and that a step of its walk meets. They are the
/// same: a block owns either.
struct WideBackwardConfig : TileConfig {
  constexpr Family family() const { return Family::backward_wide; }
  static constexpr bool scored() {
    return true;
  }  ///< knows masks and biases; every sum but a bias's gradient has a fixed order
  constexpr int head_dim_v() const { return head_dim; }
  constexpr int alignment() const { return 16; }
};

}  // namespace cutlass_fmha
