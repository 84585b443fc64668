// Numbers: integers of 16, 32 and 64 bits, floats, and the approximate functions.
#include <cmath>
#include <limits>
#include <type_traits>

#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

template <class T>
constexpr T high(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b) >> (8 * sizeof(T)));
}

/// PTX leaves open what a division by zero gives.
template <class T>
constexpr T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return static_cast<T>(0 - a);  // also of the smallest number
  }
  return static_cast<T>(a / b);
}

template <class T>
constexpr T remainder(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return 0;
  }
  return static_cast<T>(a % b);
}

template <class T>
void add_integers(Opcodes& ops, std::string const& type) {
  add_elementwise<[](T a, T b) { return static_cast<T>(a + b); }>(ops, {"add." + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a - b); }>(ops, {"sub." + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) * b); }>(ops, {"mul.lo." + type});
  add_elementwise<[](T a, T b) { return high(a, b); }>(ops, {"mul.hi." + type});
  add_elementwise<[](T a, T b, T c) { return static_cast<T>(static_cast<Wide<T>>(a) * b + c); }>(ops,
                                                                                                 {"mad.lo." + type});
  add_elementwise<[](T a, T b) { return quotient(a, b); }>(ops, {"div." + type});
  add_elementwise<[](T a, T b) { return remainder(a, b); }>(ops, {"rem." + type});
  add_elementwise<[](T a, T b) { return a < b ? a : b; }>(ops, {"min." + type});
  add_elementwise<[](T a, T b) { return a < b ? b : a; }>(ops, {"max." + type});
  if constexpr (sizeof(T) < 8) {
    add_elementwise<[](T a, T b) { return static_cast<Wide<T>>(a) * b; }>(ops, {"mul.wide." + type});
    add_elementwise<[](T a, T b, Wide<T> c) { return static_cast<Wide<T>>(static_cast<Wide<T>>(a) * b + c); }>(
        ops, {"mad.wide." + type});
  }
  if constexpr (std::is_signed_v<T>) {
    add_elementwise<[](T a) { return static_cast<T>(0 - a); }>(ops, {"neg." + type});
  }
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
  add_elementwise<[](F a) { return result<ftz>(exp2_approximately(given<ftz>(a))); }>(ops, {"ex2.approx" + tail});
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
  add_integers<int16_t>(ops, "s16");
  add_integers<uint16_t>(ops, "u16");
  add_integers<int32_t>(ops, "s32");
  add_integers<uint32_t>(ops, "u32");
  add_integers<int64_t>(ops, "s64");
  add_integers<uint64_t>(ops, "u64");
  add_floats<false>(ops);
  add_floats<true>(ops);
  add_elementwise<[](float a, float b) { return std::copysign(b, a); }>(ops, {"copysign.f32"});
  add_elementwise<[](float a, float b, float c) { return fma_down(a, b, c); }>(ops, {"fma.rm.f32"});
}

}  // namespace simulator
