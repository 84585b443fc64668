// The table of compiled kernels. Generated instance files (instance.cu.in) define the rows; everything else, Python's
// selection included, reads this table and nothing else.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "config.h"
#include "general/params.h"
#include "params.h"

namespace cutlass_fmha {

struct Template {
  char const* name;  ///< also the kernel's symbol
  ForwardConfig config;
  int smem_bytes;      ///< dynamic shared memory of a launch
  void const* kernel;  ///< takes KernelParams<config>
};

/// Every row of this build, in the manifest's order. A row's number is its index here.
std::vector<Template> const& templates();

/// Launches a row on `device`'s stream `stream`. Allocates nothing, never synchronises. Throws std::runtime_error.
/// Where there is a tail, which rows that copy by TMA take, what merges its parts follows on the stream.
void launch_forward(int row, ForwardParams params, Tail const& tail, int device, cudaStream_t stream);

/// The same for a general row, which takes these. With splits, what is merged of them follows on the stream.
void launch_general(int row, GeneralParams params, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
