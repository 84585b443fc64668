#include "kernel.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <tuple>

namespace simulator {
namespace {

struct Token {
  std::string_view text;  ///< empty at the end
  int line;
};

bool in_word(char c) { return std::isalnum(c) || std::string_view("_$%.").find(c) != std::string_view::npos; }

/// Words and numbers keep their dots and double colons: "mbarrier.init.shared::cta.b64" is one. Others are characters.
std::vector<Token> tokenize(std::string_view text) {
  std::vector<Token> tokens;
  int line = 1;
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = begin + 1;
    if (text[begin] == '\n') ++line;
    if (text.substr(begin, 2) == "//") end = std::min(text.find('\n', begin), text.size());
    if (std::isspace(text[begin]) || end > begin + 1) continue;
    while (in_word(text[begin]) && end < text.size() && (in_word(text[end]) || text.substr(end, 2) == "::")) {
      end += text[end] == ':' ? 2 : 1;
    }
    tokens.push_back({text.substr(begin, end - begin), line});
  }
  tokens.push_back({"", line});
  return tokens;
}

/// Bits of a type's name: ".b32" has 32, ".pred" 1.
int type_bits(std::string const& type) { return type == ".pred" ? 1 : std::stoi(type.substr(2)); }

class Parser {
 public:
  explicit Parser(std::string const& text) : tokens_(tokenize(text)) {}

  Module module() {
    while (!at("")) declaration();
    return std::move(module_);
  }

 private:
  [[noreturn]] void fail(std::string const& what) const {
    throw Error("PTX line " + std::to_string(peek().line) + ": " + what + " at \"" + std::string(peek().text) + "\"");
  }
  Token const& peek(size_t ahead = 0) const { return tokens_[std::min(position_ + ahead, tokens_.size() - 1)]; }
  std::string next() {
    if (at("")) fail("the text ends too early");
    return std::string(tokens_[position_++].text);
  }
  bool at(char const* text) const { return peek().text == text; }
  bool at_number() const { return at("-") || (!at("") && std::isdigit(peek().text[0])); }
  bool accept(char const* text) { return at(text) ? (++position_, true) : false; }
  void expect(char const* text) {
    if (!accept(text)) fail(std::string("expected \"") + text + "\"");
  }
  uint64_t integer() {
    bool const negative = accept("-");
    std::string const text = next();
    uint64_t const value = std::stoull(text.starts_with("0f") ? "0x" + text.substr(2) : text, nullptr, 0);
    return negative ? 0 - value : value;
  }

  // ---- of a module -------------------------------------------------------------------------------------------------

  void declaration() {
    if (accept(".version") || accept(".target") || accept(".address_size")) {
      next();
    } else if (accept(".entry")) {
      entry();
    } else if (at(".global") || at(".const") || at(".shared")) {
      module_.variables.push_back(variable());
      expect(";");
    } else if (!accept(".visible") && !accept(".extern")) {
      fail("unknown declaration");
    }
  }

  Variable variable() {
    Variable result;
    result.space = next().substr(1);
    while (peek().text.starts_with('.')) {
      if (accept(".align")) {
        result.alignment = integer();
      } else {
        result.bytes = static_cast<uint64_t>(type_bits(next()) / 8);
      }
    }
    result.name = next();
    result.alignment = std::max(result.alignment, result.bytes);
    while (accept("[")) {
      result.bytes *= at("]") ? 0 : integer();  // none: of dynamic shared memory
      expect("]");
    }
    return result;
  }

  // ---- of a kernel -------------------------------------------------------------------------------------------------

  void entry() {
    entry_ = &module_.entries.emplace_back();
    registers_.clear(), labels_.clear(), parents_.clear(), open_branches_.clear();
    entry_->name = next();
    expect("(");
    while (!accept(")")) {
      entry_->parameters.push_back(variable());
      accept(",");
    }
    while (!at("{")) next();  // .maxntid and other hints
    scope(-1);
    for (auto const& [number, scope, label] : open_branches_) {
      Statement& branch = entry_->statements[number];
      branch.target = find(labels_, label, scope);
      if (branch.target < 0) throw Error("PTX line " + std::to_string(branch.line) + ": there is no label " + label);
    }
  }

  /// "{ ... }": names declared in it are its own.
  void scope(int parent) {
    int const self = static_cast<int>(parents_.size());
    parents_.push_back(parent);
    expect("{");
    while (!accept("}")) {
      if (at("{")) {
        scope(self);
      } else if (accept(".reg")) {
        registers(self);
      } else if (at(".shared")) {
        entry_->variables.push_back(variable());
        expect(";");
      } else if (at(".pragma")) {
        while (next() != ";") continue;
      } else if (peek(1).text == ":") {
        labels_[{self, next()}] = static_cast<int>(entry_->statements.size());
        expect(":");
      } else {
        statement(self);
      }
    }
  }

  void registers(int scope) {
    int const bits = type_bits(next());
    auto const declare = [&](std::string const& name) {
      registers_[{scope, name}] = static_cast<int>(entry_->register_bits.size());
      entry_->register_bits.push_back(bits);
    };
    do {
      std::string const name = next();
      if (accept("<")) {
        for (uint64_t i = 0, count = integer(); i < count; ++i) declare(name + std::to_string(i));
        expect(">");
      } else {
        declare(name);
      }
    } while (accept(","));
    expect(";");
  }

  void statement(int scope) {
    Statement s;
    s.line = peek().line;
    if (accept("@")) {
      s.guard_negated = accept("!");
      s.guard = find(registers_, next(), scope);
    }
    s.opcode = next();
    if (!at(";")) {
      do {
        s.operands.push_back(operand(scope));
        if (accept("|")) {
          s.operands.push_back(operand(scope));
          s.operands.back().paired = true;
        }
      } while (accept(","));
    }
    expect(";");
    if (s.opcode == "bra" || s.opcode == "bra.uni") {
      open_branches_.push_back({entry_->statements.size(), scope, s.operands[0].text});
      s.operands.clear();
    }
    entry_->statements.push_back(std::move(s));
  }

  Operand operand(int scope) {
    Operand result;
    if (accept("{")) {
      result.kind = Operand::Kind::group;
      do result.parts.push_back(operand(scope));
      while (accept(","));
      expect("}");
    } else if (accept("[")) {
      address(result, scope);
    } else if (accept("_")) {
      result.kind = Operand::Kind::sink;
    } else if (at_number()) {
      result.kind = Operand::Kind::immediate;
      result.bits = integer();
    } else {
      result.negated = accept("!");
      result.text = next();
      result.index = find(registers_, result.text, scope);
      result.kind = result.index < 0 ? Operand::Kind::symbol : Operand::Kind::reg;
    }
    return result;
  }

  void address(Operand& result, int scope) {
    result.kind = Operand::Kind::address;
    do {
      if (at_number()) {
        result.bits += integer();
      } else {
        result.parts.push_back(operand(scope));
      }
    } while (accept("+") || accept(","));
    expect("]");
  }

  using Names = std::map<std::pair<int, std::string>, int>;  ///< by scope

  int find(Names const& names, std::string const& name, int scope) const {
    for (; scope >= 0; scope = parents_[scope]) {
      if (auto const found = names.find({scope, name}); found != names.end()) return found->second;
    }
    return -1;
  }

  std::vector<Token> tokens_;
  size_t position_ = 0;
  Module module_;
  Entry* entry_ = nullptr;
  std::vector<int> parents_;  ///< of each scope; -1: the kernel's own has none
  Names registers_, labels_;
  std::vector<std::tuple<size_t, int, std::string>> open_branches_;  ///< statement, scope, label
};

}  // namespace

Module parse_ptx(std::string const& text) { return Parser(text).module(); }

}  // namespace simulator
