// Gradients of RMSNorm: those of x row by row; those of the weights as partial sums, and their sum.
#pragma once

#include "rows.cuh"

namespace cutlass_fmha {

struct RmsNormBackwardShared {
  static constexpr int kMaxWarps = RmsNormBackwardParams::kMaxThreads / 32;
  /// Rows that share a block are of half of its vectors at most.
  static constexpr int kColumns = RmsNormBackwardParams::kThreads * 8 / 2;

  float sums[2][kMaxWarps];             ///< by turns, so that one barrier a row is enough
  alignas(16) float columns[kColumns];  ///< where groups meet
};

/// A vector of a row in each lane. A block goes from row to row, with weights and sums of dweight in registers and the
/// next rows on their way.
template <class T, class W, bool Summed>
__device__ void norm_backward_ahead(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  Group const at(p.lanes_log2);
  int const column = at.lane * kElements;
  bool const mine = column < p.dim;
  float weight[kElements], dweight[kElements] = {};
#pragma unroll
  for (int k = 0; k < kElements; ++k) weight[k] = 1.f;
  if (p.weight && mine) {
    Chunk<W, kElements>::load(static_cast<W const*>(p.weight) + column).read(weight);
#pragma unroll
    for (int k = 0; k < kElements; ++k) weight[k] += p.weight_offset;
  }

  Ahead<Summed ? 3 : 2> ahead;
  auto const ask = [&](unsigned number) {
    bool const there = mine && number < unsigned(p.rows);  // other lanes go along
    int const row = there ? int(number) : 0;
    auto const one = [&](int n, void const* from, Strides const& s) {
      ahead.ask(n, static_cast<T const*>(from) + offset_of(p, row, s) + column, there);
    };
    one(0, p.x, p.x_stride);
    one(1, p.dout, p.dout_stride);
    if constexpr (Summed) one(2, p.dsum, p.dsum_stride);
    ahead.next(p.stages);
  };
  auto const rstd_of = [&](unsigned row) { return row < unsigned(p.rows) ? p.rstd[row] : 0.f; };
  unsigned const turn = p.row_blocks * at.groups;
  unsigned row = blockIdx.x * at.groups + at.group, asked = row;
  for (int n = 0; n < p.stages; ++n, asked += turn) ask(asked);
  float next = rstd_of(row);
  bool odd = false;
  for (unsigned begin = blockIdx.x * at.groups; begin < unsigned(p.rows); begin += turn, row += turn, asked += turn) {
    float const rstd = next;
    next = rstd_of(row + turn);
    ahead.wait(p.stages);
    float y[kElements], g[kElements], d[kElements], product = 0.f;
    auto const read = [&](int n, float (&to)[kElements]) {
      Values values;
      values.words[0] = ahead.place(n);
      values.read(to);
    };
    read(0, y);
    read(1, g);
    if constexpr (Summed) read(2, d);
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      y[k] *= rstd;
      dweight[k] = fmaf(g[k], y[k], dweight[k]);
      g[k] *= weight[k];
      product = fmaf(y[k], g[k], product);
    }
    ask(asked);
    float const mean = sum_over_lanes(product, p.lanes_log2, shared.sums[odd]) * p.per_dim;
    odd = !odd;
    if (!mine || row >= unsigned(p.rows)) continue;
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      g[k] = rstd * fmaf(-y[k], mean, g[k]);
      if constexpr (Summed) g[k] += d[k];
    }
    store_rounded<T>(p.dx, offset_of(p, int(row), p.dx_stride) + column, g);
  }
  ahead.template wait_but<0>();
  if (!p.dweight || p.parts == 0) return;

  float* const partial = p.partial + blockIdx.x * p.pitch();
  for (int group = 0; group < at.groups; ++group) {  // one after the other: the terms' order is theirs
    bool const last = group == at.groups - 1;
    if (at.group == group && mine) {
      if (group > 0) {
        float before[kElements];
        Chunk<float, kElements>::load(shared.columns + column).read(before);
#pragma unroll
        for (int k = 0; k < kElements; ++k) dweight[k] += before[k];
      }
      store_rounded<float>(last ? partial : shared.columns, column, dweight);
    }
    if (!last) __syncthreads();
  }
}

/// dx alone, of rows that are read twice, or that have dout of another type.
template <class T, int Width>
__device__ void norm_backward_long(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  Group const at(p.lanes_log2);
  int const number = int(blockIdx.x) * at.groups + at.group;
  bool const there = number < p.rows;
  int const row = there ? number : 0, end = there ? p.dim : 0;
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

/// kColumns columns of dweight from all rows, beside the blocks of dx and without a second launch: of few rows, or of
/// those that are read twice.
template <class T, int Width>
__device__ void norm_columns(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  constexpr int kColumns = RmsNormBackwardParams::kColumns, kLanes = kColumns / Width;
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

template <class T, class W>
__device__ void norm_backward_by_rows(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  p.dsum ? norm_backward_ahead<T, W, true>(p, shared) : norm_backward_ahead<T, W, false>(p, shared);
}

template <class T>
__device__ void rms_norm_backward(RmsNormBackwardParams const& p) {
  __shared__ RmsNormBackwardShared shared;
  begin_rows();
  bool const columns = int(blockIdx.x) >= p.row_blocks;
  if (p.walk == Walk::elements) return columns ? norm_columns<T, 1>(p, shared) : norm_backward_long<T, 1>(p, shared);
  if (columns) return norm_columns<T, kWidth<T>>(p, shared);
  if (p.walk == Walk::vectors) return norm_backward_long<T, kWidth<T>>(p, shared);
  if (p.weight_type == kTypeOf<T>) return norm_backward_by_rows<T, T>(p, shared);
  if constexpr (!std::is_same_v<T, float>) norm_backward_by_rows<T, float>(p, shared);
}

/// dweight of its partial sums: a block has 32 columns, and each of its 16 groups of threads every 16th sum.
template <class T>
__device__ void rms_norm_weights(RmsNormBackwardParams const& p) {
  constexpr int kColumns = RmsNormBackwardParams::kColumns, kLanes = kColumns / 4, kGroups = kHelperThreads / kLanes;
  __shared__ alignas(16) float shared[kGroups][kColumns];
  int const group = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  int const first = int(blockIdx.x) * kColumns, column = first + lane * 4;
  float sum[4] = {};
  begin_rows();
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
