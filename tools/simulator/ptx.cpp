#include "ptx.h"

#include <cctype>
#include <map>
#include <tuple>
#include <utility>

namespace simulator {
namespace {

struct Token {
  enum class Kind { word, number, string, punctuation, end };
  Kind kind;
  std::string text;
  int line;
};

bool starts_word(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}
bool continues_word(char c) { return starts_word(c) || std::isdigit(static_cast<unsigned char>(c)); }

/// Words keep their dots and double colons: "mbarrier.init.shared::cta.b64" is one.
std::vector<Token> tokenize(std::string const& text) {
  std::vector<Token> tokens;
  int line = 1;
  for (size_t i = 0; i < text.size();) {
    char const c = text[i];
    size_t const begin = i;
    auto const add = [&](Token::Kind kind) { tokens.push_back({kind, text.substr(begin, i - begin), line}); };
    if (c == '\n') {
      ++line, ++i;
    } else if (std::isspace(static_cast<unsigned char>(c))) {
      ++i;
    } else if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (c == '"') {
      i = std::min(text.find('"', i + 1), text.size() - 1) + 1;
      add(Token::Kind::string);
    } else if (std::isdigit(static_cast<unsigned char>(c))) {
      while (i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '.')) ++i;
      add(Token::Kind::number);
    } else if (starts_word(c)) {
      while (i < text.size() && (continues_word(text[i]) || text.compare(i, 2, "::") == 0)) i += text[i] == ':' ? 2 : 1;
      add(Token::Kind::word);
    } else {
      ++i;
      add(Token::Kind::punctuation);
    }
  }
  tokens.push_back({Token::Kind::end, "", line});
  return tokens;
}

/// Bits of a type's name: "b32" has 32, "pred" 1; 0 when it is no type.
int type_bits(std::string const& type) {
  if (type == "pred") return 1;
  size_t const digits = type.find_first_of("0123456789");
  if (digits != 1 || std::string("busf").find(type[0]) == std::string::npos) return 0;
  return std::stoi(type.substr(digits));
}

class Parser {
 public:
  explicit Parser(std::string const& text) : tokens_(tokenize(text)) {}

  Module module() {
    while (peek().kind != Token::Kind::end) declaration();
    return std::move(module_);
  }

 private:
  [[noreturn]] void fail(std::string const& what) const {
    throw Error("PTX line " + std::to_string(peek().line) + ": " + what + " at \"" + peek().text + "\"");
  }
  Token const& peek(size_t ahead = 0) const { return tokens_[std::min(position_ + ahead, tokens_.size() - 1)]; }
  Token const& next() { return tokens_[std::min(position_++, tokens_.size() - 1)]; }
  bool at(char const* text) const { return peek().kind != Token::Kind::string && peek().text == text; }
  bool accept(char const* text) { return at(text) ? (++position_, true) : false; }
  void expect(char const* text) {
    if (!accept(text)) fail(std::string("expected \"") + text + "\"");
  }
  std::string word() {
    if (peek().kind != Token::Kind::word) fail("expected a name");
    return next().text;
  }
  uint64_t integer() {
    bool const negative = accept("-");
    if (peek().kind != Token::Kind::number) fail("expected a number");
    std::string const text = next().text;
    bool const is_float = text.starts_with("0f") || text.starts_with("0F");
    size_t used = 0;
    uint64_t const value = std::stoull(is_float ? "0x" + text.substr(2) : text, &used, 0);
    if (used != text.size()) fail("did not understand the number " + text + " before");
    return negative ? 0 - value : value;
  }

  // ---- of a module -----------------------------------------------------------------------------------------------

  void declaration() {
    if (accept(".version") || accept(".address_size")) return skip_rest();
    if (accept(".target")) {
      module_.target = word();
      return skip_rest();
    }
    if (accept(".visible") || accept(".extern") || accept(".weak")) return;
    if (accept(".entry")) return entry();
    if (at(".global") || at(".const") || at(".shared")) {
      module_.variables.push_back(variable());
      return expect(";");
    }
    fail("unknown declaration");
  }

  /// What follows ".version" and the like, to the end of its line.
  void skip_rest() {
    for (int const line = tokens_[position_ - 1].line; peek().line == line && peek().kind != Token::Kind::end;) next();
  }

  Variable variable() {
    Variable result;
    result.space = next().text.substr(1);
    int bits = 0;
    while (peek().text[0] == '.') {
      std::string const attribute = word();
      if (attribute == ".align") {
        result.alignment = integer();
      } else if (attribute == ".ptr" || attribute == ".global" || attribute == ".const") {
        continue;  // what a parameter points to
      } else if (!(bits = type_bits(attribute.substr(1)))) {
        fail("unknown attribute " + attribute + " before");
      }
    }
    result.name = word();
    uint64_t count = 1;
    while (accept("[")) {
      count *= at("]") ? 0 : integer();  // none: of dynamic shared memory
      expect("]");
    }
    uint64_t const size = static_cast<uint64_t>(bits) / 8;
    result.bytes = size * count;
    result.alignment = std::max(result.alignment, size);
    if (accept("=")) initialiser(result, size);
    return result;
  }

  void initialiser(Variable& result, uint64_t size) {
    bool const list = accept("{");
    do {
      uint64_t const value = integer();
      for (uint64_t i = 0; i < size; ++i) result.content.push_back(static_cast<uint8_t>(value >> 8 * i));
    } while (list && accept(","));
    if (list) expect("}");
    result.content.resize(result.bytes);
  }

  // ---- of a kernel -----------------------------------------------------------------------------------------------

  void entry() {
    module_.entries.emplace_back();
    entry_ = &module_.entries.back();
    registers_.clear(), labels_.clear(), parents_.clear(), open_branches_.clear();
    entry_->name = word();
    if (accept("(")) {
      while (!accept(")")) {
        entry_->parameters.push_back(variable());
        accept(",");
      }
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
      if (peek().kind == Token::Kind::end) fail("the text ends inside a kernel");
      if (at("{")) {
        scope(self);
      } else if (at(".reg")) {
        registers(self);
      } else if (at(".shared") || at(".local") || at(".param")) {
        entry_->variables.push_back(variable());
        expect(";");
      } else if (accept(".pragma")) {
        while (!accept(";")) next();
      } else if (peek(1).text == ":") {
        labels_[{self, word()}] = static_cast<int>(entry_->statements.size());
        expect(":");
      } else {
        statement(self);
      }
    }
  }

  void registers(int scope) {
    expect(".reg");
    int const bits = type_bits(word().substr(1));
    if (!bits) fail("unknown type of a register before");
    auto const declare = [&](std::string const& name) {
      registers_[{scope, name}] = static_cast<int>(entry_->register_bits.size());
      entry_->register_bits.push_back(bits);
    };
    do {
      std::string const name = word();
      if (accept("<")) {
        uint64_t const count = integer();
        expect(">");
        for (uint64_t i = 0; i < count; ++i) declare(name + std::to_string(i));
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
      s.guard = find(registers_, word(), scope);
      if (s.guard < 0) fail("the guard is no register before");
    }
    s.opcode = word();
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
      if (s.operands.size() != 1) fail("a branch has one target; this is before");
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
    } else if (peek().kind == Token::Kind::number || at("-")) {
      result.kind = Operand::Kind::immediate;
      result.bits = integer();
    } else {
      result.negated = accept("!");
      result.text = word();
      result.index = find(registers_, result.text, scope);
      result.kind = result.index < 0 ? Operand::Kind::symbol : Operand::Kind::reg;
      if (result.kind == Operand::Kind::symbol && accept("+")) result.bits = integer();
    }
    return result;
  }

  void address(Operand& result, int scope) {
    result.kind = Operand::Kind::address;
    do {
      if (peek().kind == Token::Kind::number || at("-")) {
        result.bits += integer();
      } else {
        Operand base = operand(scope);
        result.bits += base.bits, base.bits = 0;
        result.parts.push_back(std::move(base));
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
