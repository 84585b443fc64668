// Gradients of RMSNorm: those of x row by row; those of the weights as partial sums, and their sum.
#pragma once

#include "rows.cuh"

namespace cutlass_fmha {

struct RmsNormBackwardShared {
  static constexpr int kThreads = RmsNormBackwardParams::kThreads;
  /// Rows that share a block are of half of its vectors at most.
  static constexpr int kColumns = kThreads * RmsNormBackwardParams::kMaxVectors * 8 / 2;

  float sums[2][kThreads / 32];         ///< by turns, so that one barrier a row is enough
  alignas(16) float columns[kColumns];  ///< where groups meet
};

/// Lanes that share a row, one of the block's groups of them.
struct Group {
  int lanes, lane, group, groups;

  __device__ explicit Group(int lanes_log2)
      : lanes(1 << lanes_log2),
        lane(int(threadIdx.x) & (lanes - 1)),
        group(int(threadIdx.x) >> lanes_log2),
        groups(RmsNormBackwardShared::kThreads >> lanes_log2) {}
};

/// Whole rows in registers. A block goes through its rows, the same each time, with its sums of dweight in registers.
template <class T, class W, int Vectors>
__device__ void norm_backward_kept(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  using Factors = Chunk<W, kElements>;
  Group const at(p.lanes_log2);
  int const first = at.lane * kElements, step = at.lanes * kElements;
  float dweight[Vectors][kElements] = {};

  int turn = 0;
  for (int begin = blockIdx.x * at.groups; begin < p.rows; begin += gridDim.x * at.groups, turn ^= 1) {
    int const number = begin + at.group;
    bool const there = number < p.rows;  // lanes without a row go along
    Row row = row_of(p, there ? number : 0);
    int const end = there ? p.dim : 0;
    T const* const from = static_cast<T const*>(p.x) + row.offset(p.x_stride) + first;
    T const* const gradient = static_cast<T const*>(p.dout) + row.offset(p.dout_stride) + first;
    Values x[Vectors], dout[Vectors];
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      x[n] = dout[n] = Values{};
      if (first + n * step >= end) continue;
      x[n] = load_once<T, kElements>(from + n * step);
      dout[n] = load_once<T, kElements>(gradient + n * step);
    }
    float const rstd = there ? p.rstd[number] : 0.f;

    // dout and its factor. The weights are in L1, and have no registers.
    auto scaled = [&](int n, float (&g)[kElements]) {
      dout[n].read(g);
      if (!p.weight || first + n * step >= end) return;
      float w[kElements];
      Factors::load(static_cast<W const*>(p.weight) + first + n * step).read(w);
#pragma unroll
      for (int k = 0; k < kElements; ++k) g[k] *= w[k] + p.weight_offset;
    };
    float product = 0.f;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      if constexpr (Vectors > 1) asm volatile("" ::: "memory");
      float a[kElements], g[kElements];
      x[n].read(a);
      scaled(n, g);
#pragma unroll
      for (int k = 0; k < kElements; ++k) product = fmaf(a[k], g[k], product);
    }
    product = sum_over_lanes<RmsNormBackwardShared::kThreads>(product, p.lanes_log2, shared.sums[turn]);
    float const mean = product * rstd * p.per_dim;

    int again = number;
    asm volatile("" : "+r"(again));  // found anew: what it takes would want registers meanwhile
    row = row_of(p, there ? again : 0);
    T* const to = static_cast<T*>(p.dx) + row.offset(p.dx_stride) + first;
    T const* const other = static_cast<T const*>(p.dsum) + row.offset(p.dsum_stride) + first;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      if (first + n * step >= end) continue;
      asm volatile("" ::: "memory");  // loads of the next vector would want registers that there are not
      float a[kElements], g[kElements], d[kElements];
      x[n].read(a);
      dout[n].read(d);
#pragma unroll
      for (int k = 0; k < kElements; ++k) a[k] *= rstd;
#pragma unroll
      for (int k = 0; k < kElements; ++k) dweight[n][k] = fmaf(d[k], a[k], dweight[n][k]);
      scaled(n, g);
#pragma unroll
      for (int k = 0; k < kElements; ++k) g[k] = rstd * fmaf(-a[k], mean, g[k]);
      if (p.dsum) {
        load_once<T, kElements>(other + n * step).read(d);
#pragma unroll
        for (int k = 0; k < kElements; ++k) g[k] += d[k];
      }
      Values found;
      found.write(g);
      found.store(to + n * step);
    }
  }
  if (!p.dweight) return;

  float* const partial = p.partial + blockIdx.x * p.pitch();
  for (int group = 0; group < at.groups; ++group) {  // one after the other: the terms' order is theirs
    bool const last = group == at.groups - 1;
    if (at.group == group) {
#pragma unroll
      for (int n = 0; n < Vectors; ++n) {
        int const column = first + n * step;
        if (column >= p.dim) continue;
        Chunk<float, kElements> chunk;
        if (group > 0) {
          float before[kElements];
          Chunk<float, kElements>::load(shared.columns + column).read(before);
#pragma unroll
          for (int k = 0; k < kElements; ++k) dweight[n][k] += before[k];
        }
        chunk.write(dweight[n]);
        chunk.store((last ? partial : shared.columns) + column);
      }
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
  Row const row = row_of(p, there ? number : 0);
  int const first = at.lane * Width, step = at.lanes * Width, end = there ? p.dim : 0;
  T const* const x = static_cast<T const*>(p.x) + row.offset(p.x_stride);
  int64_t const gradient = row.offset(p.dout_stride);
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
  product = sum_over_lanes<RmsNormBackwardShared::kThreads>(product, p.lanes_log2, shared.sums[0]);
  float const mean = product * rstd * p.per_dim;

  T* const to = static_cast<T*>(p.dx) + row.offset(p.dx_stride);
  T const* const other = static_cast<T const*>(p.dsum) + row.offset(p.dsum_stride);
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
  if (p.walk == Walk::vectors) return norm_backward_long<T, kWidth<T>>(p, shared);
  if (p.walk == Walk::elements) return norm_backward_long<T, 1>(p, shared);
  if (p.vectors > 1) return norm_backward_kept<T, T, RmsNormBackwardParams::kMaxVectors>(p, shared);
  if (p.weight_type == kTypeOf<T>) return norm_backward_kept<T, T, 1>(p, shared);
  if constexpr (!std::is_same_v<T, float>) norm_backward_kept<T, float, 1>(p, shared);
}

/// Partial sums of dweight where rows are not kept: a thread has its columns, and every gridDim.y-th row.
template <class T, int Width>
__device__ void norm_columns(RmsNormBackwardParams const& p) {
  int const column = (int(blockIdx.x) * kHelperThreads + int(threadIdx.x)) * Width;
  if (column >= p.dim) return;
  float sum[Width] = {};
#pragma unroll 4
  for (int number = blockIdx.y; number < p.rows; number += gridDim.y) {
    Row const row = row_of(p, number);
    float a[Width], d[Width];
    Chunk<T, Width>::load(static_cast<T const*>(p.x) + row.offset(p.x_stride) + column).read(a);
    read_as<T>(p.out_type, p.dout, row.offset(p.dout_stride) + column, d);
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
