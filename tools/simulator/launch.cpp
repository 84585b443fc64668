#include <cstring>

#include "block.h"

namespace simulator {

Kernel const& Program::kernel(std::string const& name) {
  std::lock_guard const lock(mutex_);
  if (auto const found = kernels_.find(name); found != kernels_.end()) return found->second;
  if (!module_) module_ = parse_ptx(text_);
  for (Entry const& entry : module_->entries) {
    if (entry.name == name) return kernels_[name] = decode(*module_, entry);
  }
  throw Error("there is no kernel " + name + " in its program's PTX");
}

void run(Kernel const& kernel, Size3 grid, Size3 block_size, uint32_t dynamic_shared, void const* const* arguments,
         uint64_t seed) {
  std::vector<Lanes<uint32_t>> parameters(kernel.parameter_bytes / sizeof(Lanes<uint32_t>) + 1);  // which are aligned
  auto* const begin = reinterpret_cast<std::byte*>(parameters.data());
  for (auto const& [offset, bytes] : kernel.parameters) std::memcpy(begin + offset, *arguments++, bytes);
  Launch const launch{kernel, grid, block_size, dynamic_shared, begin, seed};
  uint64_t const blocks = uint64_t(grid.x) * grid.y * grid.z;
  Block block(launch);
  for (uint64_t i = 0; i < blocks; ++i) block.run((i + seed) % blocks);
}

}  // namespace simulator
