#include "launch.h"

#include <cstdlib>
#include <cstring>

#include "block.h"

namespace simulator {

uint64_t environment_number(char const* name, uint64_t otherwise) {
  char const* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

void Program::parse() {
  if (parsed_) return;
  module_ = parse_ptx(text_);
  for (Variable const& variable : module_.variables) {
    if (variable.space != "global" && variable.space != "const") continue;
    memory_.emplace_back(variable.bytes / sizeof(Line) + 1);
    std::memcpy(memory_.back().data(), variable.content.data(), variable.content.size());
    globals_[variable.name] = reinterpret_cast<uint64_t>(memory_.back().data());
  }
  parsed_ = true;
}

Kernel const& Program::kernel(std::string const& name) {
  std::lock_guard const lock(mutex_);
  parse();
  std::unique_ptr<Kernel>& kernel = kernels_[name];
  if (kernel) return *kernel;
  for (Entry const& entry : module_.entries) {
    if (entry.name == name) return *(kernel = std::make_unique<Kernel>(decode(module_, entry, globals_)));
  }
  throw Error("there is no kernel " + name + " in its program's PTX");
}

void run(Kernel const& kernel, Size3 grid, Size3 block_size, uint32_t dynamic_shared, void const* const* arguments,
         uint64_t seed) {
  std::vector<Line> parameters(kernel.parameter_bytes / sizeof(Line) + 1);
  auto* const begin = reinterpret_cast<std::byte*>(parameters.data());
  for (size_t i = 0; i < kernel.parameter_sizes.size(); ++i) {
    std::memcpy(begin + kernel.parameter_offsets[i], arguments[i], kernel.parameter_sizes[i]);
  }
  Launch const launch{kernel, grid, block_size, dynamic_shared, begin, seed};
  uint64_t const blocks = uint64_t(grid.x) * grid.y * grid.z;
  Block block(launch);
  for (uint64_t i = 0; i < blocks; ++i) block.run((i + seed) % blocks);
}

}  // namespace simulator
