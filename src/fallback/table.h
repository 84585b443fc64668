// The table of fallback rows, and how one is launched.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "../general/params.h"
#include "config.h"

namespace cutlass_fmha {

struct FallbackTemplate {
  char const* name;  ///< also the kernel's symbol
  FallbackConfig config;
  int smem_bytes;      ///< dynamic shared memory of a launch
  void const* kernel;  ///< takes GeneralParams
};

/// Every fallback row of this build, in the manifest's order. A row's number is its index here.
std::vector<FallbackTemplate> const& fallback_templates();

/// Launches a row on `device`'s stream `stream`. Allocates nothing, never synchronises. Throws std::runtime_error.
void launch_fallback(int row, GeneralParams params, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
