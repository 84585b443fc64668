#include "launch.h"

#include <algorithm>

#include "vectors.h"

namespace cutlass_fmha {
namespace {

constexpr int kBlockLanesLog2 = 7;  // a whole block
static_assert(1 << kBlockLanesLog2 == kHelperThreads);

/// Sets what launch_rotary() sets; the rows that are to be rotated.
int64_t prepare(RotaryParams& p, DType dtype) {
  if (p.empty()) return 0;
  int const bytes = bytes_of(dtype);
  p.x_stride = used(p.x_stride, p.batch, p.seqlen, p.num_heads);
  p.out_stride = used(p.out_stride, p.batch, p.seqlen, p.num_heads);
  p.vectors = is_aligned(p.x, p.x_stride, p.head_dim, bytes) && is_aligned(p.out, p.out_stride, p.head_dim, bytes) &&
              is_aligned(p.rotary, bytes);
  p.lanes_log2 = lanes_log2(p.head_dim, p.vectors, bytes);
  p.by_seqlen = Divisor(p.seqlen);
  p.by_num_heads = Divisor(p.num_heads);
  return int64_t(p.batch) * p.seqlen * p.num_heads;
}

}  // namespace

CombineParams make_combine(FeatureParams const& g) {
  CombineParams p{};
  p.partial_o = g.partial_o;
  p.partial_lse = g.partial_lse;
  p.partial_low = g.partial_low;
  p.o = g.o;
  p.lse = g.lse;
  p.lse_batch_stride = g.lse_batch_stride;
  p.lse_head_stride = g.lse_head_stride;
  p.lse_rows = g.lse_rows;
  p.o_stride = g.o_stride;
  p.batch = g.batch;
  p.seqlen_q = g.seqlen_q;
  p.num_heads = g.num_heads;
  p.head_dim_v = p.partial_dim = g.head_dim_v;
  p.splits = g.splits;
  if (g.cu_seqlens_q) {  // packed sequences: one of total_q tokens
    p.batch = 1;
    p.seqlen_q = g.num_heads > 0 ? int(g.lse_rows / g.num_heads) : 0;
  }
  return p;
}

void launch(Row const& row, CombineParams const& params, int device, cudaStream_t stream) {
  CombineParams p = params;
  int64_t const rows = int64_t(p.batch) * p.seqlen_q * p.num_heads;
  p.partial_dim = std::max(p.partial_dim, p.head_dim_v);
  p.o_stride = used(p.o_stride, p.batch, p.seqlen_q, p.num_heads);
  p.vectors = aligned(p.partial_o) && is_aligned(p.o, p.o_stride, p.head_dim_v, bytes_of(row.dtype()));
  p.by_seqlen_q = Divisor(p.seqlen_q);
  p.by_num_heads = Divisor(p.num_heads);
  launch_kernel(row, grid_of(rows, kBlockLanesLog2), &p, device, stream);
}

void launch(Row const& row, TailParams const& p, int device, cudaStream_t stream) {
  int64_t const items = int64_t(p.tail.tiles) * p.tile_m * (p.head_dim / 4);
  dim3 const grid(unsigned((items + kHelperThreads - 1) / kHelperThreads));
  launch_kernel(row, grid, &p, device, stream);
}

void launch(Row const& row, MergeParams const& params, int device, cudaStream_t stream) {
  MergeParams p = params;
  int64_t const rows = int64_t(p.batch) * p.seqlen_q * p.num_heads;
  int const bytes = bytes_of(row.dtype());
  p.o_a_stride = used(p.o_a_stride, p.batch, p.seqlen_q, p.num_heads);
  p.o_b_stride = used(p.o_b_stride, p.batch, p.seqlen_q, p.num_heads);
  p.o_stride = used(p.o_stride, p.batch, p.seqlen_q, p.num_heads);
  p.vectors = is_aligned(p.o_a, p.o_a_stride, p.head_dim_v, bytes) &&
              is_aligned(p.o_b, p.o_b_stride, p.head_dim_v, bytes) && is_aligned(p.o, p.o_stride, p.head_dim_v, bytes);
  p.lanes_log2 = lanes_log2(p.head_dim_v, p.vectors, bytes);
  p.by_seqlen_q = Divisor(p.seqlen_q);
  p.by_num_heads = Divisor(p.num_heads);
  launch_kernel(row, grid_of(rows, p.lanes_log2), &p, device, stream);
}

void launch(Row const& row, AppendParams const& params, int device, cudaStream_t stream) {
  AppendParams p = params;
  if (p.no_keys()) return launch(helper(Family::rotary, row.dtype(), row.arch()), p.query, device, stream);
  int64_t const rows = int64_t(p.batch) * p.seqlen_new * p.num_heads_kv;
  int const bytes = bytes_of(row.dtype()), rows_of_entry = p.page_table ? p.page_size : p.capacity;
  p.k_stride = used(p.k_stride, p.batch, p.seqlen_new, p.num_heads_kv);
  p.v_stride = used(p.v_stride, p.batch, p.seqlen_new, p.num_heads_kv);
  p.k_cache_stride = used(p.k_cache_stride, p.entries, rows_of_entry, p.num_heads_kv);
  p.v_cache_stride = used(p.v_cache_stride, p.entries, rows_of_entry, p.num_heads_kv);
  p.vectors = is_aligned(p.k, p.k_stride, p.head_dim, bytes) && is_aligned(p.v, p.v_stride, p.head_dim_v, bytes) &&
              is_aligned(p.k_cache, p.k_cache_stride, p.head_dim, bytes) &&
              is_aligned(p.v_cache, p.v_cache_stride, p.head_dim_v, bytes) && is_aligned(p.rotary, bytes);
  p.lanes_log2 = lanes_log2(std::max(p.head_dim, p.head_dim_v), p.vectors, bytes);
  if (!p.cu_seqlens) p.sequences = p.batch;
  p.by_seqlen_new = Divisor(p.seqlen_new);
  p.by_num_heads_kv = Divisor(p.num_heads_kv);
  p.by_page_size = Divisor(p.page_table ? p.page_size : 1);
  dim3 grid = grid_of(rows, p.lanes_log2);
  int64_t const query_rows = prepare(p.query, row.dtype());
  grid.x = std::max(grid.x, grid_of(p.sequences, 0).x);
  if (query_rows > 0) grid.x = std::max(grid.x, grid_of(query_rows, p.query.lanes_log2).x);
  grid.y = query_rows > 0 ? 3 : 2;  // keys, values, queries
  launch_kernel(row, grid, &p, device, stream);
}

void launch(Row const& row, RotaryParams const& params, int device, cudaStream_t stream) {
  RotaryParams p = params;
  int64_t const rows = prepare(p, row.dtype());
  launch_kernel(row, grid_of(rows, p.lanes_log2), &p, device, stream);
}

}  // namespace cutlass_fmha
