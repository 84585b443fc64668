// The table of opcodes: for each one, spelt out with its modifiers, what runs it and which operands it takes. An opcode
// that is not in it is an error, never a guess.
#pragma once

#include <type_traits>
#include <unordered_map>
#include <utility>

#include "warp.h"

namespace simulator {

/// An operand in an opcode's signature.
struct Slot {
  enum class Kind { in, out, predicate_in, predicate_out, paired_predicate_out, address, ignored };
  Kind kind = Kind::in;
  int bits = 0;      ///< of the register; where `any`, at least so many
  int elements = 1;  ///< {a, b, ...}
  bool any = false;  ///< a register of any width, which goes to Instruction::bits
  bool optional = false;

  constexpr Slot of(int count) const { return {kind, bits, count, any, optional}; }
  constexpr Slot of_any_width() const { return {kind, bits, elements, true, optional}; }
  constexpr Slot or_nothing() const { return {kind, bits, elements, any, true}; }
};

template <class T>
constexpr Slot in() {
  return {.kind = Slot::Kind::in, .bits = 8 * sizeof(T)};
}
template <class T>
constexpr Slot out() {
  return {.kind = Slot::Kind::out, .bits = 8 * sizeof(T)};
}
constexpr Slot kPredicateIn{.kind = Slot::Kind::predicate_in}, kPredicateOut{.kind = Slot::Kind::predicate_out};
constexpr Slot kPairedPredicateOut{.kind = Slot::Kind::paired_predicate_out};  ///< "%r1|%p1", and may be left out
constexpr Slot kAddress{.kind = Slot::Kind::address};
constexpr Slot kIgnored{.kind = Slot::Kind::ignored};  ///< a cache policy, say

struct Opcode {
  Instruction::Run run;
  std::vector<Slot> slots;
  uint32_t number = 0;
};

struct Opcodes {
  static Opcodes const& all();

  /// Names that are one already are an error of the table.
  void add(std::vector<std::string> const& names, Instruction::Run run, std::vector<Slot> const& slots,
           uint32_t number = 0);

  std::unordered_map<std::string, Opcode> table;
};

/// "u32" and the like.
template <class T>
std::string type_name() {
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(8 * sizeof(T));
}

// Each file of instructions adds its own.
using Adds = void(Opcodes& opcodes);
Adds add_arithmetic, add_exchange, add_matrix, add_memory;

// ---- for handlers --------------------------------------------------------------------------------------------------

inline uint64_t address_of(Warp& w, Address const& address, int lane) {
  return (address.wide ? w.at<uint64_t>(address.base)[lane] : w.at<uint32_t>(address.base)[lane]) + address.offset;
}
inline uint32_t shared_address_of(Warp& w, Address const& address, int lane) {
  return static_cast<uint32_t>(address_of(w, address, lane));
}

/// Adds an opcode whose result is function(operands...), lane by lane. The function's types say how wide they are.
template <auto function>
void add_elementwise(Opcodes& opcodes, std::vector<std::string> const& names) {
  auto const add = [&]<class R, class... A, size_t... n>(R (*)(A...), std::index_sequence<n...>) {
    Instruction::Run const run = [](Warp& w, Instruction const& i) {
      Lanes<R> result;
      for (int lane = 0; lane < kLanes; ++lane) result[lane] = function(w.at<A>(i.operand[n + 1])[lane]...);
      w.write(i.operand[0], result);
    };
    opcodes.add(names, run, {out<R>(), in<A>()...});
  };
  [&]<class R, class... A>(R (*same)(A...)) { add(same, std::index_sequence_for<A...>()); }(+function);
}

}  // namespace simulator
