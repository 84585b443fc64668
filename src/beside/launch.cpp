#include "launch.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <initializer_list>

#include "../helpers/vectors.h"

namespace cutlass_fmha {
namespace {

/// Vectors of a tensor from which on a lane has several: fewer threads have more bytes on their way then. Below, a
/// launch is as fast as its slowest thread.
constexpr int64_t kMany = 1 << 18;

/// A tensor of a launch, whose strides become those that count.
struct Tensor {
  void const* address;
  Strides& stride;
  int bytes;  ///< of an element
};

/// How far it is from each row to the next, where all leading dimensions are as one: into the last stride.
bool flatten(Strides& s, int64_t const (&sizes)[3]) {
  int64_t const strides[] = {s.batch, s.seqlen, s.head};
  int64_t step = 0, count = 1;
  for (int n = 2; n >= 0; --n) {
    if (sizes[n] == 1) continue;
    if (count == 1) step = strides[n];
    if (strides[n] != step * count) return false;
    count *= sizes[n];
  }
  s = {0, 0, step};
  return true;
}

/// Sets what all launches on rows want; whether every tensor that is there has rows of whole, aligned vectors.
bool prepare(RowsParams& p, std::initializer_list<Tensor> tensors) {
  p.rows = int(p.count());
  p.by_middle = Divisor(int(p.sizes[1]));
  p.by_inner = Divisor(int(p.sizes[2]));
  bool vectors = true;
  p.flat = true;
  for (Tensor const& x : tensors) {
    if (!x.address) continue;
    x.stride = used(x.stride, p.sizes[0], p.sizes[1], p.sizes[2]);
    vectors = vectors && is_aligned(x.address, x.stride, p.dim, x.bytes);
    Strides alone = x.stride;
    p.flat = p.flat && flatten(alone, p.sizes);
  }
  for (Tensor const& x : tensors) {
    if (p.flat) flatten(x.stride, p.sizes);
  }
  return vectors;
}

int log2_up(int64_t n) { return int(std::bit_width(uint64_t(std::max<int64_t>(n, 1) - 1))); }

/// How lanes share rows of p.dim elements: 2^lanes_log2 of them, `threads` at most, with up to `vectors` of 16 bytes
/// each where that is enough.
template <class Params>
void share(Params& p, bool aligned, int bytes, int threads, int vectors) {
  int const chunks = ceil_div(p.dim, kVectorBytes / bytes);
  p.lanes_log2 = std::min(log2_up(threads), log2_up(aligned ? ceil_div(chunks, vectors) : p.dim));
  p.per_dim = 1.f / float(p.dim);
  p.walk = !aligned ? Walk::elements : chunks <= vectors << p.lanes_log2 ? Walk::kept : Walk::vectors;
}

/// Sets how many of its `turns`, of `vectors` each, a thread asks for ahead. Returns the shared memory that a block of
/// `threads` has for them.
int ask_ahead(RmsNormBackwardParams& p, Row const& row, int threads, int vectors, int64_t turns) {
  int const room = row.smem_bytes / row.threads() / kVectorBytes;
  p.stages = int(std::clamp<int64_t>(room / vectors, 1, std::max<int64_t>(turns, 1)));
  return p.stages * vectors * threads * kVectorBytes;
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
  p.by_chunks = Divisor(p.chunks);
}

/// Blocks as small as leave each an SM of its own: a few vectors are bound by what becomes of one.
template <class Params>
void launch_gated(Row const& row, Params& p, int device, cudaStream_t stream) {
  constexpr int kFewest = 64;
  int const each = p.aligned ? Params::kVectors : Params::kElements;
  int64_t const wanted = (int64_t(p.rows) * p.chunks + each - 1) / each;
  int threads = kFewest;
  while (threads < row.threads() && wanted > int64_t(gpu_of(device).sms) * threads) threads *= 2;
  dim3 const grid(unsigned((wanted + threads - 1) / threads));
  set_places(p, grid.x, threads, device);
  launch_kernel(row, grid, &p, device, stream, threads);
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
  int const chunks = ceil_div(p.dim, kVectorBytes / bytes);
  p.many = int64_t(p.rows) * chunks >= kMany || chunks > row.threads();
  share(p, vectors, bytes, row.threads(), p.many ? RmsNormParams::kVectors : 1);
  int const threads = std::max(kHelperThreads, 1 << p.lanes_log2);
  dim3 const grid(unsigned(blocks_of(p.rows, p.lanes_log2, threads)));
  set_places(p, grid.x, threads, device);
  launch_kernel(row, grid, &p, device, stream, threads);
}

void launch(Row const& row, RmsNormBackwardParams const& params, int device, cudaStream_t stream) {
  RmsNormBackwardParams p = params;
  int const bytes = bytes_of(row.dtype());
  bool const vectors = prepare(p, {{p.x, p.x_stride, bytes},
                                   {p.dout, p.dout_stride, bytes_of(p.out_type)},
                                   {p.dsum, p.dsum_stride, bytes},
                                   {p.dx, p.dx_stride, bytes}}) &&
                       aligned(p.weight) && int64_t(p.dim) * bytes_of(p.weight_type) % kVectorBytes == 0;
  constexpr int kVectors = RmsNormBackwardParams::kVectors;
  share(p, vectors, bytes, row.threads(), kVectors);
  if (p.walk == Walk::kept && p.out_type != row.dtype()) p.walk = Walk::vectors;  // no registers for its gradients
  bool const kept = p.walk == Walk::kept;
  int const resident = std::max(1, p.parts);
  int const of_columns =
      p.walk == Walk::elements ? RmsNormBackwardParams::kColumns : RmsNormBackwardParams::kColumnsBeside;
  int const beside = ceil_div(p.dim, of_columns);  // all of which run at once, or a second launch sums
  // Of few rows, blocks are no larger than one needs: warps take turns in issuing instructions, those without a row
  // too. A lane has a vector of a row, if the row is no longer.
  bool const few = kept && p.rows + beside <= resident;
  int const chunks = ceil_div(p.dim, kVectorBytes / bytes);
  if (few && (1 << p.lanes_log2) < std::min(chunks, row.threads())) ++p.lanes_log2;
  int const threads = few ? std::max(RmsNormBackwardParams::kColumnsBeside, 1 << p.lanes_log2) : row.threads();
  int64_t const blocks = blocks_of(p.rows, p.lanes_log2, threads);
  bool const sums = p.dweight && kept && blocks + beside > resident;
  int64_t const turns = kept ? (blocks + resident - 1) / resident : 1;
  p.row_blocks = int((blocks + turns - 1) / turns);  // as few as need no more turns: none is left for a few alone
  p.parts = sums ? p.row_blocks : 0;
  int64_t const grid = int64_t(p.row_blocks) + (p.dweight && !sums ? beside : 0);
  require(grid <= INT_MAX, [] { return "rms_norm_backward takes fewer rows"; });
  p.once = few && chunks <= 1 << p.lanes_log2;
  int const smem_bytes = kept && !p.once ? ask_ahead(p, row, threads, kVectors * (p.dsum ? 3 : 2), turns) : 0;
  set_places(p, unsigned(grid), threads, device);
  launch_kernel(row, dim3(unsigned(grid)), &p, device, stream, threads, smem_bytes);
  if (!sums) return;
  launch_kernel(helper(Family::rms_norm_weights, row.dtype(), row.arch()),
                dim3(unsigned(ceil_div(p.dim, RmsNormBackwardParams::kColumns))), &p, device, stream);
}

void launch(Row const& row, GatedParams const& params, int device, cudaStream_t stream) {
  GatedParams p = params;
  int const bytes = bytes_of(row.dtype());
  bool const vectors =
      prepare(p, {{p.gate, p.gate_stride, bytes}, {p.up, p.up_stride, bytes}, {p.out, p.out_stride, bytes}});
  prepare_gated(p, vectors, bytes);
  launch_gated(row, p, device, stream);
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
  launch_gated(row, p, device, stream);
}

}  // namespace cutlass_fmha
