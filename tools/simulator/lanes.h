// One value for each thread of a warp. Loops over lanes are plain loops: the compiler makes vector instructions of
// them.
#pragma once

#include <bit>
#include <cstdint>

namespace simulator {

constexpr int kLanes = 32;

/// A set of lanes, and what a predicate register of a warp holds.
using Mask = uint32_t;
constexpr Mask kAllLanes = ~Mask(0);

template <class T>
struct alignas(64) Lanes {
  T lane[kLanes];

  T& operator[](int i) { return lane[i]; }
  T const& operator[](int i) const { return lane[i]; }
};

template <class F>
Mask mask_of(F const& holds) {
  Mask result = 0;
  for (int i = 0; i < kLanes; ++i) result |= static_cast<Mask>(static_cast<bool>(holds(i))) << i;
  return result;
}

/// The mask is not empty.
inline int first_lane(Mask mask) { return std::countr_zero(mask) & (kLanes - 1); }

/// Calls f(lane) for each lane of a mask, lowest first.
template <class F>
void for_lanes(Mask mask, F const& f) {
  if (mask == kAllLanes) {
    for (int i = 0; i < kLanes; ++i) f(i);
    return;
  }
  for (; mask != 0; mask &= mask - 1) f(first_lane(mask));
}

}  // namespace simulator
