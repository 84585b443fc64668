// A program's PTX, and its kernels ready to run: statements turned into instructions whose operands are places in a
// warp's register file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace simulator {

// ---- PTX text as data: knows the grammar, no opcode ----------------------------------------------------------------

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
  std::vector<Variable> parameters, variables;  ///< and those of its body, whose names are unique in it
  std::vector<int> register_bits;               ///< of each register, 1 of a predicate
  std::vector<Statement> statements;
};

struct Module {
  std::vector<Variable> variables;
  std::vector<Entry> entries;
};

/// Raises Error, with the line, for text it does not understand.
Module parse_ptx(std::string const& text);

// ---- kernels that are ready to run ----------------------------------------------------------------------------------

class Warp;

constexpr uint32_t kNowhere = ~0u;  ///< no instruction

/// Operands that are predicates are numbers of masks; this bit of one says "not".
constexpr uint32_t kNegated = 1u << 31;
enum FixedPredicate : uint32_t { kTrue, kFalse, kIgnoredPredicate, kFixedPredicates };

/// [base + offset]. The base is a register of 64 bits where it is wide, else of 32.
struct Address {
  uint32_t base = 0;
  bool wide = true;
  uint64_t offset = 0;
};

struct Instruction {
  using Run = void (*)(Warp&, Instruction const&);

  Run run = nullptr;
  uint32_t guard = kTrue;
  /// Byte offsets in the register file, or predicates: vectors in parts, addresses left out.
  uint32_t operand[16] = {};
  Address address[3];
  uint32_t count = 0;        ///< operands that the statement has
  uint32_t elements = 1;     ///< of the first one that is a vector
  uint32_t number = 0;       ///< what the opcode table has for the opcode, for handlers that serve several
  int bits[2] = {0, 0};      ///< width of the registers, of opcodes that take any: the first two such operands
  uint32_t target = 0;       ///< of a branch
  uint32_t join = kNowhere;  ///< of a branch: where lanes that part at it meet again
  int line = 0;
};

/// A register that is written when a block starts: constants, special registers, addresses of parameters.
struct Given {
  uint32_t offset;
  int bits;
  std::function<uint64_t(Warp const&, int lane)> value;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;  ///< the last one is an exit
  uint32_t register_bytes = 0, predicates = kFixedPredicates;
  std::vector<Given> given;
  std::vector<std::pair<uint32_t, uint64_t>> parameters;  ///< offsets and sizes
  uint32_t parameter_bytes = 0;
  uint32_t dynamic_shared = 0;  ///< address where dynamic shared memory begins: behind the static variables
};

/// One translation unit's PTX, parsed when its first kernel is asked for.
class Program {
 public:
  explicit Program(std::string text) : text_(std::move(text)) {}

  /// Decoded once, and kept. Raises Error for an opcode or an operand that the simulator does not know, with the line.
  Kernel const& kernel(std::string const& name);

 private:
  std::string text_;
  std::mutex mutex_;
  std::optional<Module> module_;
  std::map<std::string, Kernel> kernels_;
};

struct Size3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct Launch {
  Kernel const& kernel;
  Size3 grid, block;
  uint32_t dynamic_shared = 0;  ///< bytes
  std::byte const* parameters = nullptr;
  uint64_t seed = 0;

  int threads() const { return static_cast<int>(block.x * block.y * block.z); }
};

/// Runs a grid, its blocks one after the other. arguments[i] points to the kernel's parameter i. Raises Error.
void run(Kernel const& kernel, Size3 grid, Size3 block, uint32_t dynamic_shared, void const* const* arguments,
         uint64_t seed);

}  // namespace simulator
