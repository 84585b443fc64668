// Numbers: integers of 16, 32 and 64 bits, floats, and the approximate functions.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

template <class T>
using Wide = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 2, int32_t, int64_t>,
                                std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>>;

template <class T>
void add_integers(Opcodes& ops) {
  std::string const type = "." + type_name<T>();
  add_elementwise<[](T a, T b) { return static_cast<T>(a + b); }>(ops, {"add" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a - b); }>(ops, {"sub" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a * b); }>(ops, {"mul.lo" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(__int128(a) * b >> 8 * sizeof(T)); }>(ops, {"mul.hi" + type});
  add_elementwise<[](T a, T b, T c) { return static_cast<T>(a * b + c); }>(ops, {"mad.lo" + type});
  // PTX leaves open what a division by zero gives. The smallest number by -1 is one too many for T.
  add_elementwise<[](T a, T b) { return static_cast<T>(b == 0 ? -1 : __int128(a) / b); }>(ops, {"div" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(b == 0 ? a : __int128(a) % b); }>(ops, {"rem" + type});
  add_elementwise<[](T a, T b) { return std::min(a, b); }>(ops, {"min" + type});
  add_elementwise<[](T a, T b) { return std::max(a, b); }>(ops, {"max" + type});
  if constexpr (sizeof(T) < 8) {
    using W = Wide<T>;
    add_elementwise<[](T a, T b) { return static_cast<W>(W(a) * b); }>(ops, {"mul.wide" + type});
    add_elementwise<[](T a, T b, W c) { return static_cast<W>(W(a) * b + c); }>(ops, {"mad.wide" + type});
  }
  if constexpr (std::is_signed_v<T>) {
    add_elementwise<[](T a) { return static_cast<T>(0 - a); }>(ops, {"neg" + type});
  }
}

template <class... T>
void add_integers_of(Opcodes& ops) {
  (add_integers<T>(ops), ...);
}

/// a * b + c rounded down. The product of two floats is exact in double, and so is what the sum of doubles rounds off
/// (Knuth's TwoSum).
float fma_down(float a, float b, float c) {
  double const product = double(a) * b, sum = product + c, part = sum - product;
  double const rest = (product - (sum - part)) + (c - part);
  auto const nearest = static_cast<float>(sum);
  bool const above = nearest > sum || (nearest == sum && rest < 0);
  return canonical(above ? std::nextafter(nearest, -INFINITY) : nearest);
}

}  // namespace

void add_arithmetic(Opcodes& ops) {
  add_integers_of<int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(ops);
  using F = float;
  add_elementwise<[](F a, F b) { return canonical(a + b); }>(ops, {"add.f32", "add.rn.f32"});
  add_elementwise<[](F a, F b) { return canonical(a - b); }>(ops, {"sub.f32", "sub.rn.f32"});
  add_elementwise<[](F a, F b) { return canonical(a * b); }>(ops, {"mul.f32", "mul.rn.f32"});
  add_elementwise<[](F a, F b) { return canonical(a / b); }>(ops, {"div.rn.f32", "div.approx.f32"});
  add_elementwise<[](F a, F b, F c) { return canonical(std::fma(a, b, c)); }>(ops, {"fma.rn.f32"});
  add_elementwise<[](F a, F b, F c) { return fma_down(a, b, c); }>(ops, {"fma.rm.f32"});
  add_elementwise<[](F a) { return -a; }>(ops, {"neg.f32"});
  add_elementwise<[](F a) { return std::fabs(a); }>(ops, {"abs.f32"});
  add_elementwise<[](F a, F b) { return std::copysign(b, a); }>(ops, {"copysign.f32"});
  add_elementwise<[](F a, F b) { return canonical(smaller(a, b)); }>(ops, {"min.f32"});
  add_elementwise<[](F a, F b) { return canonical(-smaller(-a, -b)); }>(ops, {"max.f32"});
  // From the hardware's approximations these differ in the last bits.
  add_elementwise<[](F a) { return canonical(1.f / a); }>(ops, {"rcp.rn.f32"});
  add_elementwise<[](F a) { return canonical(flushed(1.f / flushed(a))); }>(ops, {"rcp.approx.ftz.f32"});
  add_elementwise<[](F a) { return canonical(1.f / std::sqrt(a)); }>(ops, {"rsqrt.approx.f32"});
  add_elementwise<[](F a) { return canonical(std::exp2(a)); }>(ops, {"ex2.approx.f32"});
  add_elementwise<[](F a) { return canonical(flushed(std::exp2(flushed(a)))); }>(ops, {"ex2.approx.ftz.f32"});
}

}  // namespace simulator
