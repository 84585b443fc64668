// From statements to instructions: registers get their places, constants and special registers places of their own.
#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "block.h"
#include "opcodes.h"

namespace simulator {
namespace {

constexpr uint32_t kPlace = 64;  // bytes: what alignment Lanes have

/// Cache hints and memory orders of loads and stores, which change nothing where memory is always up to date.
bool is_hint(std::string const& part) {
  static std::set<std::string> const hints{"nc",  "volatile", "weak", "relaxed", "acquire", "release",
                                           "cta", "cluster",  "gpu",  "sys",     "ca",      "cg",
                                           "cs",  "cv",       "wb",   "wt",      "lu"};
  return part.starts_with("L1::") || part.starts_with("L2::") || hints.contains(part);
}

/// The name to look up: of loads and stores, without hints; of moves, with how many parts there are on which side.
std::string lookup_name(Statement const& statement) {
  std::string const& opcode = statement.opcode;
  if (opcode.starts_with("mov.b") && statement.operands.size() == 2) {
    for (int side : {0, 1}) {
      Operand const& operand = statement.operands[side];
      if (operand.kind != Operand::Kind::group) continue;
      return opcode + (side == 0 ? ".unpack" : ".pack") + std::to_string(operand.parts.size());
    }
  }
  if (!opcode.starts_with("ld.") && !opcode.starts_with("st.")) return opcode;
  std::string name = opcode.substr(0, 2), part;
  for (std::istringstream parts(opcode.substr(3)); std::getline(parts, part, '.');) {
    if (!is_hint(part)) name += "." + part;
  }
  return name;
}

class Decoder {
 public:
  Decoder(Module const& module, Entry const& entry, Globals const& globals) : entry_(entry) {
    kernel_.name = entry.name;
    name_special_registers();
    for (auto const& [name, address] : globals) values_[name] = [address](Warp const&, int) { return address; };
    place_registers();
    place_parameters();
    place_shared(module);
    place_local();
  }

  Kernel kernel() {
    std::vector<uint32_t> const joins = find_joins(entry_.statements);
    for (size_t i = 0; i < entry_.statements.size(); ++i) {
      kernel_.code.push_back(instruction(entry_.statements[i]));
      kernel_.code.back().join = joins[i];
    }
    Statement exit;
    exit.opcode = "exit";
    kernel_.code.push_back(instruction(exit));
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

  void place_registers() {
    for (int bits : entry_.register_bits) places_.push_back(bits == 1 ? kernel_.predicates++ : new_place(bits));
  }

  static uint32_t aligned(uint64_t offset, Variable const& variable) {
    return static_cast<uint32_t>((offset + variable.alignment - 1) / variable.alignment * variable.alignment);
  }

  void place_parameters() {
    for (Variable const& parameter : entry_.parameters) {
      uint32_t const offset = aligned(kernel_.parameter_bytes, parameter);
      kernel_.parameter_offsets.push_back(offset);
      kernel_.parameter_sizes.push_back(static_cast<uint32_t>(parameter.bytes));
      kernel_.parameter_bytes = static_cast<uint32_t>(offset + parameter.bytes);
      values_[parameter.name] = [offset](Warp const& warp, int) {
        return reinterpret_cast<uint64_t>(warp.block.launch.parameters) + offset;
      };
    }
  }

  /// Variables without a size are all the same: dynamic shared memory, behind the others. Their pass is repeated, since
  /// the last of them may have moved its beginning.
  void place_shared(Module const& module) {
    kernel_.dynamic_shared = kSharedBase;
    for (bool dynamic : {false, true, true}) {
      for (auto const* variables : {&module.variables, &entry_.variables}) {
        for (Variable const& variable : *variables) {
          if (variable.space != "shared" || dynamic != (variable.bytes == 0)) continue;
          uint32_t const offset = aligned(kernel_.dynamic_shared, variable);
          kernel_.dynamic_shared = static_cast<uint32_t>(offset + variable.bytes);
          values_[variable.name] = [offset](Warp const&, int) { return offset; };
        }
      }
    }
  }

  void place_local() {
    for (Variable const& variable : entry_.variables) {
      if (variable.space != "local") continue;
      uint32_t const offset = aligned(kernel_.local_bytes, variable);
      values_[variable.name] = [offset](Warp const& warp, int lane) { return warp.local_memory(lane) + offset; };
      kernel_.local_bytes = static_cast<uint32_t>(offset + variable.bytes);
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
    using Axis = uint32_t Size3::*;
    for (auto const& [axis, member] : {std::pair<char, Axis>{'x', &Size3::x}, {'y', &Size3::y}, {'z', &Size3::z}}) {
      std::string const tail{'.', axis};
      values_["%tid" + tail] = [axis](Warp const& warp, int lane) {
        Size3 const& size = warp.block.launch.block;
        auto const thread = static_cast<uint32_t>(warp.number * kLanes + lane);
        return axis == 'x' ? thread % size.x : axis == 'y' ? thread / size.x % size.y : thread / size.x / size.y;
      };
      values_["%ntid" + tail] = [member](Warp const& warp, int) { return warp.block.launch.block.*member; };
      values_["%ctaid" + tail] = [member](Warp const& warp, int) { return warp.block.index.*member; };
      values_["%nctaid" + tail] = [member](Warp const& warp, int) { return warp.block.launch.grid.*member; };
    }
    values_["%laneid"] = [](Warp const&, int lane) { return static_cast<uint64_t>(lane); };
  }

  uint32_t symbol(std::string const& name, int bits, uint64_t offset) {
    auto const found = values_.find(name);
    if (found == values_.end()) fail("unknown name " + name);
    return given(name + "+" + std::to_string(offset), bits,
                 [value = found->second, offset](Warp const& warp, int lane) { return value(warp, lane) + offset; });
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
    Opcode const* opcode = Opcodes::all().find(lookup_name(statement));
    if (!opcode) fail("unknown opcode");
    result_.run = opcode->run;
    result_.number = opcode->number;
    result_.count = static_cast<uint32_t>(statement.operands.size());
    size_t used = 0;
    for (Slot const& slot : opcode->slots) {
      bool const left = used < statement.operands.size();
      if (slot.kind == Slot::Kind::paired_predicate_out) {
        bool const paired = left && statement.operands[used].paired;
        push(paired ? predicate(statement.operands[used++]) : kIgnoredPredicate);
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
    if (slot.kind == Kind::predicate_in || slot.kind == Kind::predicate_out) return push(predicate(operand));
    bool const group = operand.kind == Operand::Kind::group;
    if (static_cast<int>(group ? operand.parts.size() : 1) != slot.elements) fail("a vector of another length");
    if (group) result_.elements = static_cast<uint32_t>(slot.elements);
    int const bits = slot.any ? width(slot, group ? first_register(operand.parts) : operand) : slot.bits;
    if (!group) return push(value(slot, operand, bits));
    for (Operand const& part : operand.parts) push(value(slot, part, bits));
  }

  static Operand const& first_register(std::vector<Operand> const& parts) {
    auto const found =
        std::find_if(parts.begin(), parts.end(), [](Operand const& part) { return part.kind == Operand::Kind::reg; });
    return found == parts.end() ? parts.front() : *found;
  }

  /// The width of a register that may have any, which is noted; what is no register has the least.
  int width(Slot const& slot, Operand const& operand) {
    int bits = std::max(slot.bits, 16);
    if (operand.kind == Operand::Kind::reg) bits = entry_.register_bits[operand.index];
    if (bits < slot.bits || widths_ == std::size(result_.bits)) fail("a register that is too narrow");
    result_.bits[widths_++] = bits;
    return bits;
  }

  uint32_t value(Slot const& slot, Operand const& operand, int bits) {
    bool const reads = slot.kind == Slot::Kind::in, writes = slot.kind == Slot::Kind::out;
    if (operand.kind == Operand::Kind::reg) {
      if (entry_.register_bits[operand.index] == bits && !operand.negated) return places_[operand.index];
      fail("register " + operand.text + " is not of " + std::to_string(bits) + " bits");
    }
    if (reads && operand.kind == Operand::Kind::immediate) return constant(bits, operand.bits);
    if (reads && operand.kind == Operand::Kind::symbol) return symbol(operand.text, bits, operand.bits);
    if (writes && operand.kind == Operand::Kind::sink) return scratch();
    fail("an operand of the wrong kind");
  }

  uint32_t scratch() {
    if (!scratch_) scratch_ = new_place(64) + 1;
    return scratch_ - 1;
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
    if (operand.kind != Operand::Kind::address || addresses_used_ == std::size(result_.address)) {
      fail("an operand that is no address");
    }
    Address& address = result_.address[addresses_used_++];
    address.offset = static_cast<int64_t>(operand.bits);
    address.wide = true;
    if (operand.parts.empty()) {
      address.base = constant(64, 0);
    } else if (Operand const& base = operand.parts[0]; base.kind == Operand::Kind::symbol) {
      address.base = symbol(base.text, 64, 0);
    } else {
      int const bits = entry_.register_bits[base.index];
      if (base.kind != Operand::Kind::reg || (bits != 32 && bits != 64)) fail("an operand that is no address");
      address.wide = bits == 64;
      address.base = places_[base.index];
    }
    if (operand.parts.size() < 2) return;
    result_.elements = static_cast<uint32_t>(operand.parts[1].parts.size());  // a tensor's coordinates
    for (Operand const& coordinate : operand.parts[1].parts) push(value(in<int32_t>(), coordinate, 32));
  }

  Entry const& entry_;
  Kernel kernel_;
  std::vector<uint32_t> places_;         ///< of each register; of a predicate, its number
  std::map<std::string, Value> values_;  ///< of names
  std::map<std::pair<int, std::string>, uint32_t> given_;
  uint32_t scratch_ = 0;

  Statement const* statement_ = nullptr;  ///< the one at work
  Instruction result_;
  size_t operands_ = 0, addresses_used_ = 0, widths_ = 0;
};

}  // namespace

Kernel decode(Module const& module, Entry const& entry, Globals const& globals) {
  return Decoder(module, entry, globals).kernel();
}

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
    if (!table_.try_emplace(name, Opcode{run, slots, number}).second) {
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
    names = longer;
  }
  return names;
}

Opcode const* Opcodes::find(std::string const& name) const {
  auto const found = table_.find(name);
  return found == table_.end() ? nullptr : &found->second;
}

}  // namespace simulator
