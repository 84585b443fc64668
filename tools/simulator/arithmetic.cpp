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

/// An operand and a result; with `ftz` subnormal numbers become zero.
template <bool ftz>
float given(float x) {
  return ftz ? flushed(x) : x;
}
template <bool ftz>
float result(float x) {
  return canonical(ftz ? flushed(x) : x);
}

template <bool ftz>
void add_floats(Opcodes& ops) {
  using F = float;
  std::string const tail = ftz ? ".ftz.f32" : ".f32";
  add_elementwise<[](F a, F b) { return result<ftz>(given<ftz>(a) + given<ftz>(b)); }>(
      ops, spell({{"add"}, {"", ".rn"}, {tail}}));
  add_elementwise<[](F a, F b) { return result<ftz>(given<ftz>(a) - given<ftz>(b)); }>(
      ops, spell({{"sub"}, {"", ".rn"}, {tail}}));
  add_elementwise<[](F a, F b) { return result<ftz>(given<ftz>(a) * given<ftz>(b)); }>(
      ops, spell({{"mul"}, {"", ".rn"}, {tail}}));
  add_elementwise<[](F a, F b) { return result<ftz>(given<ftz>(a) / given<ftz>(b)); }>(
      ops, spell({{"div.rn", "div.approx"}, {tail}}));
  add_elementwise<[](F a, F b, F c) { return result<ftz>(std::fma(given<ftz>(a), given<ftz>(b), given<ftz>(c))); }>(
      ops, {"fma.rn" + tail});
  add_elementwise<[](F a) { return result<ftz>(1.f / given<ftz>(a)); }>(ops,
                                                                        spell({{"rcp"}, {".rn", ".approx"}, {tail}}));
  add_elementwise<[](F a) { return result<ftz>(1.f / std::sqrt(given<ftz>(a))); }>(ops, {"rsqrt.approx" + tail});
  add_elementwise<[](F a) { return -given<ftz>(a); }>(ops, {"neg" + tail});
  add_elementwise<[](F a) { return std::fabs(given<ftz>(a)); }>(ops, {"abs" + tail});

  add_elementwise<[](F a, F b) { return result<ftz>(smaller(a, b)); }>(ops, {"min" + tail});
  add_elementwise<[](F a, F b) { return result<ftz>(larger(a, b)); }>(ops, {"max" + tail});
  // The hardware's approximation, from which this one differs in the last bits.
  add_elementwise<[](F a) { return result<ftz>(std::exp2(given<ftz>(a))); }>(ops, {"ex2.approx" + tail});
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
  add_floats<false>(ops);
  add_floats<true>(ops);
  add_elementwise<[](float a, float b) { return std::copysign(b, a); }>(ops, {"copysign.f32"});
  add_elementwise<[](float a, float b, float c) { return fma_down(a, b, c); }>(ops, {"fma.rm.f32"});
}

}  // namespace simulator
