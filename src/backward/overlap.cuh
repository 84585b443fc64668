// How the kernels of a backward overlap: core/dependent_launch.cuh.
#pragma once

#include "../core/dependents.cuh"

namespace cutlass_fmha {

/// For kernels of many blocks that begin with what the one ahead wrote: what is hidden is the launch.
__device__ __forceinline__ void meet_dependents() {
  wait_for_kernels_ahead();
  start_dependents();
}

}  // namespace cutlass_fmha
