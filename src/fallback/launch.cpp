#include <array>
#include <atomic>
#include <climits>
#include <stdexcept>
#include <string>

#include "../device_guard.h"
#include "../general/sequence.h"
#include "fallback_units.h"  // generated: append_fallback
#include "table.h"

namespace cutlass_fmha {
namespace {

constexpr int kMaxDevices = 64;

/// Raises a kernel's shared-memory limit once per device. Setting it twice is harmless, so a race costs nothing.
void allow_shared_memory(int row, FallbackTemplate const& t, int device) {
  static std::vector<std::array<std::atomic<bool>, kMaxDevices>> done(fallback_templates().size());
  bool const cached = device < kMaxDevices;
  if (cached && done[row][device].load(std::memory_order_acquire)) return;
  check(cudaFuncSetAttribute(t.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, t.smem_bytes),
        std::string("raising the shared memory limit of ") + t.name + " to " + std::to_string(t.smem_bytes) + " bytes");
  if (cached) done[row][device].store(true, std::memory_order_release);
}

}  // namespace

std::vector<FallbackTemplate> const& fallback_templates() {
  static std::vector<FallbackTemplate> const rows = [] {
    std::vector<FallbackTemplate> all;
    append_fallback(all);
    return all;
  }();
  return rows;
}

void launch_fallback(int row, GeneralParams params, int device, cudaStream_t stream) {
  FallbackTemplate const& t = fallback_templates().at(row);
  int64_t const blocks = grid_size(params, t.config.tile_m);
  if (blocks == 0) return;
  if (blocks > INT_MAX) {
    throw std::invalid_argument(std::string(t.name) + " needs " + std::to_string(blocks) +
                                " thread blocks for this problem; a grid holds at most 2147483647");
  }
  DeviceGuard guard(device);
  allow_shared_memory(row, t, device);
  int const bytes = t.config.element == Element::float32 ? 4 : 2;
  params.order = tile_order(params, t.config.tile_m, t.config.warps, bytes, gpu_of(device));
  void* arguments[] = {&params};
  dim3 const threads(32, static_cast<unsigned>(t.config.warps));  // as the example numbers lanes and warps
  check(cudaLaunchKernel(t.kernel, dim3(static_cast<unsigned>(blocks)), threads, arguments, t.smem_bytes, stream),
        std::string("launching ") + t.name + " on device " + std::to_string(device));
}

}  // namespace cutlass_fmha
