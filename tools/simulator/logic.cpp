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

/// mov.b32 %r, {%rs1, %rs2} and the like: the first part is the low one.
template <class Whole, class Part>
void pack(Warp& w, Instruction const& i) {
  Lanes<Part> const &low = w.at<Part>(i.operand[1]), &high = w.at<Part>(i.operand[2]);
  Lanes<Whole> result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = low[lane] | Whole(high[lane]) << 8 * sizeof(Part);
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

/// The decoder's names for moves from and to {a, b}.
template <class Whole, class Part>
void add_packing(Opcodes& ops, std::string const& name) {
  ops.add({name + ".pack2"}, pack<Whole, Part>, {out<Whole>(), in<Part>().of(2)});
  ops.add({name + ".unpack2"}, unpack<Whole, Part>, {out<Part>().of(2), in<Whole>()});
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
  add_elementwise<[](T a, uint32_t n) { return n < size ? static_cast<T>(a >> n) : T(0); }>(
      ops, spell({{"shr"}, {type, ".u" + bits}}));
  add_elementwise<[](T a, uint32_t n) { return static_cast<T>(static_cast<Signed>(a) >> std::min(n, size - 1)); }>(
      ops, {"shr.s" + bits});
  Alternatives types = spell({{".b", ".u", ".s"}, {bits}});
  if (size == 32) types.push_back(".f32");
  ops.add(spell({{"selp"}, types}), select<T>, {out<T>(), in<T>(), in<T>(), kPredicateIn});
  add_elementwise<[](T a) { return a; }>(ops, spell({{"mov"}, types}));
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

void add_logic(Opcodes& ops) {
  std::vector<Slot> const one{kPredicateOut, kPredicateIn}, two{kPredicateOut, kPredicateIn, kPredicateIn};
  ops.add({"and.pred"}, combine_predicates<std::bit_and<Mask>{}>, two);
  ops.add({"or.pred"}, combine_predicates<std::bit_or<Mask>{}>, two);
  ops.add({"xor.pred"}, combine_predicates<std::bit_xor<Mask>{}>, two);
  ops.add({"not.pred"}, not_predicate, one);
  ops.add({"mov.pred"}, move_predicate, one);

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
