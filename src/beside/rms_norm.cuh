// RMSNorm (Zhang and Sennrich 2019), alone or of a sum.
#pragma once

#include "rows.cuh"

namespace cutlass_fmha {

/// Whole rows in registers: all of a row's loads are on their way at once. Few registers make room for many rows on an
/// SM, which is what keeps memory busy.
template <class T, class W, int Vectors>
__device__ void norm_kept(RmsNormParams const& p, float* shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  using Factors = Chunk<W, kElements>;
  constexpr bool kEarly = Vectors * int(sizeof(Factors)) <= 32 && sizeof(T) == 2;  // registers for weights meanwhile
  constexpr int kAtOnce = Vectors < 2 ? Vectors : 2;                               // and for the residual
  Lane const lane(p.lanes_log2, int(blockDim.x));
  bool const there = lane.row < p.rows;  // lanes without a row go along
  int const row = there ? int(lane.row) : 0, end = there ? p.dim : 0;
  int const first = lane.lane * kElements, step = lane.lanes * kElements;

  Values x[Vectors];
  Factors weight[Vectors];
  T const* from = static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride) + first;
  T const* other = static_cast<T const*>(p.residual) + offset_of(p, row, p.residual_stride) + first;
  auto const prefetch = [&] {
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      if (first + n * step >= end) continue;
      prefetch_to_l2(from + n * step);
      if (p.residual) prefetch_to_l2(other + n * step);
    }
  };
  wait_prefetching(p.rows > 0, p.early, prefetch, from);
#pragma unroll
  for (int n = 0; n < Vectors; ++n) {
    x[n] = Values{};
    if (first + n * step < end) x[n] = Values::load(from + n * step);
  }
  auto const load_weights = [&] {
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      if (kEarly && p.weight && first + n * step < end) {
        weight[n] = Factors::load(static_cast<W const*>(p.weight) + first + n * step);
      }
    }
  };
  if (p.residual) {
    T* const to = static_cast<T*>(p.sum) + offset_of(p, row, p.sum_stride) + first;
    if (Vectors == 1) load_weights();  // with more, registers come free with the residual's
#pragma unroll
    for (int begin = 0; begin < Vectors; begin += kAtOnce) {
      if (begin > 0) asm volatile("" ::: "memory");
      Values residual[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        int const column = (begin + n) * step;
        if (first + column < end) residual[n] = Values::load(other + column);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        int const column = (begin + n) * step;
        if (first + column >= end) continue;
        float a[kElements], b[kElements];
        read(x[begin + n], a);
        read(residual[n], b);
#pragma unroll
        for (int k = 0; k < kElements; ++k) a[k] += b[k];
        x[begin + n].write(a);
        x[begin + n].store(to + column);
      }
    }
  }
  if (Vectors > 1 || !p.residual) load_weights();

  float squares = 0.f;
#pragma unroll
  for (int n = 0; n < Vectors; ++n) {
    float a[kElements];
    read(x[n], a);
#pragma unroll
    for (int k = 0; k < kElements; ++k) squares = fmaf(a[k], a[k], squares);
  }
  float const rstd = rsqrtf(sum_over_lanes(squares, p.lanes_log2, shared) * p.per_dim + p.eps);
  if (p.rstd && there && lane.lane == 0) p.rstd[row] = rstd;

  int64_t const to = offset_of(p, row, p.out_stride) + first;
#pragma unroll
  for (int n = 0; n < Vectors; ++n) {
    if (first + n * step >= end) continue;
    if constexpr (Vectors > 1) {  // one at a time, from what is packed: there are no registers for more
      packed(x[n]);
      if constexpr (kEarly) packed(weight[n]);
    }
    float a[kElements], w[kElements];
    read(x[n], a);
#pragma unroll
    for (int k = 0; k < kElements; ++k) a[k] *= rstd;
    if (p.weight) {
      if constexpr (!kEarly) weight[n] = Factors::load(static_cast<W const*>(p.weight) + first + n * step);
      weight[n].read(w);
#pragma unroll
      for (int k = 0; k < kElements; ++k) a[k] *= w[k] + p.weight_offset;
    }
    if (p.bias) {
      Factors::load(static_cast<W const*>(p.bias) + first + n * step).read(w);
#pragma unroll
      for (int k = 0; k < kElements; ++k) a[k] += w[k];
    }
    write_as<T>(p.out_type, p.out, to + n * step, a);
  }
}

template <class T, class W>
__device__ void norm_by_vectors(RmsNormParams const& p, float* shared) {
  p.many ? norm_kept<T, W, RmsNormParams::kVectors>(p, shared) : norm_kept<T, W, 1>(p, shared);
}

/// Rows that are read twice.
template <class T, int Width>
__device__ void norm_long(RmsNormParams const& p, float* shared) {
  using Values = Chunk<T, Width>;
  wait_for_kernels_ahead();
  Lane const lane(p.lanes_log2, int(blockDim.x));
  bool const there = lane.row < p.rows;
  int const row = there ? int(lane.row) : 0, end = there ? p.dim : 0;
  int const first = lane.lane * Width, step = lane.lanes * Width;
  T const* x = static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride);

  float squares = 0.f;
  if (p.residual) {
    T const* const residual = static_cast<T const*>(p.residual) + offset_of(p, row, p.residual_stride);
    T* const sum = static_cast<T*>(p.sum) + offset_of(p, row, p.sum_stride);
#pragma unroll 2
    for (int column = first; column < end; column += step) {
      float a[Width], b[Width];
      Values chunk = Values::load(x + column);
      chunk.read(a);
      Values::load(residual + column).read(b);
#pragma unroll
      for (int k = 0; k < Width; ++k) a[k] += b[k];
      chunk.write(a);
      chunk.store(sum + column);
      chunk.read(a);
#pragma unroll
      for (int k = 0; k < Width; ++k) squares = fmaf(a[k], a[k], squares);
    }
    x = sum;  // of which each thread reads what it wrote itself
  } else {
#pragma unroll 4
    for (int column = first; column < end; column += step) {
      float a[Width];
      Values::load(x + column).read(a);
#pragma unroll
      for (int k = 0; k < Width; ++k) squares = fmaf(a[k], a[k], squares);
    }
  }
  float const rstd = rsqrtf(sum_over_lanes(squares, p.lanes_log2, shared) * p.per_dim + p.eps);
  if (p.rstd && there && lane.lane == 0) p.rstd[row] = rstd;

  int64_t const to = offset_of(p, row, p.out_stride);
#pragma unroll 2
  for (int column = first; column < end; column += step) {
    float a[Width], w[Width];
    Values::load(x + column).read(a);
#pragma unroll
    for (int k = 0; k < Width; ++k) a[k] *= rstd;
    if (p.weight) {
      read_as<T>(p.weight_type, p.weight, column, w);
#pragma unroll
      for (int k = 0; k < Width; ++k) a[k] *= w[k] + p.weight_offset;
    }
    if (p.bias) {
      read_as<T>(p.weight_type, p.bias, column, w);
#pragma unroll
      for (int k = 0; k < Width; ++k) a[k] += w[k];
    }
    write_as<T>(p.out_type, p.out, to + column, a);
  }
}

template <class T>
__device__ void rms_norm(RmsNormParams const& p) {
  start_dependents();
  __shared__ float shared[RmsNormParams::kMaxThreads / 32];
  if (p.walk == Walk::vectors) return norm_long<T, kWidth<T>>(p, shared);
  if (p.walk == Walk::elements) return norm_long<T, 1>(p, shared);
  if (p.weight_type == kTypeOf<T>) return norm_by_vectors<T, T>(p, shared);
  if constexpr (!std::is_same_v<T, float>) norm_by_vectors<T, float>(p, shared);
}

}  // namespace cutlass_fmha
