// How the copy unit (TMA) sees Q, K, V and O: descriptors made on the host and passed to the kernel by value, so that a
// captured launch keeps its own.
#pragma once

#include "backward/config.h"
#include "backward/params.h"
#include "config.h"
#include "features/params.h"

namespace cutlass_fmha {

/// Fills the maps of a row that copies by TMA: boxes of config.tile_m rows of Q, config.tile_n rows of K and V, and the
/// rows of a warp of O. Descriptors are kept per thread and found again by what they describe. Throws
/// std::runtime_error when the driver refuses one.
void set_tensor_maps(ForwardTmaParams& params, ForwardConfig const& config);

/// The same of a row with features: boxes of K and V, of a tile's rows, or of so many as follow each other in pages.
void set_tensor_maps(FeatureTmaParams& params, ForwardConfig const& config);

/// The same of a backward: boxes of a tile of Q, and of the rows of dO that are asked for at once.
void set_tensor_maps(BackwardTmaParams& params, BackwardConfig const& config);

}  // namespace cutlass_fmha
