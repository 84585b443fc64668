// Launching the kernels of rope.cuh.
#pragma once

#include "../helpers/launch.h"
#include "rope_params.h"

namespace cutlass_fmha {

constexpr Family family_of(RopeParams const&) { return Family::rope; }
constexpr Family family_of(RopeBackwardParams const&) { return Family::rope_backward; }

/// As those of helpers/launch.h.
void launch(Row const& row, RopeParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, RopeBackwardParams const& params, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
