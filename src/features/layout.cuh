// Where a scored row has what in shared memory.
#pragma once

#include "../core/key_parts.cuh"
#include "place.cuh"

namespace cutlass_fmha {

/// Shared memory of a block: Q, rings of K and V tiles, and the state of the softmax. On the way out the tiles give way
/// to the key parts' O.
template <ForwardConfig C>
struct FeatureLayout {
  using Place = TilePlace<typename ForwardTypes<C>::Word>;
  static constexpr int kStepKeys = C.tile_n * C.kv_warps;
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kK = kStepKeys * C.head_dim * C.element_bytes();
  static constexpr int kV = kStepKeys * C.head_dim_v() * C.element_bytes();
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kK;
  static constexpr int kTiles = kVOffset + C.stages * kV;
  using KeyParts = KeyPartLayout<C, kTiles>;
  static constexpr int kPlace = KeyParts::kBytes;
  static constexpr int kViews = cute::ceil_div(kPlace + int(sizeof(Place)), 16) * 16;
  static constexpr int kBytes = kViews + C.warps * int(sizeof(CommonView));
  static_assert(kBytes <= 99 * 1024, "sm_89 and sm_120 have no more");

  CUTE_DEVICE static Place& place(char* smem) { return *reinterpret_cast<Place*>(smem + kPlace); }
  /// What a warp's queries see.
  CUTE_DEVICE static CommonView& view(char* smem, int warp) {
    return reinterpret_cast<CommonView*>(smem + kViews)[warp];
  }
};

}  // namespace cutlass_fmha
