// A kernel ready to run: PTX statements turned into instructions whose operands are places in a warp's register file.
// Programs, which hold their kernels once they are decoded, and launches.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "ptx.h"

namespace simulator {

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

/// Raises Error for an opcode or an operand that the simulator does not know, with the line.
Kernel decode(Module const& module, Entry const& entry);

/// For each statement that branches: the statement where the paths of its lanes first meet, or the count of statements
/// when they only meet at the end. kNowhere for all others.
std::vector<uint32_t> find_joins(std::vector<Statement> const& statements);

/// One translation unit's PTX, parsed when its first kernel is asked for.
class Program {
 public:
  explicit Program(std::string text) : text_(std::move(text)) {}

  /// Decoded once, and kept. Raises Error.
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
