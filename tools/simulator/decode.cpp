// From statements to instructions: registers get their places, constants and special registers places of their own.
#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <utility>

#include "opcodes.h"

namespace simulator {
namespace {

/// Cache hints and memory orders, which change nothing where memory is always up to date.
bool is_hint(std::string_view part) {
  static std::set<std::string_view> const hints{"nc", "relaxed", "acquire", "release", "gpu"};
  return part.starts_with("L2::") || hints.contains(part);
}

/// What is looked up: without hints; with .b32 for every type of 32 bits where the type changes nothing; moves from and
/// to {a, b} by names of their own, whose operands are the parts.
Statement plain(Statement statement) {
  std::string const whole = std::exchange(statement.opcode, "");
  for (auto const part : std::views::split(whole, '.')) {
    std::string_view const text(part.begin(), part.end());
    if (!is_hint(text)) statement.opcode.append(".").append(text.starts_with("shared::") ? "shared" : text);
  }
  std::string& opcode = statement.opcode.erase(0, 1);
  std::string const head = opcode.substr(0, opcode.find('.'));
  size_t const type = opcode.rfind('.') + 1;
  if ((head == "ld" || head == "st" || head == "mov" || head == "selp") && opcode[type] != 'p') opcode[type] = 'b';
  for (size_t side = 0; side < statement.operands.size() && head == "mov"; ++side) {
    std::vector<Operand> const parts = statement.operands[side].parts;
    if (parts.empty()) continue;
    opcode += side == 0 ? ".unpack" : ".pack";
    auto const at = statement.operands.erase(statement.operands.begin() + static_cast<std::ptrdiff_t>(side));
    statement.operands.insert(at, parts.begin(), parts.end());
  }
  return statement;
}

/// Where lanes that part at a statement meet again: its immediate post-dominator, the first
/// statement that all paths to the end lead through, or the count of statements for the end. There the compiler has
/// them meet. By Cooper, Harvey and Kennedy: "A simple, fast dominance algorithm".
std::vector<uint32_t> find_joins(std::vector<Statement> const& statements) {
  auto const end = static_cast<uint32_t>(statements.size());
  std::vector<std::vector<uint32_t>> successors(end + 1), predecessors(end + 1);
  for (uint32_t i = 0; i < end; ++i) {
    Statement const& s = statements[i];
    bool const leaves = s.opcode == "ret" || s.target >= 0;
    if (leaves) successors[i].push_back(s.target < 0 ? end : static_cast<uint32_t>(s.target));
    if (!leaves || s.guard >= 0) successors[i].push_back(i + 1);
    for (uint32_t to : successors[i]) predecessors[to].push_back(i);
  }
  // Those from which the end can be reached, each after a path to it: postorder of the reversed graph.
  std::vector<uint32_t> order, path{end}, position(end + 1);
  std::vector<bool> seen(end + 1, false);
  while (!path.empty()) {
    uint32_t const here = path.back();
    seen[here] = true;
    std::vector<uint32_t>& before = predecessors[here];
    while (!before.empty() && seen[before.back()]) before.pop_back();
    if (!before.empty()) {
      path.push_back(before.back());
      continue;
    }
    position[here] = static_cast<uint32_t>(order.size());
    order.push_back(here);
    path.pop_back();
  }
  std::vector<uint32_t> joins(end + 1, kNowhere);
  joins[end] = end;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto here = order.rbegin() + 1; here != order.rend(); ++here) {
      uint32_t found = kNowhere;
      for (uint32_t other : successors[*here]) {
        if (joins[other] == kNowhere) continue;
        if (found == kNowhere) found = other;
        while (found != other) {
          uint32_t& lower = position[found] < position[other] ? found : other;
          lower = joins[lower];
        }
      }
      changed |= std::exchange(joins[*here], found) != found;
    }
  }
  return joins;
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
    throw Error(entry_.name + ", PTX line " + std::to_string(result_.line) + ": " + what + " in " + *opcode_);
  }

  // ---- places ------------------------------------------------------------------------------------------------------

  uint32_t new_place(int bits) {
    uint32_t const offset = kernel_.register_bytes;
    kernel_.register_bytes += static_cast<uint32_t>(bits) / 8 * kLanes;
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

  void name_special_registers() {
    auto const thread = [](Warp const& warp, int lane) { return static_cast<uint32_t>(warp.number * kLanes + lane); };
    values_["%tid.x"] = [=](Warp const& w, int lane) { return thread(w, lane) % w.block.launch.block.x; };
    values_["%tid.y"] = [=](Warp const& w, int lane) { return thread(w, lane) / w.block.launch.block.x; };
    values_["%ntid.x"] = [](Warp const& w, int) { return w.block.launch.block.x; };
    values_["%ctaid.x"] = [](Warp const& w, int) { return w.block.index.x; };
    values_["%ctaid.y"] = [](Warp const& w, int) { return w.block.index.y; };
    values_["%laneid"] = [](Warp const&, int lane) { return static_cast<uint64_t>(lane); };
  }

  // ---- statements --------------------------------------------------------------------------------------------------

  Instruction instruction(Statement const& written) {
    Statement const statement = plain(written);
    opcode_ = &written.opcode;
    result_ = {};
    result_.line = statement.line;
    result_.target = static_cast<uint32_t>(statement.target);
    operands_ = addresses_ = widths_ = 0;
    if (statement.guard >= 0) result_.guard = places_[statement.guard] | (statement.guard_negated ? kNegated : 0);
    auto const found = Opcodes::all().table.find(statement.opcode);
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

  void push(uint32_t place) { result_.operand[operands_++] = place; }

  void fill(Slot const& slot, Operand const& operand) {
    using Kind = Slot::Kind;
    if (slot.kind == Kind::ignored) return;
    if (slot.kind == Kind::address) return fill_address(operand);
    if (slot.kind != Kind::in && slot.kind != Kind::out) return push(predicate(operand));
    bool const group = operand.kind == Operand::Kind::group;
    std::vector<Operand> const parts = group ? operand.parts : std::vector{operand};
    if (static_cast<int>(parts.size()) != slot.elements) fail("a vector of another length");
    if (group) result_.elements = static_cast<uint32_t>(slot.elements);
    int bits = slot.bits;
    if (slot.any) {  // and what is no register has the least
      bits = std::max(bits, 16);
      for (Operand const& part : parts)
        bits = part.kind == Operand::Kind::reg ? entry_.register_bits[part.index] : bits;
      result_.bits[widths_++] = bits;
    }
    for (Operand const& part : parts) push(value(slot.kind == Kind::in, part, bits));
  }

  uint32_t value(bool reads, Operand const& operand, int bits) {
    if (operand.kind == Operand::Kind::reg) {
      if (entry_.register_bits[operand.index] == bits && !operand.negated) return places_[operand.index];
      fail("register " + operand.text + " is not of " + std::to_string(bits) + " bits");
    }
    if (!reads && operand.kind == Operand::Kind::sink) return scratch_;
    if (reads && operand.kind == Operand::Kind::immediate) {
      return given(std::to_string(operand.bits), bits, [value = operand.bits](Warp const&, int) { return value; });
    }
    if (!reads || operand.kind != Operand::Kind::symbol) fail("an operand of the wrong kind");
    auto const found = values_.find(operand.text);
    if (found == values_.end()) fail("unknown name " + operand.text);
    return given(operand.text, bits, found->second);
  }

  uint32_t predicate(Operand const& operand) {
    if (operand.kind == Operand::Kind::immediate) return operand.bits ? kTrue : kFalse;
    if (operand.kind == Operand::Kind::sink) return kIgnoredPredicate;
    bool const right = operand.kind == Operand::Kind::reg && entry_.register_bits[operand.index] == 1;
    if (!right) fail("an operand that is no predicate");
    return places_[operand.index] | (operand.negated ? kNegated : 0);
  }

  void fill_address(Operand const& operand) {
    if (operand.kind != Operand::Kind::address || operand.parts.empty()) fail("an operand that is no address");
    Operand const& base = operand.parts[0];
    bool const wide = base.kind != Operand::Kind::reg || entry_.register_bits[base.index] == 64;
    result_.address[addresses_++] = {value(true, base, wide ? 64 : 32), wide, operand.bits};
    if (operand.parts.size() < 2) return;
    for (Operand const& coordinate : operand.parts[1].parts) push(value(true, coordinate, 32));  // of a tensor
  }

  Entry const& entry_;
  Kernel kernel_;
  std::vector<uint32_t> places_;         ///< of each register; of a predicate, its number
  std::map<std::string, Value> values_;  ///< of names
  std::map<std::pair<int, std::string>, uint32_t> given_;
  uint32_t const scratch_ = new_place(64);  ///< of results that nobody wants

  std::string const* opcode_ = nullptr;  ///< of the statement at work
  Instruction result_;
  size_t operands_ = 0, addresses_ = 0, widths_ = 0;
};

}  // namespace

Kernel const& Program::kernel(std::string const& name) {
  std::lock_guard const lock(mutex_);
  if (auto const found = kernels_.find(name); found != kernels_.end()) return found->second;
  if (!module_) module_ = parse_ptx(text_);
  for (Entry const& entry : module_->entries) {
    if (entry.name == name) return kernels_[name] = Decoder(*module_, entry).kernel();
  }
  throw Error("there is no kernel " + name + " in its program's PTX");
}

Opcodes const& Opcodes::all() {
  static Opcodes const table = [] {
    Opcodes opcodes;
    for (auto add : {add_arithmetic, add_exchange, add_matrix, add_memory}) {
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

}  // namespace simulator
