// From statements to instructions: registers get their places, constants and special registers places of their own.
#include <algorithm>
#include <map>
#include <ranges>
#include <set>

#include "block.h"
#include "opcodes.h"

namespace simulator {
namespace {

constexpr uint32_t kPlace = 64;  // bytes: what alignment Lanes have

/// Cache hints and memory orders of loads and stores, which change nothing where memory is always up to date.
bool is_hint(std::string_view part) {
  static std::set<std::string_view> const hints{"nc", "relaxed", "acquire", "release", "gpu"};
  return part.starts_with("L2::") || hints.contains(part);
}

/// The name to look up: of loads and stores, without hints; of moves, with how many parts there are on which side.
std::string lookup_name(Statement const& statement) {
  std::string const& opcode = statement.opcode;
  for (size_t side = 0; side < statement.operands.size() && opcode.starts_with("mov.b"); ++side) {
    Operand const& operand = statement.operands[side];
    if (operand.kind != Operand::Kind::group) continue;
    return opcode + (side == 0 ? ".unpack" : ".pack") + std::to_string(operand.parts.size());
  }
  if (!opcode.starts_with("ld.") && !opcode.starts_with("st.")) return opcode;
  std::string name = opcode.substr(0, 2);
  for (auto const part : std::views::split(std::string_view(opcode).substr(3), '.')) {
    if (std::string_view const text(part.begin(), part.end()); !is_hint(text)) name.append(".").append(text);
  }
  return name;
}

class Decoder {
 public:
  Decoder(Module const& module, Entry const& entry) : entry_(entry) {
    kernel_.name = entry.name;
    name_special_registers();
    for (int bits : entry.register_bits) places_.push_back(bits == 1 ? kernel_.predicates++ : new_place(bits));
    place_parameters();
    place_variables(module);
  }

  Kernel kernel() {
    std::vector<uint32_t> const joins = find_joins(entry_.statements);
    for (size_t i = 0; i < entry_.statements.size(); ++i) {
      kernel_.code.push_back(instruction(entry_.statements[i]));
      kernel_.code.back().join = joins[i];
    }
    Statement end;
    end.opcode = "ret";
    kernel_.code.push_back(instruction(end));
    return std::move(kernel_);
  }

 private:
  [[noreturn]] void fail(std::string const& what) const {
    throw Error(entry_.name + ", PTX line " + std::to_string(statement_->line) + ": " + what + " in " +
                statement_->opcode);
  }

  // ---- places ------------------------------------------------------------------------------------------------------

  uint32_t new_place(int bits) {
    uint32_t const offset = kernel_.register_bytes;
    kernel_.register_bytes += (static_cast<uint32_t>(bits) / 8 * kLanes + kPlace - 1) / kPlace * kPlace;
    return offset;
  }

  static uint32_t aligned(uint64_t offset, Variable const& variable) {
    return static_cast<uint32_t>((offset + variable.alignment - 1) / variable.alignment * variable.alignment);
  }

  void place_parameters() {
    for (Variable const& parameter : entry_.parameters) {
      uint32_t const offset = aligned(kernel_.parameter_bytes, parameter);
      kernel_.parameters.emplace_back(offset, parameter.bytes);
      kernel_.parameter_bytes = static_cast<uint32_t>(offset + parameter.bytes);
      values_[parameter.name] = [offset](Warp const& warp, int) {
        return reinterpret_cast<uint64_t>(warp.block.launch.parameters) + offset;
      };
    }
  }

  /// Shared variables without a size are all the same: dynamic shared memory, behind the others. Their pass is
  /// repeated, since the last of them may have moved its beginning. The others are zeros that the host doesn't touch.
  void place_variables(Module const& module) {
    std::vector<Variable> variables = module.variables;
    variables.insert(variables.end(), entry_.variables.begin(), entry_.variables.end());
    kernel_.dynamic_shared = kSharedBase;
    for (bool dynamic : {false, true, true}) {
      for (Variable const& variable : variables) {
        if (dynamic != (variable.bytes == 0)) continue;
        if (variable.space == "shared") {
          uint32_t const offset = aligned(kernel_.dynamic_shared, variable);
          kernel_.dynamic_shared = static_cast<uint32_t>(offset + variable.bytes);
          values_[variable.name] = [offset](Warp const&, int) { return offset; };
        } else {
          values_[variable.name] = [memory = std::make_shared<std::vector<uint64_t>>(variable.bytes / 8 + 2)](
                                       Warp const&, int) { return reinterpret_cast<uint64_t>(memory->data()); };
        }
      }
    }
  }

  using Value = std::function<uint64_t(Warp const&, int)>;

  /// The place of a value that a name stands for.
  uint32_t given(std::string const& name, int bits, Value const& value) {
    auto const [found, is_new] = given_.try_emplace({bits, name});
    if (is_new) {
      found->second = new_place(bits);
      kernel_.given.push_back({found->second, bits, value});
    }
    return found->second;
  }

  uint32_t constant(int bits, uint64_t value) {
    return given(std::to_string(value), bits, [value](Warp const&, int) { return value; });
  }

  void name_special_registers() {
    auto const thread = [](Warp const& warp, int lane) { return static_cast<uint32_t>(warp.number * kLanes + lane); };
    values_["%tid.x"] = [=](Warp const& w, int lane) { return thread(w, lane) % w.block.launch.block.x; };
    values_["%tid.y"] = [=](Warp const& w, int lane) { return thread(w, lane) / w.block.launch.block.x; };
    values_["%ntid.x"] = [](Warp const& w, int) { return w.block.launch.block.x; };
    values_["%ctaid.x"] = [](Warp const& w, int) { return w.block.index.x; };
    values_["%ctaid.y"] = [](Warp const& w, int) { return w.block.index.y; };
    values_["%laneid"] = [](Warp const&, int lane) { return static_cast<uint64_t>(lane); };
  }

  uint32_t symbol(std::string const& name, int bits) {
    auto const found = values_.find(name);
    if (found == values_.end()) fail("unknown name " + name);
    return given(name, bits, found->second);
  }

  // ---- statements --------------------------------------------------------------------------------------------------

  Instruction instruction(Statement const& statement) {
    statement_ = &statement;
    result_ = {};
    operands_ = addresses_used_ = widths_ = 0;
    result_.line = statement.line;
    result_.target = static_cast<uint32_t>(statement.target);
    if (statement.guard >= 0) {
      result_.guard = places_[statement.guard] | (statement.guard_negated ? kNegated : 0);
    }
    auto const found = Opcodes::all().table.find(lookup_name(statement));
    if (found == Opcodes::all().table.end()) fail("unknown opcode");
    Opcode const& opcode = found->second;
    result_.run = opcode.run;
    result_.number = opcode.number;
    result_.count = static_cast<uint32_t>(statement.operands.size());
    size_t used = 0;
    for (Slot const& slot : opcode.slots) {
      bool const left = used < statement.operands.size();
      if (slot.kind == Slot::Kind::paired_predicate_out && !(left && statement.operands[used].paired)) {
        push(kIgnoredPredicate);
      } else if (left) {
        fill(slot, statement.operands[used++]);
      } else if (!slot.optional) {
        fail("too few operands");
      }
    }
    if (used != statement.operands.size()) fail("too many operands");
    return result_;
  }

  void push(uint32_t place) {
    if (operands_ == std::size(result_.operand)) fail("too many registers");
    result_.operand[operands_++] = place;
  }

  void fill(Slot const& slot, Operand const& operand) {
    using Kind = Slot::Kind;
    if (slot.kind == Kind::ignored) return;
    if (slot.kind == Kind::address) return fill_address(operand);
    if (slot.kind != Kind::in && slot.kind != Kind::out) return push(predicate(operand));
    bool const group = operand.kind == Operand::Kind::group;
    if (static_cast<int>(group ? operand.parts.size() : 1) != slot.elements) fail("a vector of another length");
    if (group) result_.elements = static_cast<uint32_t>(slot.elements);
    std::vector<Operand> const parts = group ? operand.parts : std::vector{operand};
    int const bits = slot.any ? width(slot, parts) : slot.bits;
    for (Operand const& part : parts) push(value(slot, part, bits));
  }

  /// The width of registers that may have any, which is noted; what is no register has the least.
  int width(Slot const& slot, std::vector<Operand> const& parts) {
    int bits = std::max(slot.bits, 16);
    for (Operand const& part : parts) {
      if (part.kind == Operand::Kind::reg) bits = entry_.register_bits[part.index];
    }
    if (bits < slot.bits || widths_ == std::size(result_.bits)) fail("a register that is too narrow");
    return result_.bits[widths_++] = bits;
  }

  uint32_t value(Slot const& slot, Operand const& operand, int bits) {
    bool const reads = slot.kind == Slot::Kind::in, writes = slot.kind == Slot::Kind::out;
    if (operand.kind == Operand::Kind::reg) {
      if (entry_.register_bits[operand.index] == bits && !operand.negated) return places_[operand.index];
      fail("register " + operand.text + " is not of " + std::to_string(bits) + " bits");
    }
    if (reads && operand.kind == Operand::Kind::immediate) return constant(bits, operand.bits);
    if (reads && operand.kind == Operand::Kind::symbol) return symbol(operand.text, bits);
    if (writes && operand.kind == Operand::Kind::sink) return scratch_;
    fail("an operand of the wrong kind");
  }

  uint32_t predicate(Operand const& operand) {
    if (operand.kind == Operand::Kind::immediate) return operand.bits ? kTrue : kFalse;
    if (operand.kind == Operand::Kind::sink) return kIgnoredPredicate;
    if (operand.kind != Operand::Kind::reg || entry_.register_bits[operand.index] != 1) {
      fail("an operand that is no predicate");
    }
    return places_[operand.index] | (operand.negated ? kNegated : 0);
  }

  void fill_address(Operand const& operand) {
    bool const has_base = operand.kind == Operand::Kind::address && !operand.parts.empty();
    if (!has_base || addresses_used_ == std::size(result_.address)) fail("an operand that is no address");
    Operand const& base = operand.parts[0];
    Address& address = result_.address[addresses_used_++];
    address.offset = operand.bits;
    address.wide = base.kind != Operand::Kind::reg || entry_.register_bits[base.index] == 64;
    address.base = value(in<uint64_t>(), base, address.wide ? 64 : 32);
    if (operand.parts.size() < 2) return;
    result_.elements = static_cast<uint32_t>(operand.parts[1].parts.size());  // a tensor's coordinates
    for (Operand const& coordinate : operand.parts[1].parts) push(value(in<int32_t>(), coordinate, 32));
  }

  Entry const& entry_;
  Kernel kernel_;
  std::vector<uint32_t> places_;         ///< of each register; of a predicate, its number
  std::map<std::string, Value> values_;  ///< of names
  std::map<std::pair<int, std::string>, uint32_t> given_;
  uint32_t const scratch_ = new_place(64);  ///< of results that nobody wants

  Statement const* statement_ = nullptr;  ///< the one at work
  Instruction result_;
  size_t operands_ = 0, addresses_used_ = 0, widths_ = 0;
};

}  // namespace

Kernel decode(Module const& module, Entry const& entry) { return Decoder(module, entry).kernel(); }

Opcodes const& Opcodes::all() {
  static Opcodes const table = [] {
    Opcodes opcodes;
    for (auto add : {add_arithmetic, add_async_copies, add_barriers, add_bulk_copies, add_conversions, add_exchange,
                     add_logic, add_matrix, add_memory}) {
      add(opcodes);
    }
    return opcodes;
  }();
  return table;
}

void Opcodes::add(std::vector<std::string> const& names, Instruction::Run run, std::vector<Slot> const& slots,
                  uint32_t number) {
  for (std::string const& name : names) {
    if (!table.try_emplace(name, Opcode{run, slots, number}).second) {
      throw Error("the simulator's table has two opcodes " + name);
    }
  }
}

Alternatives spell(std::initializer_list<Alternatives> parts) {
  Alternatives names{""};
  for (Alternatives const& part : parts) {
    Alternatives longer;
    for (std::string const& head : names) {
      for (std::string const& tail : part) longer.push_back(head + tail);
    }
    names = std::move(longer);
  }
  return names;
}

}  // namespace simulator
