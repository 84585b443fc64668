#include "table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "dependent_launch.h"
#include "device_guard.h"
#include "emulation.h"

namespace cutlass_fmha {

std::vector<Row> all_rows();  // generated: rows.cpp

namespace {

constexpr int kMaxDevices = 64;
constexpr int kDefaultSmemLimit = 48 * 1024;  // more must be asked for, per kernel and device

cudaDeviceProp const& properties_of(int device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<cudaDeviceProp, kMaxDevices> known;
  int const place = std::min(device, kMaxDevices - 1);  // devices beyond are like the last one that is known
  std::call_once(once[place], [&] {
    check(cudaGetDeviceProperties(&known[place], device), [] { return "cudaGetDeviceProperties"; });
  });
  return known[place];
}

/// Whether blocks ask for more shared memory than they use. Those beside attention are small, or fill an SM, and may
/// gather.
bool spreads(Row const& row) {
  return row.dependent_launch() && row.smem_bytes > 0 && !std::holds_alternative<HelperConfig>(row.config);
}

/// Shared memory with which no SM holds more of a launch's blocks than its share, where that is possible: blocks that
/// may start before the launch ahead has ended would gather on the SMs that are free first. Where the next launch's
/// share has room beside it, it is left that; and some is left for the blocks that combine the parts of split keys.
int spreading_smem_bytes(Row const& row, int64_t blocks, int device) {
  constexpr int64_t kCombining = 16 * 1024;
  cudaDeviceProp const& has = properties_of(device);
  int64_t const reserved = int64_t(has.reservedSharedMemPerBlock);
  int64_t const room = int64_t(has.sharedMemPerMultiprocessor) - kCombining;
  int64_t const share = (blocks + has.multiProcessorCount - 1) / has.multiProcessorCount;
  int64_t const held = 2 * share * (row.smem_bytes + reserved) <= room ? 2 * share : share;
  int64_t const bytes = (room / held - reserved) / 1024 * 1024;
  return std::max(row.smem_bytes, int(std::min(bytes, int64_t(has.sharedMemPerBlockOptin))));
}

/// Raises a kernel's shared-memory limit once per device. Setting it twice is harmless, so a race costs nothing.
void allow_shared_memory(Row const& row, int device) {
  if (row.smem_bytes <= kDefaultSmemLimit && !spreads(row)) return;
  static std::vector<std::array<std::atomic<bool>, kMaxDevices>> done(rows().size());
  std::atomic<bool>* const known = device < kMaxDevices ? &done[&row - rows().data()][device] : nullptr;
  if (known && known->load(std::memory_order_acquire)) return;
  int const bytes = spreads(row) ? int(properties_of(device).sharedMemPerBlockOptin) : row.smem_bytes;
  check(cudaFuncSetAttribute(row.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), [&] {
    return std::string("raising the shared memory limit of ") + row.name + " to " + std::to_string(bytes) + " bytes";
  });
  if (known) known->store(true, std::memory_order_release);
}

/// CUTLASS's example 41, and what stands beside it, numbers lanes and warps by two dimensions.
dim3 block_of(Row const& row) {
  bool const by_warps =
      row.family() == Family::wide || row.family() == Family::wide_scored || row.family() == Family::backward_wide;
  return by_warps ? dim3(32, unsigned(row.threads() / 32)) : dim3(unsigned(row.threads()));
}

}  // namespace

std::vector<Row> const& rows() {
  static std::vector<Row> const found = [] {
    std::vector<Row> all = all_rows();
#if CUTLASS_FMHA_EMULATION
    for (Row& row : all) {
      if (row.arch() == 90 || std::holds_alternative<HelperConfig>(row.config)) continue;
      row.smem_bytes = emulated_smem_bytes(row.smem_bytes, row.threads() / 32);
    }
#endif
    return all;
  }();
  return found;
}

Row const& row_at(int number) {
  if (number >= 0 && number < int(rows().size())) return rows()[number];
  throw std::invalid_argument("row must be between 0 and " + std::to_string(rows().size() - 1) + ", got " +
                              std::to_string(number));
}

Row const& helper(Family family, DType dtype, int arch) {
  static std::vector<Row const*> const helpers = [] {
    std::vector<Row const*> found;
    for (Row const& row : rows()) {
      if (std::holds_alternative<HelperConfig>(row.config)) found.push_back(&row);
    }
    return found;
  }();
  for (Row const* row : helpers) {
    if (row->family() == family && row->dtype() == dtype && row->arch() == arch) return *row;
  }
  throw std::invalid_argument(std::string("this build has no kernel of family ") + name_of(family) + " for " +
                              name_of(dtype) + " on sm_" + std::to_string(arch));
}

void launch_kernel(Row const& row, dim3 grid, void const* params, int device, cudaStream_t stream, int threads,
                   int smem_bytes) {
  allow_shared_memory(row, device);
  void* arguments[] = {const_cast<void*>(params)};
  if (smem_bytes < 0) smem_bytes = spreads(row) ? spreading_smem_bytes(row, grid.x, device) : row.smem_bytes;
  dim3 const block = threads ? dim3(unsigned(threads)) : block_of(row);
  cudaError_t const status = row.dependent_launch()
                                 ? launch_dependent(row.kernel, grid, block, arguments, smem_bytes, stream)
                                 : cudaLaunchKernel(row.kernel, grid, block, arguments, smem_bytes, stream);
  check(status, [&] { return std::string("launching ") + row.name + " on device " + std::to_string(device); });
}

}  // namespace cutlass_fmha
