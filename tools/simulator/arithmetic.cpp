// What is computed lane by lane. Numbers: integers of 16, 32 and 64 bits, floats, the approximate functions; cvt, from
// one type of number to another, where registers may be wider than the numbers in them. Bits, comparisons, selections
// and moves.
#include <algorithm>
#include <cmath>
#include <functional>

#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

/// W: what has twice the bits of T.
template <class T, class W>
void add_integers(Opcodes& ops) {
  std::string const type = "." + type_name<T>();
  add_elementwise<[](T a, T b) { return static_cast<T>(a + b); }>(ops, {"add" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a - b); }>(ops, {"sub" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a * b); }>(ops, {"mul.lo" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(W(W(a) * b) >> 8 * sizeof(T)); }>(ops, {"mul.hi" + type});
  add_elementwise<[](T a, T b, T c) { return static_cast<T>(a * b + c); }>(ops, {"mad.lo" + type});
  // PTX leaves open what a division by zero gives. The smallest number by -1 is one too many for T.
  add_elementwise<[](T a, T b) { return static_cast<T>(b == 0 ? -1 : W(a) / b); }>(ops, {"div" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(b == 0 ? a : W(a) % b); }>(ops, {"rem" + type});
  add_elementwise<[](T a, T b) { return std::min(a, b); }>(ops, {"min" + type});
  add_elementwise<[](T a, T b) { return std::max(a, b); }>(ops, {"max" + type});
  add_elementwise<[](T a) { return static_cast<T>(0 - a); }>(ops, {"neg" + type});
  if constexpr (sizeof(T) < 8) {
    add_elementwise<[](T a, T b) { return static_cast<W>(W(a) * b); }>(ops, {"mul.wide" + type});
    add_elementwise<[](T a, T b, W c) { return static_cast<W>(W(a) * b + c); }>(ops, {"mad.wide" + type});
  }
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

template <class To, class From>
void convert_integer(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    auto const value = static_cast<From>(w.get(i.operand[1], i.bits[1], lane));
    w.put(i.operand[0], i.bits[0], lane, static_cast<To>(value));
  });
}

template <class To, class... From>
void add_conversions_to(Opcodes& ops) {
  (ops.add({"cvt." + type_name<To>() + "." + type_name<From>()}, convert_integer<To, From>,
           {out<To>().of_any_width(), in<From>().of_any_width()}),
   ...);
}

template <class... T>
void add_integer_conversions(Opcodes& ops) {
  (add_conversions_to<T, T...>(ops), ...);
}

uint16_t no_greater(uint16_t a, uint16_t b) { return from_float16(a) > from_float16(b) ? 0 : 0xffff; }
uint16_t bfloat16_product(uint16_t a, uint16_t b) { return to_bfloat16(from_bfloat16(a) * from_bfloat16(b)); }
uint32_t pair(uint16_t high, uint16_t low) { return uint32_t(high) << 16 | low; }

/// Cut off, what there is no int for becomes the nearest; NaN 0.
int32_t to_int32(float x) { return x == x ? static_cast<int32_t>(std::clamp(double(x), -0x1p31, 0x1p31 - 1)) : 0; }

// ---- predicates ----------------------------------------------------------------------------------------------------

/// Of two operands, or of one, which is the other one, too.
template <auto function>
void combine_predicates(Warp& w, Instruction const& i) {
  w.set_predicate(i.operand[0], function(w.predicate(i.operand[1]), w.predicate(i.operand[i.count - 1])));
}

// ---- setp ----------------------------------------------------------------------------------------------------------

template <auto compare, class T>
void set_predicate(Warp& w, Instruction const& i) {
  Lanes<T> const &a = w.at<T>(i.operand[2]), &b = w.at<T>(i.operand[3]);
  Mask const holds = mask_of([&](int lane) { return compare(a[lane], b[lane]); });
  w.set_predicate(i.operand[0], holds);
  w.set_predicate(i.operand[1], ~holds);
}

template <auto compare, class T>
void add_comparison(Opcodes& ops, std::string const& name) {
  ops.add({"setp." + name}, set_predicate<compare, T>, {kPredicateOut, kPairedPredicateOut, in<T>(), in<T>()});
}

/// None but the last holds of a NaN: setp.ne of floats would not, and is called neu where it does.
template <class T>
void add_comparisons(Opcodes& ops, std::string const& type) {
  add_comparison<[](T a, T b) { return a == b; }, T>(ops, "eq" + type);
  add_comparison<[](T a, T b) { return a < b; }, T>(ops, "lt" + type);
  add_comparison<[](T a, T b) { return a <= b; }, T>(ops, "le" + type);
  add_comparison<[](T a, T b) { return b < a; }, T>(ops, "gt" + type);
  add_comparison<[](T a, T b) { return b <= a; }, T>(ops, "ge" + type);
  add_comparison<[](T a, T b) { return a != b; }, T>(ops, (std::is_floating_point_v<T> ? "neu" : "ne") + type);
}

// ---- selections and moves ------------------------------------------------------------------------------------------

template <class T>
void select(Warp& w, Instruction const& i) {
  Mask const first = w.predicate(i.operand[3]);
  Lanes<T> const &a = w.at<T>(i.operand[1]), &b = w.at<T>(i.operand[2]);
  Lanes<T> result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = first >> lane & 1 ? a[lane] : b[lane];
  w.write(i.operand[0], result);
}

template <class Whole, class Part>
void unpack(Warp& w, Instruction const& i) {
  Lanes<Whole> const from = w.at<Whole>(i.operand[2]);
  for (size_t part : {0, 1}) {
    Lanes<Part> result;
    for (int lane = 0; lane < kLanes; ++lane) result[lane] = static_cast<Part>(from[lane] >> 8 * sizeof(Part) * part);
    w.write(i.operand[part], result);
  }
}

/// mov.b32 %r, {%rs1, %rs2} and the like, by the decoder's names for them: the first part is the low one.
template <class Whole, class Part>
void add_packing(Opcodes& ops, std::string const& name) {
  add_elementwise<[](Part low, Part high) { return low | Whole(high) << 8 * sizeof(Part); }>(ops, {name + ".pack"});
  ops.add({name + ".unpack"}, unpack<Whole, Part>, {out<Part>(), out<Part>(), in<Whole>()});
}

template <class T>
void add_bits(Opcodes& ops) {
  constexpr uint32_t size = 8 * sizeof(T);
  using Signed = std::make_signed_t<T>;
  std::string const bits = std::to_string(size), type = ".b" + bits;
  add_elementwise<[](T a, T b) { return static_cast<T>(a & b); }>(ops, {"and" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a | b); }>(ops, {"or" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a ^ b); }>(ops, {"xor" + type});
  add_elementwise<[](T a) { return static_cast<T>(~a); }>(ops, {"not" + type});
  // Shifts by more bits than there are leave nothing, or the sign.
  add_elementwise<[](T a, uint32_t n) { return n < size ? static_cast<T>(a << n) : T(0); }>(ops, {"shl" + type});
  add_elementwise<[](T a, uint32_t n) { return n < size ? static_cast<T>(a >> n) : T(0); }>(ops, {"shr.u" + bits});
  add_elementwise<[](T a, uint32_t n) { return static_cast<T>(static_cast<Signed>(a) >> std::min(n, size - 1)); }>(
      ops, {"shr.s" + bits});
  ops.add({"selp" + type}, select<T>, {out<T>(), in<T>(), in<T>(), kPredicateIn});
  add_elementwise<[](T a) { return a; }>(ops, {"mov" + type});
  for (std::string const& unsigned_type : {type, ".u" + bits}) add_comparisons<T>(ops, unsigned_type);
  add_comparisons<Signed>(ops, ".s" + bits);
}

/// The low `length` bits of a in place of those of b from `begin` on.
template <class T>
constexpr T insert(T a, T b, uint32_t begin, uint32_t length) {
  begin = std::min(begin & 255, 64u), length = std::min(length & 255, 64u);
  auto const mask = static_cast<T>(((static_cast<unsigned __int128>(1) << length) - 1) << begin);
  return static_cast<T>((static_cast<unsigned __int128>(a) << begin & mask) | (b & ~mask));
}

constexpr uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t const bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const choice = selector >> 4 * i & 15, byte = bytes >> 8 * (choice & 7) & 255;
    result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
}

}  // namespace

void add_arithmetic(Opcodes& ops) {
  add_integers<int16_t, int32_t>(ops);
  add_integers<uint16_t, uint32_t>(ops);
  add_integers<int32_t, int64_t>(ops);
  add_integers<uint32_t, uint64_t>(ops);
  add_integers<int64_t, __int128>(ops);
  add_integers<uint64_t, unsigned __int128>(ops);
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

  // From one type to another.
  add_integer_conversions<int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(ops);
  add_elementwise<[](float x) { return to_float16(x); }>(ops, {"cvt.rn.f16.f32"});
  add_elementwise<[](float x) { return to_bfloat16(x); }>(ops, {"cvt.rn.bf16.f32"});
  // The first operand becomes the upper half.
  add_elementwise<[](float a, float b) { return pair(to_float16(a), to_float16(b)); }>(ops, {"cvt.rn.f16x2.f32"});
  add_elementwise<[](float a, float b) { return pair(to_bfloat16(a), to_bfloat16(b)); }>(ops, {"cvt.rn.bf16x2.f32"});
  add_elementwise<[](uint32_t a, uint32_t b) {
    return pair(bfloat16_product(a >> 16, b >> 16), bfloat16_product(a, b));
  }>(ops, {"mul.rn.bf16x2"});
  add_elementwise<[](uint32_t a, uint32_t b) { return pair(no_greater(a >> 16, b >> 16), no_greater(a, b)); }>(
      ops, {"set.leu.u32.f16x2"});
  add_elementwise<[](uint16_t x) { return canonical(from_float16(x)); }>(ops, {"cvt.f32.f16"});
  add_elementwise<[](uint16_t x) { return canonical(from_bfloat16(x)); }>(ops, {"cvt.f32.bf16"});
  add_elementwise<[](int32_t x) { return static_cast<float>(x); }>(ops, {"cvt.rn.f32.s32"});
  add_elementwise<[](uint16_t x) { return static_cast<float>(x); }>(ops, {"cvt.rn.f32.u16"});
  add_elementwise<[](float x) { return std::nearbyint(x); }>(ops, {"cvt.rni.f32.f32"});
  add_elementwise<[](float x) { return to_int32(x); }>(ops, {"cvt.rzi.s32.f32"});
  add_elementwise<[](float x) { return 0.f < x ? std::fmin(x, 1.f) : 0.f; }>(ops, {"cvt.sat.f32.f32"});

  std::vector<Slot> const one{kPredicateOut, kPredicateIn}, two{kPredicateOut, kPredicateIn, kPredicateIn};
  ops.add({"and.pred"}, combine_predicates<std::bit_and<Mask>{}>, two);
  ops.add({"or.pred"}, combine_predicates<std::bit_or<Mask>{}>, two);
  ops.add({"xor.pred"}, combine_predicates<std::bit_xor<Mask>{}>, two);
  ops.add({"not.pred"}, combine_predicates<[](Mask a, Mask) { return ~a; }>, one);
  ops.add({"mov.pred"}, combine_predicates<std::bit_and<Mask>{}>, one);

  add_bits<uint16_t>(ops);
  add_bits<uint32_t>(ops);
  add_bits<uint64_t>(ops);
  add_comparisons<float>(ops, ".f32");
  // Those that also hold where an operand is NaN.
  add_comparison<[](float a, float b) { return !(b <= a); }, float>(ops, "ltu.f32");
  add_comparison<[](float a, float b) { return !(a <= b); }, float>(ops, "gtu.f32");
  add_comparison<[](float a, float b) { return a != a || b != b; }, float>(ops, "nan.f32");
  add_packing<uint32_t, uint16_t>(ops, "mov.b32");
  add_packing<uint64_t, uint32_t>(ops, "mov.b64");
  add_elementwise<[](uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return insert(a, b, c, d); }>(ops, {"bfi.b32"});
  add_elementwise<[](uint64_t a, uint64_t b, uint32_t c, uint32_t d) { return insert(a, b, c, d); }>(ops, {"bfi.b64"});
  add_elementwise<[](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c); }>(ops, {"prmt.b32"});
  add_elementwise<[](uint32_t a, uint32_t b, uint32_t n) {
    return static_cast<uint32_t>((uint64_t(b) << 32 | a) << (n & 31) >> 32);
  }>(ops, {"shf.l.wrap.b32"});
  add_elementwise<[](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); }>(ops, {"popc.b32"});
}

}  // namespace simulator
