#include "launch.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <initializer_list>

#include "../helpers/vectors.h"

namespace cutlass_fmha {
namespace {

/// Vectors of a tensor from which on a thread takes several of them: fewer threads fill a GPU then, and more bytes are
/// on their way. Below, a launch is as fast as its slowest thread.
constexpr int64_t kMany = 1 << 18;

/// A tensor of a launch, whose strides become those that count.
struct Tensor {
  void const* address;
  Strides& stride;
  int bytes;  ///< of an element
};

/// Sets what all launches on rows want; whether every tensor that is there has rows of whole, aligned vectors.
bool prepare(RowsParams& p, std::initializer_list<Tensor> tensors) {
  p.rows = int(p.count());
  p.by_middle = Divisor(int(p.sizes[1]));
  p.by_inner = Divisor(int(p.sizes[2]));
  bool vectors = true;
  for (Tensor const& x : tensors) {
    if (!x.address) continue;
    x.stride = used(x.stride, p.sizes[0], p.sizes[1], p.sizes[2]);
    vectors = vectors && is_aligned(x.address, x.stride, p.dim, x.bytes);
  }
  return vectors;
}

int log2_up(int64_t n) { return int(std::bit_width(uint64_t(std::max<int64_t>(n, 1) - 1))); }

/// How lanes share rows of p.dim elements: 2^lanes_log2 of them, each with `vectors` of 16 bytes, where that is
/// possible, otherwise the whole block. `most`: vectors of a lane.
template <class Params>
void share(Params& p, bool aligned, int bytes, int threads, int most) {
  int const chunks = ceil_div(p.dim, kVectorBytes / bytes), block_log2 = log2_up(threads);
  bool const many = int64_t(p.rows) * chunks >= kMany;
  p.lanes_log2 = std::min(block_log2, log2_up(many ? ceil_div(chunks, std::min(most, 4)) : chunks));
  p.vectors = 1 << log2_up(ceil_div(chunks, 1 << p.lanes_log2));
  p.walk = !aligned ? Walk::elements : p.vectors <= most ? Walk::kept : Walk::vectors;
  if (p.walk == Walk::elements) p.lanes_log2 = std::min(block_log2, log2_up(p.dim));
  p.per_dim = 1.f / float(p.dim);
}

/// Blocks of `threads` for rows that 2^lanes_log2 lanes share.
int64_t blocks_of(int64_t rows, int lanes_log2, int threads) { return ((rows << lanes_log2) + threads - 1) / threads; }

template <class Params>
void prepare_gated(Params& p, bool aligned, int bytes) {
  p.aligned = aligned;
  p.chunks = aligned ? p.dim / (kVectorBytes / bytes) : p.dim;
  require(int64_t(p.rows) * p.chunks <= INT_MAX - 4096, [&] {
    return "gated units have " + std::to_string(p.rows) + " rows of " + std::to_string(p.dim) +
           " elements; at most 2147479551 vectors of 16 bytes can be multiplied, or elements where a tensor isn't " +
           "aligned to 16 bytes";
  });
  p.many = !aligned || int64_t(p.rows) * p.chunks >= kMany;
  p.by_chunks = Divisor(p.chunks);
}

template <class Params>
dim3 grid_of_gated(Params const& p) {
  int const each = kHelperThreads * (p.many ? Params::kVectors : 1);
  return dim3(unsigned((int64_t(p.rows) * p.chunks + each - 1) / each));
}

}  // namespace

void launch(Row const& row, RmsNormParams const& params, int device, cudaStream_t stream) {
  RmsNormParams p = params;
  int const bytes = bytes_of(row.dtype()), factor_bytes = bytes_of(p.weight_type);
  bool const vectors = prepare(p, {{p.x, p.x_stride, bytes},
                                   {p.residual, p.residual_stride, bytes},
                                   {p.sum, p.sum_stride, bytes},
                                   {p.out, p.out_stride, bytes_of(p.out_type)}}) &&
                       aligned(p.weight) && aligned(p.bias) && int64_t(p.dim) * factor_bytes % kVectorBytes == 0;
  share(p, vectors, bytes, kHelperThreads, RmsNormParams::kMaxVectors);
  launch_kernel(row, dim3(unsigned(blocks_of(p.rows, p.lanes_log2, kHelperThreads))), &p, device, stream);
}

void launch(Row const& row, RmsNormBackwardParams const& params, int device, cudaStream_t stream) {
  constexpr int kThreads = RmsNormBackwardParams::kThreads;
  RmsNormBackwardParams p = params;
  int const bytes = bytes_of(row.dtype());
  bool const vectors = prepare(p, {{p.x, p.x_stride, bytes},
                                   {p.dout, p.dout_stride, bytes_of(p.out_type)},
                                   {p.dsum, p.dsum_stride, bytes},
                                   {p.dx, p.dx_stride, bytes}}) &&
                       aligned(p.weight) && int64_t(p.dim) * bytes_of(p.weight_type) % kVectorBytes == 0;
  // Weights of another type leave registers for one vector, and gradients of another for none.
  bool const same_weight = p.weight_type == row.dtype(), same_out = p.out_type == row.dtype();
  share(p, vectors, bytes, kThreads, same_weight ? RmsNormBackwardParams::kMaxVectors : 1);
  if (p.walk == Walk::kept && !same_out) p.walk = Walk::vectors;
  bool const sums = p.dweight && p.walk == Walk::kept;
  int64_t const blocks = blocks_of(p.rows, p.lanes_log2, kThreads);
  p.parts = int(std::min<int64_t>(p.parts, sums ? blocks : p.rows));
  launch_kernel(row, dim3(unsigned(sums ? p.parts : blocks)), &p, device, stream);
  if (!p.dweight) return;

  auto const next = [&](Family family, dim3 grid) {
    launch_kernel(helper(family, row.dtype(), row.arch()), grid, &p, device, stream);
  };
  if (!sums) {
    int const columns = kHelperThreads * (p.walk == Walk::elements ? 1 : kVectorBytes / bytes);
    next(Family::rms_norm_columns, dim3(unsigned(ceil_div(p.dim, columns)), unsigned(p.parts)));
  }
  next(Family::rms_norm_weights, dim3(unsigned(ceil_div(p.dim, RmsNormBackwardParams::kColumns))));
}

void launch(Row const& row, GatedParams const& params, int device, cudaStream_t stream) {
  GatedParams p = params;
  int const bytes = bytes_of(row.dtype());
  bool const vectors =
      prepare(p, {{p.gate, p.gate_stride, bytes}, {p.up, p.up_stride, bytes}, {p.out, p.out_stride, bytes}});
  prepare_gated(p, vectors, bytes);
  launch_kernel(row, grid_of_gated(p), &p, device, stream);
}

void launch(Row const& row, GatedBackwardParams const& params, int device, cudaStream_t stream) {
  GatedBackwardParams p = params;
  int const bytes = bytes_of(row.dtype());
  bool const vectors = prepare(p, {{p.gate, p.gate_stride, bytes},
                                   {p.up, p.up_stride, bytes},
                                   {p.out, p.out_stride, bytes},
                                   {p.dout, p.dout_stride, bytes},
                                   {p.dgate, p.dgate_stride, bytes},
                                   {p.dup, p.dup_stride, bytes}});
  prepare_gated(p, vectors, bytes);
  launch_kernel(row, grid_of_gated(p), &p, device, stream);
}

}  // namespace cutlass_fmha
