#include "launch.h"

#include "../launch.h"
#include "tile.h"

namespace cutlass_fmha {

void check_backward_wide(Row const& row, BackwardParams const& p) {
  refuse(row, {{"block_counts", p.block_counts != nullptr},
               {"window_left", p.window_left >= 0},
               {"prefix_lengths", p.prefix_lengths != nullptr},
               {"softcap", p.softcap != 0.f},
               {"alibi_slopes", p.alibi_slopes != nullptr},
               {"sinks", p.sinks != nullptr},
               {"dropout_threshold", p.dropout_threshold != 0}});
}

void launch_backward_wide(Row const& row, BackwardParams const& params, int device, cudaStream_t stream) {
  auto const& c = std::get<WideBackwardConfig>(row.config);
  BackwardParams p = params;
  p.tile_m = c.tile_m;
  p.head_tiles = workspace_tiles(p, c.tile_m);
  p.row_terms = p.workspace;
  p.row_dim = 0;  // the workspace has no sums of dQ
  p.turns = nullptr;
  if (p.seqlen_q > 0) {
    BackwardParams terms = p;
    terms.dq = nullptr;
    Row const& before = helper(Family::backward_before, c.dtype, c.arch);
    int64_t const tiles = int64_t(p.batch) * p.num_heads * ceil_div(p.seqlen_q, c.tile_m);
    launch_kernel(before, grid_of(before, tiles), &terms, device, stream);
  }
  int64_t const blocks = wide_blocks(p, GradientOf::key, c.tile_m) + wide_blocks(p, GradientOf::value, c.tile_m) +
                         wide_blocks(p, GradientOf::query, c.tile_m);
  if (blocks > 0) launch_kernel(row, grid_of(row, blocks), &p, device, stream);
}

}  // namespace cutlass_fmha
