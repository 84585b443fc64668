// Registers are what the walks over keys have least of: what is read anew at each use instead of kept, what is kept
// instead of computed anew, and how many are to spare beside the fragments.
#pragma once

#include <cute/tensor.hpp>

#include "../config.h"

namespace cutlass_fmha {

// Special registers, read anew at each use: a few instructions per phase of the main loop cost less than a register
// that lives through all of it.

CUTE_DEVICE unsigned thread_id() {
  unsigned id;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
  return id;
}

CUTE_DEVICE int lane_id() {
  int id;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
  return id;
}

/// A value that is the same in all lanes, so that the compiler knows it.
CUTE_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

/// A value of which the compiler must not know where it came from: it computes it here, neither later nor anew where it
/// is needed, and keeps the register.
CUTE_DEVICE uint32_t settled(uint32_t x) {
  uint32_t y, lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
  return y;
}
template <class T>
CUTE_DEVICE T* settled(T* x) {
  auto const bits = reinterpret_cast<uint64_t>(x);
  return reinterpret_cast<T*>(uint64_t{settled(uint32_t(bits >> 32))} << 32 | settled(uint32_t(bits)));
}

/// Zeros, which the compiler doesn't know.
static __constant__ uint4 unknown_zeros;

}  // namespace cutlass_fmha
