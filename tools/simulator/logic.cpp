// Bits, comparisons, selections and moves.
#include <algorithm>
#include <functional>

#include "opcodes.h"

namespace simulator {
namespace {

// ---- predicates ----------------------------------------------------------------------------------------------------

template <auto function>
void combine_predicates(Warp& w, Instruction const& i) {
  w.set_predicate(i.operand[0], function(w.predicate(i.operand[1]), w.predicate(i.operand[2])));
}
void not_predicate(Warp& w, Instruction const& i) { w.set_predicate(i.operand[0], ~w.predicate(i.operand[1])); }
void move_predicate(Warp& w, Instruction const& i) { w.set_predicate(i.operand[0], w.predicate(i.operand[1])); }

// ---- setp ----------------------------------------------------------------------------------------------------------

template <auto compare, class T>
void set_predicate(Warp& w, Instruction const& i) {
  Lanes<T> const &a = w.at<T>(i.operand[2]), &b = w.at<T>(i.operand[3]);
  Mask const holds = mask_of([&](int lane) { return compare(a[lane], b[lane]); });
  w.set_predicate(i.operand[0], holds);
  w.set_predicate(i.operand[1], ~holds);
}

template <class T, auto compare>
void add_comparison(Opcodes& ops, Alternatives const& names, std::string const& type) {
  ops.add(spell({{"setp."}, names, {type}}), set_predicate<compare, T>,
          {kPredicateOut, kPairedPredicateOut, in<T>(), in<T>()});
}

template <class T>
void add_integer_comparisons(Opcodes& ops, std::string const& type) {
  add_comparison<T, [](T a, T b) { return a == b; }>(ops, {"eq"}, type);
  add_comparison<T, [](T a, T b) { return a != b; }>(ops, {"ne"}, type);
  if (type[1] == 'b') return;  // bits are equal or not, and have no order
  add_comparison<T, [](T a, T b) { return a < b; }>(ops, {"lt", "lo"}, type);
  add_comparison<T, [](T a, T b) { return a <= b; }>(ops, {"le", "ls"}, type);
  add_comparison<T, [](T a, T b) { return b < a; }>(ops, {"gt", "hi"}, type);
  add_comparison<T, [](T a, T b) { return b <= a; }>(ops, {"ge", "hs"}, type);
}

/// Those with a "u" also hold where an operand is NaN.
void add_float_comparisons(Opcodes& ops) {
  using T = float;
  std::string const type = ".f32";
  add_comparison<T, [](T a, T b) { return a == b; }>(ops, {"eq"}, type);
  add_comparison<T, [](T a, T b) { return a < b || b < a; }>(ops, {"ne"}, type);
  add_comparison<T, [](T a, T b) { return a < b; }>(ops, {"lt"}, type);
  add_comparison<T, [](T a, T b) { return a <= b; }>(ops, {"le"}, type);
  add_comparison<T, [](T a, T b) { return b < a; }>(ops, {"gt"}, type);
  add_comparison<T, [](T a, T b) { return b <= a; }>(ops, {"ge"}, type);
  add_comparison<T, [](T a, T b) { return !(a < b || b < a); }>(ops, {"equ"}, type);
  add_comparison<T, [](T a, T b) { return a != b; }>(ops, {"neu"}, type);
  add_comparison<T, [](T a, T b) { return !(b <= a); }>(ops, {"ltu"}, type);
  add_comparison<T, [](T a, T b) { return !(b < a); }>(ops, {"leu"}, type);
  add_comparison<T, [](T a, T b) { return !(a <= b); }>(ops, {"gtu"}, type);
  add_comparison<T, [](T a, T b) { return !(a < b); }>(ops, {"geu"}, type);
  add_comparison<T, [](T a, T b) { return a != a || b != b; }>(ops, {"nan"}, type);
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

template <class T>
void move(Warp& w, Instruction const& i) {
  w.write(i.operand[0], Lanes<T>(w.at<T>(i.operand[1])));
}

/// mov.b32 %r, {%rs1, %rs2} and the like: the first part is the low one.
template <class Whole, class Part>
void pack(Warp& w, Instruction const& i) {
  Lanes<Whole> result{};
  for (size_t part = 0; part < sizeof(Whole) / sizeof(Part); ++part) {
    Lanes<Part> const& from = w.at<Part>(i.operand[1 + part]);
    for (int lane = 0; lane < kLanes; ++lane) {
      result[lane] = static_cast<Whole>(result[lane] | static_cast<Whole>(from[lane]) << 8 * sizeof(Part) * part);
    }
  }
  w.write(i.operand[0], result);
}

template <class Whole, class Part>
void unpack(Warp& w, Instruction const& i) {
  size_t const parts = sizeof(Whole) / sizeof(Part);
  Lanes<Whole> const from = w.at<Whole>(i.operand[parts]);
  for (size_t part = 0; part < parts; ++part) {
    Lanes<Part> result;
    for (int lane = 0; lane < kLanes; ++lane) {
      result[lane] = static_cast<Part>(from[lane] >> 8 * sizeof(Part) * part);
    }
    w.write(i.operand[part], result);
  }
}

template <class T>
void add_bits(Opcodes& ops, std::string const& type, std::string const& bits) {
  add_elementwise<[](T a, T b) { return static_cast<T>(a & b); }>(ops, {"and" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a | b); }>(ops, {"or" + type});
  add_elementwise<[](T a, T b) { return static_cast<T>(a ^ b); }>(ops, {"xor" + type});
  add_elementwise<[](T a) { return static_cast<T>(~a); }>(ops, {"not" + type});
  // Shifts by more bits than there are leave nothing, or the sign.
  constexpr uint32_t size = 8 * sizeof(T);
  using Signed = std::make_signed_t<T>;
  add_elementwise<[](T a, uint32_t n) { return n < size ? static_cast<T>(a << n) : T(0); }>(ops, {"shl" + type});
  add_elementwise<[](T a, uint32_t n) { return n < size ? static_cast<T>(a >> n) : T(0); }>(
      ops, spell({{"shr"}, {type, ".u" + bits}}));
  add_elementwise<[](T a, uint32_t n) { return static_cast<T>(static_cast<Signed>(a) >> std::min(n, size - 1)); }>(
      ops, {"shr.s" + bits});
  Alternatives const types = spell({{"."}, {"b", "u", "s"}, {bits}});
  ops.add(spell({{"selp"}, types}), select<T>, {out<T>(), in<T>(), in<T>(), kPredicateIn});
  ops.add(spell({{"mov"}, {".u" + bits, ".s" + bits}}), move<T>, {out<T>(), in<T>()});
}

// ---- fields of bits ------------------------------------------------------------------------------------------------

template <class T>
constexpr T low_bits(uint32_t count) {
  return count >= 8 * sizeof(T) ? static_cast<T>(-1) : static_cast<T>((T(1) << count) - 1);
}

template <class T>
constexpr T insert(T a, T b, uint32_t begin, uint32_t length) {
  begin &= 255, length &= 255;
  if (begin >= 8 * sizeof(T)) return b;
  T const mask = static_cast<T>(low_bits<T>(length) << begin);
  return static_cast<T>((a << begin & mask) | (b & ~mask));
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

void add_fields(Opcodes& ops) {
  add_elementwise<[](uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return insert(a, b, c, d); }>(ops, {"bfi.b32"});
  add_elementwise<[](uint64_t a, uint64_t b, uint32_t c, uint32_t d) { return insert(a, b, c, d); }>(ops, {"bfi.b64"});
  add_elementwise<[](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c); }>(ops, {"prmt.b32"});
  add_elementwise<[](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); }>(ops, {"popc.b32"});
}

}  // namespace

void add_logic(Opcodes& ops) {
  ops.add({"and.pred"}, combine_predicates<std::bit_and<Mask>{}>, {kPredicateOut, kPredicateIn, kPredicateIn});
  ops.add({"or.pred"}, combine_predicates<std::bit_or<Mask>{}>, {kPredicateOut, kPredicateIn, kPredicateIn});
  ops.add({"xor.pred"}, combine_predicates<std::bit_xor<Mask>{}>, {kPredicateOut, kPredicateIn, kPredicateIn});
  ops.add({"not.pred"}, not_predicate, {kPredicateOut, kPredicateIn});
  ops.add({"mov.pred"}, move_predicate, {kPredicateOut, kPredicateIn});

  add_integer_comparisons<int16_t>(ops, ".s16");
  add_integer_comparisons<uint16_t>(ops, ".u16");
  add_integer_comparisons<int32_t>(ops, ".s32");
  add_integer_comparisons<uint32_t>(ops, ".u32");
  add_integer_comparisons<int64_t>(ops, ".s64");
  add_integer_comparisons<uint64_t>(ops, ".u64");
  add_integer_comparisons<uint16_t>(ops, ".b16");
  add_integer_comparisons<uint32_t>(ops, ".b32");
  add_integer_comparisons<uint64_t>(ops, ".b64");
  add_float_comparisons(ops);

  add_bits<uint16_t>(ops, ".b16", "16");
  add_bits<uint32_t>(ops, ".b32", "32");
  add_bits<uint64_t>(ops, ".b64", "64");
  ops.add({"selp.f32"}, select<uint32_t>, {out<uint32_t>(), in<uint32_t>(), in<uint32_t>(), kPredicateIn});
  ops.add({"mov.f32"}, move<uint32_t>, {out<uint32_t>(), in<uint32_t>()});
  ops.add({"mov.b16"}, move<uint16_t>, {out<uint16_t>(), in<uint16_t>()});
  ops.add({"mov.b32"}, move<uint32_t>, {out<uint32_t>(), in<uint32_t>()});
  ops.add({"mov.b64"}, move<uint64_t>, {out<uint64_t>(), in<uint64_t>()});
  // The decoder's names for moves from and to {a, b, ...}.
  ops.add({"mov.b32.pack2"}, pack<uint32_t, uint16_t>, {out<uint32_t>(), in<uint16_t>().of(2)});
  ops.add({"mov.b64.pack2"}, pack<uint64_t, uint32_t>, {out<uint64_t>(), in<uint32_t>().of(2)});
  ops.add({"mov.b64.pack4"}, pack<uint64_t, uint16_t>, {out<uint64_t>(), in<uint16_t>().of(4)});
  ops.add({"mov.b32.unpack2"}, unpack<uint32_t, uint16_t>, {out<uint16_t>().of(2), in<uint32_t>()});
  ops.add({"mov.b64.unpack2"}, unpack<uint64_t, uint32_t>, {out<uint32_t>().of(2), in<uint64_t>()});
  ops.add({"mov.b64.unpack4"}, unpack<uint64_t, uint16_t>, {out<uint16_t>().of(4), in<uint64_t>()});
  add_fields(ops);
}

}  // namespace simulator
