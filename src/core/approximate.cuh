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

/// tanh(x / (2 log2(e))), by one exponential: 1 - 2 / (1 + 2^x) is off by an ulp of 1 at most, and as softcap scales
/// what is near 0, that is no more exact than what is near 1.
FMHA_HOST_DEVICE inline float tanh_of_exp2(float x) {
  return std::fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(x)), 1.f);
}

}  // namespace cutlass_fmha
