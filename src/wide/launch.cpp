#include <climits>
#include <string>

#include "../core/visibility.h"
#include "../device_guard.h"
#include "../features/sequence.h"
#include "../launch.h"
#include "../require.h"

namespace cutlass_fmha {
namespace {

/// Bytes that something must be a multiple of, or an exception that names it.
void require_multiple(Row const& row, char const* what, uint64_t value, int bytes) {
  require(value % bytes == 0, [&] {
    return std::string(row.name) + " needs " + what + " to be a multiple of " + std::to_string(bytes) + " bytes";
  });
}

void check_alignment(Row const& row, WideConfig const& c, FeatureParams const& p) {
  constexpr int kVector = 16;
  for (Operand const& x : operands(p)) {
    uint64_t const strides = (x.stride.batch | x.stride.seqlen | x.stride.head) * c.element_bytes();
    require_multiple(row, x.name, reinterpret_cast<uintptr_t>(x.address) | strides, c.alignment());
  }
  require_multiple(row, "head_dim and head_dim_v", uint64_t(p.head_dim | p.head_dim_v) * c.element_bytes(),
                   c.alignment());
  // A bias is read in vectors whatever the row: its rows are whole ones, and keys are its last dimension.
  ScoreStrides const& s = p.bias_stride;
  require(!p.bias || p.seqlen_k <= 1 || s.key == 1, [] { return "bias must be contiguous in its last dimension"; });
  if (p.bias) {
    uint64_t const strides = (s.batch | s.head | s.query) * c.element_bytes();
    require_multiple(row, "bias", reinterpret_cast<uintptr_t>(p.bias) | strides, kVector);
  }
}

/// The example multiplies a row's number and its stride in 32 bits.
void check_offsets(Row const& row, WideConfig const& c, FeatureParams const& p) {
  auto const fits = [&](char const* name, int64_t rows, int64_t stride) {
    require(stride <= INT_MAX && rows * stride <= INT_MAX, [&] {
      return std::string(row.name) + ": its offsets are 32-bit, and " + name + " spans " + std::to_string(rows) +
             " rows with a stride of " + std::to_string(stride) + " elements";
    });
  };
  int64_t const keys = int64_t(p.seqlen_k) + c.tile_n;
  fits("k", keys, p.k_stride.seqlen);
  fits("v", keys, p.v_stride.seqlen);
  fits("q", 1, p.pack == 1 ? p.q_stride.seqlen : p.q_stride.head);
  fits("o", 1, p.pack == 1 ? p.o_stride.seqlen : p.o_stride.head);
  fits("o", p.num_heads, p.head_dim_v);
  if (p.bias) fits("bias", 1, p.pack == 1 ? p.bias_stride.query : p.bias_stride.head);
}

void check_sums(Row const& row, WideConfig const& c, AttentionParams const& p) {
  if (p.empty() || !c.accumulates() || p.partial_o) return;
  int64_t const step = p.pack == 1 ? p.o_stride.seqlen : p.o_stride.head;
  int64_t const rows = p.pack == 1 ? p.num_heads : 1;
  require(c.dtype == DType::float32 && step == rows * p.head_dim_v,
          [&] { return std::string(row.name) + " needs partial_o: float32, as many elements as o"; });
}

}  // namespace

void check_wide(Row const& row, AttentionParams const& p) {
  auto const& c = std::get<WideConfig>(row.config);
  refuse_features(row, p);
  bool const same = c.dtype == DType::float32 || p.bias_type == BiasType::same_as_q;
  require(!p.bias || same, [&] { return std::string(row.name) + " takes a bias of its own dtype only"; });
  require(p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim, [&] {
    return std::string(row.name) + " takes head dims from 1 to " + std::to_string(c.head_dim) + ", got " +
           std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v);
  });
  require(p.pack == 1 || p.seqlen_q <= 1, [&] {
    return std::string(row.name) + " takes packed heads with a seqlen_q of 1 only, got " + std::to_string(p.seqlen_q);
  });
  check_alignment(row, c, p);
  check_offsets(row, c, p);
  check_sums(row, c, p);
}

void check_wide_scored(Row const& row, AttentionParams const& p) {
  auto const& c = std::get<WideScoredConfig>(row.config);
  refuse(row, {{"mask_bits", p.mask_bits != nullptr}});
  require(all_vectors(p, c.element_bytes()), [&] {
    return std::string(row.name) + " needs addresses, strides and head dims that are multiples of 16 bytes";
  });
  require(p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim, [&] {
    return std::string(row.name) + " takes head dims from 1 to " + std::to_string(c.head_dim) + ", got " +
           std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v);
  });
  require(!p.block_counts || (p.block_m % c.tile_m == 0 && p.block_n % c.tile_n == 0), [&] {
    return std::string(row.name) + " takes blocks of a mask that are multiples of " + std::to_string(c.tile_m) + " x " +
           std::to_string(c.tile_n) + ", got " + std::to_string(p.block_m) + " x " + std::to_string(p.block_n);
  });
}

void launch_wide_scored(Row const& row, AttentionParams const& p, int device, cudaStream_t stream) {
  auto const& c = std::get<WideScoredConfig>(row.config);
  FeatureParams params = p;
  find_score_terms(params);
  if (params.block_counts) set_blocks(params, c.tile_n);
  dim3 const grid = grid_of(row, grid_size(params, c.tile_m));
  set_schedule(params, tile_order(params, c.tile_m, c.warps, c.element_bytes(), gpu_of(device)), c.tile_m);
  launch_kernel(row, grid, &params, device, stream);
  launch_combine(params, c.dtype, c.arch, device, stream);
}

void launch_wide(Row const& row, AttentionParams const& p, int device, cudaStream_t stream) {
  auto const& c = std::get<WideConfig>(row.config);
  FeatureParams params = p;
  dim3 const grid = grid_of(row, grid_size(params, c.tile_m));
  set_schedule(params, tile_order(params, c.tile_m, c.warps, c.element_bytes(), gpu_of(device)), c.tile_m);
  launch_kernel(row, grid, &params, device, stream);
}

}  // namespace cutlass_fmha
