#include "registry.h"

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

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

/// Raises a kernel's shared-memory limit once per device. Setting it twice is harmless, so a race costs nothing.
void allow_shared_memory(int row, Template const& t, int device) {
  if (t.smem_bytes <= kDefaultSmemLimit) return;
  static std::vector<std::array<std::atomic<bool>, kMaxDevices>> done(templates().size());
  bool const cached = device < kMaxDevices;
  if (cached && done[row][device].load(std::memory_order_acquire)) return;
  check(cudaFuncSetAttribute(t.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, t.smem_bytes),
        std::string("raising the shared memory limit of ") + t.name + " to " + std::to_string(t.smem_bytes) + " bytes");
  if (cached) done[row][device].store(true, std::memory_order_release);
}

/// Allows the kernel to start before what is ahead in the stream is complete; it waits by itself: only for rows with
/// config.dependent_launch, which are made for architectures that can (and never run through another one's PTX).
cudaError_t launch_dependent(void const* kernel, dim3 grid, dim3 threads, void** arguments, int smem_bytes,
                             cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel, arguments);
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
  cudaError_t const status = t.config.dependent_launch
                                 ? launch_dependent(t.kernel, grid, threads, arguments, t.smem_bytes, stream)
                                 : cudaLaunchKernel(t.kernel, grid, threads, arguments, t.smem_bytes, stream);
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

void launch_forward(int row, ForwardParams const& params, int device, cudaStream_t stream) {
  Template const& t = templates().at(row);
  if (t.config.general)
    throw std::invalid_argument(std::string(t.name) + " is a general row: run_general() launches it");
  int64_t const blocks = grid_size(params, t.config.tile_m);
  if (blocks == 0) return;
  check_grid(t, blocks);
  DeviceGuard guard(device);
  allow_shared_memory(row, t, device);
  if (t.config.copy == Copy::tma) {
    ForwardTmaParams prepared(params);
    set_schedule(prepared, t.config.tile_m);
    set_tensor_maps(prepared, t.config);
    launch(t, blocks, &prepared, device, stream);
  } else {
    launch(t, blocks, &params, device, stream);
  }
}

void launch_general(int row, GeneralParams const& params, int device, cudaStream_t stream) {
  Template const& t = templates().at(row);
  if (!t.config.general) throw std::invalid_argument(std::string(t.name) + " is no general row: run() launches it");
  int64_t const blocks = grid_size(params, t.config.tile_m);
  if (blocks == 0) return;
  check_grid(t, blocks);
  DeviceGuard guard(device);
  allow_shared_memory(row, t, device);
  launch(t, blocks, &params, device, stream);
  if (params.splits > 1) {
    launch_combine(make_combine(params), element_of(t.config.dtype), t.config.arch, device, stream);
  }
}

}  // namespace cutlass_fmha
