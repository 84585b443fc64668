// PTX text as data: what a module declares and the statements of its kernels. Knows the grammar, no opcode.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace simulator {

/// What is wrong with a program or with what it does, with the line of PTX where that is known.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Operand {
  enum class Kind {
    reg,        ///< the register with the number index
    immediate,  ///< bits
    symbol,     ///< text: a variable, a special register ("%tid.x") or the name of a label
    address,    ///< [base + bits]: parts has the base, or nothing for an absolute address, and may have coordinates
    group,      ///< {a, b, ...} in parts
    sink,       ///< "_": a result that nobody wants
  };
  Kind kind = Kind::sink;
  int index = 0;
  bool negated = false;  ///< "!%p"
  bool paired = false;   ///< "%r1|%p1": the second of the two
  uint64_t bits = 0;     ///< of integers all 64; of 0f... the 32 bits of the float
  std::string text;
  std::vector<Operand> parts;
};

struct Statement {
  int line = 0;
  int guard = -1;  ///< the predicate's register; -1 without "@%p"
  bool guard_negated = false;
  std::string opcode;  ///< with its modifiers: "add.f32"
  std::vector<Operand> operands;
  int target = -1;  ///< of a branch: the statement at its label; the count of statements is the kernel's end
};

struct Variable {
  std::string name, space;  ///< space: "shared", "global", "const" or "param"
  uint64_t alignment = 1, bytes = 0;
};

struct Entry {
  std::string name;
  std::vector<Variable> parameters,
      variables;                   ///< variables: those of its body, whose names are unique in it
  std::vector<int> register_bits;  ///< of each register, 1 of a predicate
  std::vector<Statement> statements;
};

struct Module {
  std::vector<Variable> variables;
  std::vector<Entry> entries;
};

/// Raises Error, with the line, for text it does not understand.
Module parse_ptx(std::string const& text);

}  // namespace simulator
