#include "registry.h"

#include <cuda.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "forward/scheduler.h"
#include "registry_groups.h"  // generated: append_all

namespace cutlass_fmha {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kDefaultSmemLimit = 48 * 1024;  // more must be asked for, per kernel and device

void check(cudaError_t status, std::string const& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // leave no error behind for the next caller
  throw std::runtime_error(what + " failed: " + cudaGetErrorString(status));
}

/// The driver's calls about contexts, found through the runtime: nothing is linked against libcuda.
struct Driver {
  CUresult (*get_current)(CUcontext*) = entry<decltype(get_current)>("cuCtxGetCurrent");
  CUresult (*set_current)(CUcontext) = entry<decltype(set_current)>("cuCtxSetCurrent");
  CUresult (*current_device)(CUdevice*) = entry<decltype(current_device)>("cuCtxGetDevice");
  CUresult (*retain_primary)(CUcontext*, CUdevice) = entry<decltype(retain_primary)>("cuDevicePrimaryCtxRetain");

  template <class Function>
  static Function entry(char const* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Function>(function);
  }
  static Driver const& get() {
    static Driver const driver;
    return driver;
  }
};

/// Makes `device` current for a scope, and leaves the thread's context as it was found. By contexts, not with
/// cudaSetDevice: torch has a runtime of its own, whose idea of the current device ours neither knows nor may change.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    Driver const& driver = Driver::get();
    CUdevice current = -1;
    require(driver.get_current(&previous_), "cuCtxGetCurrent");
    if (previous_ != nullptr && driver.current_device(&current) == CUDA_SUCCESS && current == device) return;
    CUcontext primary = nullptr;
    require(driver.retain_primary(&primary, device), "cuDevicePrimaryCtxRetain");  // as long as the process lives
    require(driver.set_current(primary), "cuCtxSetCurrent");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) Driver::get().set_current(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  static void require(CUresult status, char const* what) {
    if (status != CUDA_SUCCESS) {
      throw std::runtime_error(std::string(what) + " failed with error " + std::to_string(status));
    }
  }

  CUcontext previous_ = nullptr;
  bool changed_ = false;
};

/// Raises a kernel's shared-memory limit once per device. Setting it twice is harmless, so a race costs nothing.
void allow_shared_memory(int row, Template const& t, int device) {
  if (t.smem_bytes <= kDefaultSmemLimit) return;
  static std::vector<std::array<std::atomic<bool>, kMaxDevices>> done(templates().size());
  bool const cached = device < kMaxDevices;
  if (cached && done[row][device].load(std::memory_order_acquire)) return;
  check(cudaFuncSetAttribute(reinterpret_cast<void const*>(t.kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             t.smem_bytes),
        std::string("raising the shared memory limit of ") + t.name + " to " + std::to_string(t.smem_bytes) + " bytes");
  if (cached) done[row][device].store(true, std::memory_order_release);
}

}  // namespace

std::vector<Template> const& templates() {
  static std::vector<Template> const rows = [] {
    std::vector<Template> all;
    append_all(all);
    return all;
  }();
  return rows;
}

void launch_forward(int row, ForwardParams const& params, int device, cudaStream_t stream) {
  Template const& t = templates().at(row);
  int64_t const blocks = grid_size(params, t.config.tile_m);
  if (blocks == 0) return;
  if (blocks > INT_MAX) {
    throw std::invalid_argument(std::string(t.name) + " needs " + std::to_string(blocks) +
                                " thread blocks for this problem; a grid holds at most 2147483647");
  }
  DeviceGuard guard(device);
  allow_shared_memory(row, t, device);
  void* arguments[] = {const_cast<ForwardParams*>(&params)};
  check(cudaLaunchKernel(reinterpret_cast<void const*>(t.kernel), dim3(static_cast<unsigned>(blocks)),
                         dim3(t.config.threads()), arguments, t.smem_bytes, stream),
        std::string("launching ") + t.name + " on device " + std::to_string(device));
}

}  // namespace cutlass_fmha
