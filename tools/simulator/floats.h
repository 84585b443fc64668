// Floats as PTX has them: the one NaN that arithmetic results in, subnormal numbers that become zero, 16-bit formats.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace simulator {

inline float canonical(float x) { return x == x ? x : std::bit_cast<float>(0x7fffffffu); }

/// Zero of the same sign in place of a subnormal number.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

/// Of a number and a NaN the number; -0 is less than +0.
template <class T>
T smaller(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
T larger(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

inline float from_bfloat16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
/// Rounded to nearest, ties to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  return x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fff);
}

inline float from_float16(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_float16(float x) {
  return x == x ? _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : uint16_t(0x7fff);
}

/// 2^x, within two units in the last place like the hardware's.
inline float exp2_approximately(float x) {
  // 2^x = 2^n 2^f with n the nearest integer. Written without branches, so that it is computed for many lanes at once.
  float const clamped = x < -151.f ? -151.f : x > 129.f ? 129.f : x;
  float const n = std::nearbyint(clamped), f = clamped - n;
  // Taylor's series of exp(f ln 2) for |f| <= 1/2, whose next term is less than 2^-27.
  float p = 1.5403530e-4f;
  p = std::fma(p, f, 1.3333558e-3f);
  p = std::fma(p, f, 9.6181291e-3f);
  p = std::fma(p, f, 5.5504109e-2f);
  p = std::fma(p, f, 2.4022651e-1f);
  p = std::fma(p, f, 6.9314718e-1f);
  p = std::fma(p, f, 1.f);
  // In two steps, since 2^n may be subnormal or too large by itself.
  int const half = static_cast<int>(n) >> 1, rest = static_cast<int>(n) - half;
  float const a = std::bit_cast<float>((half + 127) << 23), b = std::bit_cast<float>((rest + 127) << 23);
  return x == x ? p * a * b : x;
}

}  // namespace simulator
