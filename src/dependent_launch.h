// Launches that overlap with what is ahead in their stream: the host's part of core/dependent_launch.cuh.
#pragma once

#include <cuda_runtime_api.h>

namespace cutlass_fmha {

/// Allows the kernel to start before what is ahead in the stream is complete; it waits by itself. Only for kernels made
/// for architectures that can (and never run through another one's PTX).
inline cudaError_t launch_dependent(void const* kernel, dim3 grid, dim3 threads, void** arguments, int smem_bytes,
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

}  // namespace cutlass_fmha
