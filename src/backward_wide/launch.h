// Launching rows of the family backward_wide: called by backward/launch.cpp.
#pragma once

#include "../backward/params.h"
#include "../table.h"

namespace cutlass_fmha {

void launch_backward_wide(Row const& row, BackwardParams const& p, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
