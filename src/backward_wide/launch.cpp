#include "launch.h"

#include "../backward/launch.h"
#include "../launch.h"
#include "tile.h"

namespace cutlass_fmha {

void launch_backward_wide(Row const& row, BackwardParams const& params, int device, cudaStream_t stream) {
  auto const& c = std::get<WideBackwardConfig>(row.config);
  BackwardParams p = params;
  p.tile_m = p.unit = c.tile_m;
  p.tile_n = c.tile_n;
  p.head_tiles = workspace_tiles(p, c.tile_m);
  p.row_terms = p.workspace;
  p.sink_sums = p.row_terms + p.num_heads * p.head_tiles * kTermsOfQuery * c.tile_m;
  find_score_terms(p);
  if (p.dropout_threshold == 0) p.dropout_scale = 1.f;
  p.row_dim = 0;  // the workspace has no sums of dQ
  p.turns = nullptr;
  launch_before(c, p, device, stream);
  int64_t const blocks = wide_blocks(p, GradientOf::key, c.tile_m) + wide_blocks(p, GradientOf::value, c.tile_m) +
                         wide_blocks(p, GradientOf::query, c.tile_m);
  if (blocks > 0) launch_kernel(row, grid_of(row, blocks), &p, device, stream);
  if (p.dsinks == nullptr) return;
  p.dq = nullptr;  // is written
  launch_kernel(helper(Family::backward_after, c.dtype, c.arch), dim3(unsigned(p.num_heads)), &p, device, stream);
}

}  // namespace cutlass_fmha
