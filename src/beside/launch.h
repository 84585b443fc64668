// Launching the kernels that normalise rows and multiply gated units.
#pragma once

#include "../helpers/launch.h"
#include "params.h"

namespace cutlass_fmha {

constexpr Family family_of(RmsNormParams const&) { return Family::rms_norm; }
constexpr Family family_of(RmsNormBackwardParams const&) { return Family::rms_norm_backward; }
constexpr Family family_of(GatedParams const&) { return Family::gated; }
constexpr Family family_of(GatedBackwardParams const&) { return Family::gated_backward; }

/// As those of helpers/launch.h. What sums the gradients of weights follows by itself.
void launch(Row const& row, RmsNormParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, RmsNormBackwardParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, GatedParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, GatedBackwardParams const& params, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
