// What the hardware computes of floats in one instruction.
#pragma once

#include <cmath>

#include "../host_device.h"

namespace cutlass_fmha {

constexpr float kLog2e = 1.4426950408889634f;

FMHA_HOST_DEVICE inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

/// 1 / x of a number from 1 on, infinity too.
FMHA_HOST_DEVICE inline float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

}  // namespace cutlass_fmha
