// Launching a backward.
#pragma once

#include "../table.h"
#include "params.h"

namespace cutlass_fmha {

/// Throws std::invalid_argument for what the row can't take: a kernel believes what it is given.
void check(Row const& row, BackwardParams const& p);

/// Launches a row that check() passes, with what stands before and after it, on `device`, which is current, and its
/// stream `stream`. Allocates nothing, never synchronises. Throws std::runtime_error, and std::invalid_argument for
/// more tiles than a grid holds.
void launch(Row const& row, BackwardParams const& p, int device, cudaStream_t stream);

/// The first of a backward's launches, for a row with such tiles; p has its workspace.
void launch_before(TileConfig const& c, BackwardParams const& p, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
