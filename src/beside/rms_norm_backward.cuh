// Gradients of RMSNorm: those of x row by row; those of the weights as partial sums, and their sum.
#pragma once

#include "rows.cuh"

namespace cutlass_fmha {

struct RmsNormBackwardShared {
  static constexpr int kWarps = RmsNormBackwardParams::kThreads / 32;
  /// Rows that share a block are of half of its vectors at most.
  static constexpr int kColumns = RmsNormBackwardParams::kThreads * RmsNormBackwardParams::kVectors * 8 / 2;

  float sums[2][kWarps];                ///< by turns, so that one barrier a row is enough
  alignas(16) float columns[kColumns];  ///< where groups meet
};

/// Whole rows, up to `Vectors` vectors of each in a lane. A block goes from row to row, with weights and sums of
/// dweight in registers and the next rows on their way. Several vectors: what a row costs besides its elements is
/// shared.
template <class T, class W, int Vectors, bool Summed>
__device__ void norm_backward_ahead(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  using Floats = float[Vectors][kElements];
  Group const at(p.lanes_log2);
  int const first = at.lane * kElements, step = at.lanes * kElements;
  unsigned const turn = p.row_blocks * at.groups;
  unsigned row = blockIdx.x * at.groups + at.group, asked = row;
  wait_prefetching(p.rows > 0, p.early, [&] {
    for (unsigned number = row, n = 0; n < unsigned(p.stages) && number < unsigned(p.rows); ++n, number += turn) {
      auto const one = [&](void const* from, Strides const& s) {
        T const* const begin = static_cast<T const*>(from) + offset_of(p, int(number), s) + first;
#pragma unroll
        for (int i = 0; i < Vectors; ++i) {
          if (first + i * step < p.dim) prefetch_to_l2(begin + i * step);
        }
      };
      one(p.x, p.x_stride);
      one(p.dout, p.dout_stride);
      if constexpr (Summed) one(p.dsum, p.dsum_stride);
    }
  });
  Ahead<Vectors*(Summed ? 3 : 2)> ahead;
  auto const ask = [&](unsigned number) {
    if (number - at.group < unsigned(p.rows)) {  // the block's first row is there
      bool const there = number < unsigned(p.rows);
      int const row = there ? int(number) : 0, end = there ? p.dim : 0;
      auto const one = [&](int tensor, void const* from, Strides const& s) {
        T const* const begin = static_cast<T const*>(from) + offset_of(p, row, s) + first;
#pragma unroll
        for (int n = 0; n < Vectors; ++n) ahead.ask(tensor * Vectors + n, begin + n * step, first + n * step < end);
      };
      one(0, p.x, p.x_stride);
      one(1, p.dout, p.dout_stride);
      if constexpr (Summed) one(2, p.dsum, p.dsum_stride);
    }
    ahead.next(p.stages);
  };
  auto const rstd_of = [&](unsigned row) { return row < unsigned(p.rows) ? p.rstd[row] : 0.f; };
  for (int n = 0; n < p.stages; ++n, asked += turn) ask(asked);
  float next = rstd_of(row);
  Floats weight, dweight;
#pragma unroll
  for (int n = 0; n < Vectors; ++n) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) weight[n][k] = 1.f, dweight[n][k] = 0.f;
    if (!p.weight || first + n * step >= p.dim) continue;
    Chunk<W, kElements>::load(static_cast<W const*>(p.weight) + first + n * step).read(weight[n]);
#pragma unroll
    for (int k = 0; k < kElements; ++k) weight[n][k] += p.weight_offset;
  }

  bool odd = false;
  for (unsigned begin = blockIdx.x * at.groups; begin < unsigned(p.rows); begin += turn, row += turn, asked += turn) {
    float const rstd = next;
    next = rstd_of(row + turn);
    ahead.wait(p.stages);
    Floats x, g;
    Values other[Vectors];
    float product = 0.f;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      read(ahead.template values<T>(n), x[n]);
      read(ahead.template values<T>(Vectors + n), g[n]);
      if constexpr (Summed) other[n] = ahead.template values<T>(2 * Vectors + n);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        g[n][k] *= rstd;
        dweight[n][k] = fmaf(g[n][k], x[n][k], dweight[n][k]);
        g[n][k] *= weight[n][k];
        product = fmaf(g[n][k], x[n][k], product);
      }
    }
    ask(asked);
    float const mean = sum_over_lanes(product, p.lanes_log2, shared.sums[odd]) * p.per_dim, slope = rstd * mean * rstd;
    odd = !odd;
    int const end = row < unsigned(p.rows) ? p.dim : 0;
    int64_t const to = offset_of(p, end ? int(row) : 0, p.dx_stride) + first;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      if (first + n * step >= end) continue;
#pragma unroll
      for (int k = 0; k < kElements; ++k) g[n][k] = fmaf(-x[n][k], slope, g[n][k]);
      if constexpr (Summed) {
        float d[kElements];
        read(other[n], d);
#pragma unroll
        for (int k = 0; k < kElements; ++k) g[n][k] += d[k];
      }
      store_rounded<T>(p.dx, to + n * step, g[n]);
    }
  }
  ahead.template wait_but<0>();
  if (!p.dweight || p.parts == 0) return;

  float* const partial = p.partial + blockIdx.x * p.pitch();
  for (int group = 0; group < at.groups; ++group) {  // one after the other: the terms' order is theirs
    bool const last = group == at.groups - 1;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      int const column = first + n * step;
      if (at.group != group || column >= p.dim) continue;
      if (group > 0) {
        float before[kElements];
        Chunk<float, kElements>::load(shared.columns + column).read(before);
#pragma unroll
        for (int k = 0; k < kElements; ++k) dweight[n][k] += before[k];
      }
      store_rounded<float>(last ? partial : shared.columns, column, dweight[n]);
    }
    if (!last) __syncthreads();
  }
}

/// dx alone, of rows that are read twice, or that have dout of another type.
template <class T, int Width>
__device__ void norm_backward_long(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  wait_for_kernels_ahead();
  Group const at(p.lanes_log2);
  unsigned const number = blockIdx.x * at.groups + at.group;  // up to 2^31 and some: the last block's may not exist
  bool const there = number < unsigned(p.rows);
  int const row = there ? int(number) : 0, end = there ? p.dim : 0;
  int const first = at.lane * Width, step = at.lanes * Width;
  T const* const x = static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride);
  int64_t const gradient = offset_of(p, row, p.dout_stride);
  float const rstd = there ? p.rstd[number] : 0.f;
  auto scaled = [&](int column, float (&g)[Width]) {
    read_as<T>(p.out_type, p.dout, gradient + column, g);
    if (!p.weight) return;
    float w[Width];
    read_as<T>(p.weight_type, p.weight, column, w);
#pragma unroll
    for (int k = 0; k < Width; ++k) g[k] *= w[k] + p.weight_offset;
  };

  float product = 0.f;
#pragma unroll 2
  for (int column = first; column < end; column += step) {
    float a[Width], g[Width];
    Chunk<T, Width>::load(x + column).read(a);
    scaled(column, g);
#pragma unroll
    for (int k = 0; k < Width; ++k) product = fmaf(a[k], g[k], product);
  }
  product = sum_over_lanes(product, p.lanes_log2, shared.sums[0]);
  float const mean = product * rstd * p.per_dim;

  T* const to = static_cast<T*>(p.dx) + offset_of(p, row, p.dx_stride);
  T const* const other = static_cast<T const*>(p.dsum) + offset_of(p, row, p.dsum_stride);
#pragma unroll 2
  for (int column = first; column < end; column += step) {
    float a[Width], g[Width];
    Chunk<T, Width>::load(x + column).read(a);
    scaled(column, g);
#pragma unroll
    for (int k = 0; k < Width; ++k) g[k] = rstd * fmaf(-a[k] * rstd, mean, g[k]);
    if (p.dsum) {
      Chunk<T, Width>::load(other + column).read(a);
#pragma unroll
      for (int k = 0; k < Width; ++k) g[k] += a[k];
    }
    store_rounded<T>(to, column, g);
  }
}

/// Columns of dweight from all rows, beside the blocks of dx and without a second launch: of few rows, or of
/// those that are read twice.
template <class T, int Width>
__device__ void norm_columns(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  using P = RmsNormBackwardParams;
  wait_for_kernels_ahead();
  constexpr int kColumns = Width == 1 ? P::kColumns : P::kColumnsBeside, kLanes = kColumns / Width;
  int const thread = int(threadIdx.x), lane = thread % kLanes, warps = int(blockDim.x) / 32;
  int const first = (int(blockIdx.x) - p.row_blocks) * kColumns, column = first + lane * Width;
  float sum[Width] = {};
  if (column < p.dim) {
#pragma unroll 4
    for (unsigned number = thread / kLanes; number < unsigned(p.rows); number += blockDim.x / kLanes) {
      int const row = int(number);
      float a[Width], d[Width];
      Chunk<T, Width>::load(static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride) + column).read(a);
      read_as<T>(p.out_type, p.dout, offset_of(p, row, p.dout_stride) + column, d);
      float const rstd = p.rstd[row];
#pragma unroll
      for (int k = 0; k < Width; ++k) sum[k] = fmaf(d[k], a[k] * rstd, sum[k]);
    }
  }
#pragma unroll
  for (int other = kLanes; other < 32; other *= 2) {
#pragma unroll
    for (int k = 0; k < Width; ++k) sum[k] += __shfl_xor_sync(~0u, sum[k], other);
  }
  if (thread % 32 < kLanes) store_rounded<float>(shared.columns, thread / 32 * kColumns + lane * Width, sum);
  __syncthreads();
  if (thread >= kColumns || first + thread >= p.dim) return;
  float total[1] = {};
  for (int warp = 0; warp < warps; ++warp) total[0] += shared.columns[warp * kColumns + thread];
  write_as<T>(p.weight_type, p.dweight, first + thread, total);
}

template <class T, class W, int Vectors>
__device__ void norm_backward_by_rows(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  p.dsum ? norm_backward_ahead<T, W, Vectors, true>(p, shared) : norm_backward_ahead<T, W, Vectors, false>(p, shared);
}

template <class T, int Vectors = RmsNormBackwardParams::kVectors>
__device__ void rms_norm_backward(RmsNormBackwardParams const& p) {
  __shared__ RmsNormBackwardShared shared;
  start_dependents();
  bool const columns = int(blockIdx.x) >= p.row_blocks;
  if (p.walk == Walk::elements) return columns ? norm_columns<T, 1>(p, shared) : norm_backward_long<T, 1>(p, shared);
  if (columns) return norm_columns<T, kWidth<T>>(p, shared);
  if (p.walk == Walk::vectors) return norm_backward_long<T, kWidth<T>>(p, shared);
  if (p.weight_type == kTypeOf<T>) return norm_backward_by_rows<T, T, Vectors>(p, shared);
  if constexpr (!std::is_same_v<T, float>) norm_backward_by_rows<T, float, Vectors>(p, shared);
}

/// dweight of its partial sums: a block has 32 columns, and each of its 16 groups of threads every 16th sum.
template <class T>
__device__ void rms_norm_weights(RmsNormBackwardParams const& p) {
  start_dependents();
  constexpr int kColumns = RmsNormBackwardParams::kColumns, kLanes = kColumns / 4, kGroups = kHelperThreads / kLanes;
  __shared__ alignas(16) float shared[kGroups][kColumns];
  int const group = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  int const first = int(blockIdx.x) * kColumns, column = first + lane * 4;
  float sum[4] = {};
  wait_for_kernels_ahead();
  if (column < p.dim) {
#pragma unroll 8
    for (int part = group; part < p.parts; part += kGroups) {
      float x[4];
      Chunk<float, 4>::load(p.partial + part * p.pitch() + column).read(x);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] += x[k];
    }
  }
  store_rounded<float>(shared[group], lane * 4, sum);
  __syncthreads();
  if (int(threadIdx.x) >= kColumns || first + int(threadIdx.x) >= p.dim) return;
  float total[1] = {};
#pragma unroll
  for (int n = 0; n < kGroups; ++n) total[0] += shared[n][threadIdx.x];
  write_as<T>(p.weight_type, p.dweight, first + int(threadIdx.x), total);
}

}  // namespace cutlass_fmha
