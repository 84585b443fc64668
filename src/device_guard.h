// What every launch does around its kernel: CUDA's errors become exceptions, the tensors' device is current, and what
// the order of tiles depends on is known.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/scheduler.h"

namespace cutlass_fmha {

/// `what` is a function: a launch makes several checks, and must not pay for texts that nobody reads.
template <class What>
void check(cudaError_t status, What const& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // leave no error behind for the next caller
  throw std::runtime_error(std::string(what()) + " failed: " + cudaGetErrorString(status));
}

inline Gpu gpu_of(int device) {
  int sms = 0, l2_bytes = 0;
  auto const asked = [] { return "cudaDeviceGetAttribute"; };
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), asked);
  check(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device), asked);
  return {sms, l2_bytes};
}

/// Makes `device` current for a scope. The runtime's primary contexts are the ones torch uses.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), [] { return "cudaGetDevice"; });
    if (previous_ != device) {
      check(cudaSetDevice(device), [&] { return "cudaSetDevice(" + std::to_string(device) + ")"; });
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// Launches what check() passes, by the launch() of these parameters.
template <class Row, class Params>
void launch_checked(Row const& row, Params const& params, int device, cudaStream_t stream) {
  check(row, params);
  if (params.empty()) return;
  DeviceGuard guard(device);
  launch(row, params, device, stream);
}

}  // namespace cutlass_fmha
