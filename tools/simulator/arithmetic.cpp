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
  add_elementwise<[](T a, T b, T c) { return static_cast<T>(high(a, b) + c); }>(ops, {"mad.hi." + type});
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
    add_elementwise<[](T a) { return static_cast<T>(a < 0 ? 0 - a : a); }>(ops, {"abs." + type});
  }
}

/// An operand and a result; with `ftz` subnormal numbers become zero.
template <bool ftz, class T>
T given(T x) {
  return ftz ? flushed(x) : x;
}
template <bool ftz, class T>
T result(T x) {
  return canonical(ftz ? flushed(x) : x);
}

template <class T, bool ftz>
void add_floats(Opcodes& ops, std::string const& type) {
  std::string const tail = (ftz ? ".ftz." : ".") + type;
  add_elementwise<[](T a, T b) { return result<ftz>(given<ftz>(a) + given<ftz>(b)); }>(
      ops, spell({{"add"}, {"", ".rn"}, {tail}}));
  add_elementwise<[](T a, T b) { return result<ftz>(given<ftz>(a) - given<ftz>(b)); }>(
      ops, spell({{"sub"}, {"", ".rn"}, {tail}}));
  add_elementwise<[](T a, T b) { return result<ftz>(given<ftz>(a) * given<ftz>(b)); }>(
      ops, spell({{"mul"}, {"", ".rn"}, {tail}}));
  add_elementwise<[](T a, T b) { return result<ftz>(given<ftz>(a) / given<ftz>(b)); }>(
      ops, spell({sizeof(T) == 4 ? Alternatives{"div.rn", "div.full", "div.approx"} : Alternatives{"div.rn"}, {tail}}));
  add_elementwise<[](T a, T b, T c) { return result<ftz>(std::fma(given<ftz>(a), given<ftz>(b), given<ftz>(c))); }>(
      ops, {"fma.rn" + tail});
  add_elementwise<[](T a) { return result<ftz>(T(1) / given<ftz>(a)); }>(ops, {"rcp.rn" + tail});
  add_elementwise<[](T a) { return result<ftz>(std::sqrt(given<ftz>(a))); }>(ops, {"sqrt.rn" + tail});
  add_elementwise<[](T a) { return -given<ftz>(a); }>(ops, {"neg" + tail});
  add_elementwise<[](T a) { return std::fabs(given<ftz>(a)); }>(ops, {"abs" + tail});

  add_elementwise<[](T a, T b) { return result<ftz>(smaller(a, b)); }>(ops, {"min" + tail});
  add_elementwise<[](T a, T b) { return result<ftz>(larger(a, b)); }>(ops, {"max" + tail});
  std::string const nan = (ftz ? ".ftz.NaN." : ".NaN.") + type;
  add_elementwise<[](T a, T b) { return result<ftz>(a == a && b == b ? smaller(a, b) : a + b); }>(ops, {"min" + nan});
  add_elementwise<[](T a, T b) { return result<ftz>(a == a && b == b ? larger(a, b) : a + b); }>(ops, {"max" + nan});
}

enum class Rounding { down, up, to_zero };

/// The sum of two doubles of which the larger one may be first or second, rounded to a float. Exact: what the sum of
/// doubles rounds off is computed too (Knuth's TwoSum).
template <Rounding rounding>
float rounded_sum(double a, double b) {
  double const sum = a + b, part = sum - a, rest = (a - (sum - part)) + (b - part);
  auto const nearest = static_cast<float>(sum);
  bool const above = nearest > sum || (nearest == sum && rest < 0),
             below = nearest < sum || (nearest == sum && rest > 0);
  bool const down = rounding == Rounding::down || (rounding == Rounding::to_zero && sum > 0);
  if (down ? above : below) return std::nextafter(nearest, down ? -INFINITY : INFINITY);
  return nearest;
}

template <Rounding rounding>
void add_rounded(Opcodes& ops, std::string const& name) {
  add_elementwise<[](float a, float b) { return canonical(rounded_sum<rounding>(a, b)); }>(ops, {"add" + name});
  add_elementwise<[](float a, float b) { return canonical(rounded_sum<rounding>(a, -double(b))); }>(ops,
                                                                                                    {"sub" + name});
  // The product of two floats is exact in double.
  add_elementwise<[](float a, float b) { return canonical(rounded_sum<rounding>(double(a) * b, 0)); }>(ops,
                                                                                                       {"mul" + name});
  add_elementwise<[](float a, float b, float c) { return canonical(rounded_sum<rounding>(double(a) * b, c)); }>(
      ops, {"fma" + name});
}

/// The hardware's approximations, of which these differ in the last bits.
template <bool ftz>
void add_approximations(Opcodes& ops) {
  std::string const tail = ftz ? ".approx.ftz.f32" : ".approx.f32";
  add_elementwise<[](float a) { return result<ftz>(exp2_approximately(given<ftz>(a))); }>(ops, {"ex2" + tail});
  add_elementwise<[](float a) { return result<ftz>(std::log2(given<ftz>(a))); }>(ops, {"lg2" + tail});
  add_elementwise<[](float a) { return result<ftz>(1.f / given<ftz>(a)); }>(ops, {"rcp" + tail});
  add_elementwise<[](float a) { return result<ftz>(std::sqrt(given<ftz>(a))); }>(ops, {"sqrt" + tail});
  add_elementwise<[](float a) { return result<ftz>(1.f / std::sqrt(given<ftz>(a))); }>(ops, {"rsqrt" + tail});
  add_elementwise<[](float a) { return result<ftz>(std::sin(given<ftz>(a))); }>(ops, {"sin" + tail});
  add_elementwise<[](float a) { return result<ftz>(std::cos(given<ftz>(a))); }>(ops, {"cos" + tail});
}

}  // namespace

void add_arithmetic(Opcodes& ops) {
  add_integers<int16_t>(ops, "s16");
  add_integers<uint16_t>(ops, "u16");
  add_integers<int32_t>(ops, "s32");
  add_integers<uint32_t>(ops, "u32");
  add_integers<int64_t>(ops, "s64");
  add_integers<uint64_t>(ops, "u64");
  add_floats<float, false>(ops, "f32");
  add_floats<float, true>(ops, "f32");
  add_floats<double, false>(ops, "f64");
  add_rounded<Rounding::down>(ops, ".rm.f32");
  add_rounded<Rounding::up>(ops, ".rp.f32");
  add_rounded<Rounding::to_zero>(ops, ".rz.f32");
  add_approximations<false>(ops);
  add_approximations<true>(ops);
  add_elementwise<[](float a) { return canonical(std::tanh(a)); }>(ops, {"tanh.approx.f32"});
}

}  // namespace simulator
