// Launches: a program's text, its kernels once they are decoded, and a grid of blocks.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel.h"
#include "ptx.h"

namespace simulator {

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

/// Memory with a tensor map's alignment, the largest that a variable or a parameter has.
struct alignas(128) Line {
  std::byte bytes[128];
};

/// One translation unit's PTX, parsed when its first kernel is asked for.
class Program {
 public:
  explicit Program(std::string text) : text_(std::move(text)) {}

  /// Decoded once, and kept. Raises Error.
  Kernel const& kernel(std::string const& name);

 private:
  void parse();

  std::string text_;
  std::mutex mutex_;
  bool parsed_ = false;
  Module module_;
  Globals globals_;
  std::vector<std::vector<Line>> memory_;  ///< of the globals
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

/// Runs a grid, its blocks one after the other. arguments[i] points to the kernel's parameter i. Raises Error.
void run(Kernel const& kernel, Size3 grid, Size3 block, uint32_t dynamic_shared, void const* const* arguments,
         uint64_t seed);

/// A number in the environment.
uint64_t environment_number(char const* name, uint64_t otherwise);

}  // namespace simulator
