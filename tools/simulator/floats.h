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
inline float smaller(float a, float b) {
  if (a == b) return std::signbit(a) ? a : b;
  return a < b || b != b ? a : b;
}

inline float from_bfloat16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
/// Rounded to nearest, ties to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  return x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fff);
}

/// By a product, of which the compiler makes vector instructions.
inline float from_float16(uint16_t x) {
  uint32_t const size = x & 0x7fff, special = size >= 0x7c00 ? 0x7f800000 : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(size << 13) * 0x1p112f) | special |
                              uint32_t(x & 0x8000) << 16);
}
inline uint16_t to_float16(float x) {
  return x == x ? _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : uint16_t(0x7fff);
}

}  // namespace simulator
