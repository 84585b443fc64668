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

/// Lanes that share a row, one of the block's groups of them.
struct Group {
  int lanes, lane, group, groups;

  __device__ explicit Group(int lanes_log2)
      : lanes(1 << lanes_log2),
        lane(int(threadIdx.x) & (lanes - 1)),
        group(int(threadIdx.x) >> lanes_log2),
        groups(int(blockDim.x) >> lanes_log2) {}
};

/// Whole rows in registers, a vector in each lane. A block goes through its rows, the same each time, with its sums of
/// dweight in registers, and the next row's loads are on their way while one is computed.
template <class T, class W>
__device__ void norm_backward_kept(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
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

  struct Loaded {
    Values x, dout;
    float rstd;
  };
  auto const there = [&](unsigned row) { return mine && row < unsigned(p.rows); };  // other lanes go along
  auto const load = [&](unsigned row) {
    Loaded found{};
    if (!there(row)) return found;
    found.x = load_once<T, kElements>(static_cast<T const*>(p.x) + offset_of(p, int(row), p.x_stride) + column);
    found.dout =
        load_once<T, kElements>(static_cast<T const*>(p.dout) + offset_of(p, int(row), p.dout_stride) + column);
    found.rstd = p.rstd[row];
    return found;
  };
  unsigned const step = gridDim.x * at.groups;
  unsigned row = blockIdx.x * at.groups + at.group;
  Loaded next = load(row);
  for (unsigned begin = blockIdx.x * at.groups, turn = 0; begin < unsigned(p.rows); begin += step, turn ^= 1) {
    Loaded const now = next;
    next = load(row + step);
    Values other{};
    if (p.dsum && there(row)) {
      other = load_once<T, kElements>(static_cast<T const*>(p.dsum) + offset_of(p, int(row), p.dsum_stride) + column);
    }
    float y[kElements], g[kElements], product = 0.f;
    now.x.read(y);
    now.dout.read(g);
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      y[k] *= now.rstd;
      dweight[k] = fmaf(g[k], y[k], dweight[k]);
      g[k] *= weight[k];
      product = fmaf(y[k], g[k], product);
    }
    float const mean = sum_over_lanes(product, p.lanes_log2, shared.sums[turn]) * p.per_dim;
    if (there(row)) {
      float d[kElements];
      other.read(d);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        g[k] = now.rstd * fmaf(-y[k], mean, g[k]);
        if (p.dsum) g[k] += d[k];
      }
      store_rounded<T>(p.dx, offset_of(p, int(row), p.dx_stride) + column, g);
    }
    row += step;
  }
  if (!p.dweight) return;

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

template <class T>
__device__ void rms_norm_backward(RmsNormBackwardParams const& p) {
  __shared__ RmsNormBackwardShared shared;
  begin_rows();
  if (p.walk == Walk::vectors) return norm_backward_long<T, kWidth<T>>(p, shared);
  if (p.walk == Walk::elements) return norm_backward_long<T, 1>(p, shared);
  if (p.weight_type == kTypeOf<T>) return norm_backward_kept<T, T>(p, shared);
  if constexpr (!std::is_same_v<T, float>) norm_backward_kept<T, float>(p, shared);
}

/// Partial sums of dweight where rows are not kept: a thread has its columns, and every gridDim.y-th row.
template <class T, int Width>
__device__ void norm_columns(RmsNormBackwardParams const& p) {
  int const column = (int(blockIdx.x) * kHelperThreads + int(threadIdx.x)) * Width;
  begin_rows();
  if (column >= p.dim) return;
  float sum[Width] = {};
#pragma unroll 4
  for (int number = blockIdx.y; number < p.rows; number += gridDim.y) {
    float a[Width], d[Width];
    Chunk<T, Width>::load(static_cast<T const*>(p.x) + offset_of(p, number, p.x_stride) + column).read(a);
    read_as<T>(p.out_type, p.dout, offset_of(p, number, p.dout_stride) + column, d);
    float const rstd = p.rstd[number];
#pragma unroll
    for (int k = 0; k < Width; ++k) sum[k] = fmaf(d[k], a[k] * rstd, sum[k]);
  }
  store_rounded<float>(p.partial + blockIdx.y * p.pitch(), column, sum);
}

template <class T>
__device__ void rms_norm_columns(RmsNormBackwardParams const& p) {
  p.walk == Walk::elements ? norm_columns<T, 1>(p) : norm_columns<T, kWidth<T>>(p);
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
