#include "registry.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "dependent_launch.h"
#include "device_guard.h"
#include "emulation.h"
#include "forward/scheduler.h"
#include "general/sequence.h"
#include "registry_groups.h"  // generated: append_all
#include "support/launch.h"
#include "tensor_map.h"

namespace cutlass_fmha {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kDefaultSmemLimit = 48 * 1024;  // more must be asked for, per kernel and device

cudaDeviceProp const& properties_of(int device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<cudaDeviceProp, kMaxDevices> known;
  int const place = std::min(device, kMaxDevices - 1);  // devices beyond are like the last one that is known
  std::call_once(once[place],
                 [&] { check(cudaGetDeviceProperties(&known[place], device), "cudaGetDeviceProperties"); });
  return known[place];
}

/// Shared memory with which no SM holds more of a launch's blocks than its share, where that is possible: blocks that
/// may start before the launch ahead has ended would gather on the SMs that are free first. Where the next launch's
/// share has room beside it, it is left that; and some is left for the blocks that combine the parts of split keys.
int spreading_smem_bytes(Template const& t, int64_t blocks, int device) {
  constexpr int64_t kCombining = 16 * 1024;
  cudaDeviceProp const& has = properties_of(device);
  int64_t const reserved = int64_t(has.reservedSharedMemPerBlock);
  int64_t const room = int64_t(has.sharedMemPerMultiprocessor) - kCombining;
  int64_t const share = (blocks + has.multiProcessorCount - 1) / has.multiProcessorCount;
  int64_t const held = 2 * share * (t.smem_bytes + reserved) <= room ? 2 * share : share;
  int64_t const bytes = (room / held - reserved) / 1024 * 1024;
  return std::max(t.smem_bytes, int(std::min(bytes, int64_t(has.sharedMemPerBlockOptin))));
}

/// Raises a kernel's shared-memory limit once per device. Setting it twice is harmless, so a race costs nothing.
void allow_shared_memory(int row, Template const& t, int device) {
  if (t.smem_bytes <= kDefaultSmemLimit && !t.config.overlaps()) return;
  static std::vector<std::array<std::atomic<bool>, kMaxDevices>> done(templates().size());
  bool const cached = device < kMaxDevices;
  if (cached && done[row][device].load(std::memory_order_acquire)) return;
  int const bytes = t.config.overlaps() ? int(properties_of(device).sharedMemPerBlockOptin) : t.smem_bytes;
  check(cudaFuncSetAttribute(t.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        std::string("raising the shared memory limit of ") + t.name + " to " + std::to_string(bytes) + " bytes");
  if (cached) done[row][device].store(true, std::memory_order_release);
}

void check_grid(Template const& t, int64_t blocks) {
  if (blocks <= INT_MAX) return;
  throw std::invalid_argument(std::string(t.name) + " needs " + std::to_string(blocks) +
                              " thread blocks for this problem; a grid holds at most 2147483647");
}

/// `params`: KernelParams of the row.
void launch(Template const& t, int64_t blocks, void const* params, int device, cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(params)};
  dim3 const grid(static_cast<unsigned>(blocks)), threads(t.config.threads());
  int const smem_bytes = t.config.overlaps() ? spreading_smem_bytes(t, blocks, device) : t.smem_bytes;
  cudaError_t const status = t.config.overlaps()
                                 ? launch_dependent(t.kernel, grid, threads, arguments, smem_bytes, stream)
                                 : cudaLaunchKernel(t.kernel, grid, threads, arguments, smem_bytes, stream);
  check(status, std::string("launching ") + t.name + " on device " + std::to_string(device));
}

}  // namespace

std::vector<Template> const& templates() {
  static std::vector<Template> const rows = [] {
    std::vector<Template> all;
    append_all(all);
#if CUTLASS_FMHA_EMULATION
    for (Template& t : all) {
      if (t.config.arch != 90) t.smem_bytes = emulated_smem_bytes(t.smem_bytes, t.config.threads() / 32);
    }
#endif
    return all;
  }();
  return rows;
}

void launch_forward(int row, ForwardParams params, Tail const& tail, int device, cudaStream_t stream) {
  Template const& t = templates().at(row);
  if (t.config.general)
    throw std::invalid_argument(std::string(t.name) + " is a general row: run_general() launches it");
  int64_t const blocks = grid_size(params, t.config.tile_m) + int64_t(tail.tiles) * std::max(0, tail.parts - 1);
  if (blocks == 0) return;
  check_grid(t, blocks);
  DeviceGuard guard(device);
  allow_shared_memory(row, t, device);
  params.order = tile_order(params, t.config, gpu_of(device));
  if (t.config.copy == Copy::tma) {
    ForwardTmaParams prepared(params);
    prepared.tail = tail;
    set_schedule(prepared, t.config.tile_m);
    set_tensor_maps(prepared, t.config);
    launch(t, blocks, &prepared, device, stream);
    if (tail.tiles > 0) {
      launch_merge_tail({tail, params.o, params.lse, params.o_stride, params.seqlen_q, params.num_heads,
                         t.config.head_dim, t.config.tile_m, params.scale_log2},
                        element_of(t.config.dtype), t.config.arch, device, stream);
    }
  } else {
    launch(t, blocks, &params, device, stream);
  }
}

void launch_general(int row, GeneralParams params, int device, cudaStream_t stream) {
  Template const& t = templates().at(row);
  if (!t.config.general) throw std::invalid_argument(std::string(t.name) + " is no general row: run() launches it");
  int64_t const blocks = grid_size(params, t.config.tile_m);
  if (blocks == 0) return;
  check_grid(t, blocks);
  DeviceGuard guard(device);
  allow_shared_memory(row, t, device);
  params.order = tile_order(params, t.config.tile_m, t.config.warps, 2, gpu_of(device));
  launch(t, blocks, &params, device, stream);
  if (params.splits > 1) {
    launch_combine(make_combine(params), element_of(t.config.dtype), t.config.arch, device, stream);
  }
}

}  // namespace cutlass_fmha
