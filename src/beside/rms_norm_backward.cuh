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

/// weight + weight_offset of a vector's columns; 1 where there is no weight.
template <class W, int Width>
__device__ void read_factors(RmsNormBackwardParams const& p, Chunk<W, Width> const& chunk, float (&weight)[Width]) {
  if (p.weight) read(chunk, weight);
#pragma unroll
  for (int k = 0; k < Width; ++k) weight[k] = p.weight ? weight[k] + p.weight_offset : 1.f;
}

/// Of a vector: g is dout before, and dout weight rstd then; adds to its columns' dweight and to the row's sum of g x.
template <int Width>
__device__ void scale(float rstd, float const (&weight)[Width], float const (&x)[Width], float (&g)[Width],
                      float (&dweight)[Width], float& product) {
#pragma unroll
  for (int k = 0; k < Width; ++k) {
    g[k] *= rstd;
    dweight[k] = fmaf(g[k], x[k], dweight[k]);
    g[k] *= weight[k];
    product = fmaf(g[k], x[k], product);
  }
}

/// Stores a vector of dx, g - x slope + dsum.
template <bool Summed, class T, int Width>
__device__ void store_gradient(void* dx, int64_t at, float slope, float const (&x)[Width], float (&g)[Width],
                               Chunk<T, Width> const& dsum) {
#pragma unroll
  for (int k = 0; k < Width; ++k) g[k] = fmaf(-x[k], slope, g[k]);
  if constexpr (Summed) {
    float d[Width];
    read(dsum, d);
#pragma unroll
    for (int k = 0; k < Width; ++k) g[k] += d[k];
  }
  store_rounded<T>(dx, at, g);
}

/// Few rows: each group of lanes has one at most, and a lane a vector of it. What a row takes is the time of what
/// follows the wait, one thing after the other: addresses are there before, and all loads on their way at once.
template <class T, class W, bool Summed>
__device__ void norm_backward_once(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  using Factors = Chunk<W, kElements>;
  Group const at(p.lanes_log2);
  unsigned const number = blockIdx.x * at.groups + at.group;
  int const column = at.lane * kElements;
  bool const there = number < unsigned(p.rows) && column < p.dim;  // the other lanes go along
  int const row = number < unsigned(p.rows) ? int(number) : 0;
  auto const begin_of = [&](void const* tensor, Strides const& s) {
    return static_cast<T const*>(tensor) + offset_of(p, row, s) + column;
  };
  T const* from = begin_of(p.x, p.x_stride);
  T const* gradient = begin_of(p.dout, p.dout_stride);
  T const* other = Summed ? begin_of(p.dsum, p.dsum_stride) : from;
  T* to = static_cast<T*>(p.dx) + offset_of(p, row, p.dx_stride) + column;
  W const* factors = static_cast<W const*>(p.weight) + column;
  float const* scales = p.rstd + row;
  auto const prefetch = [&] {
    prefetch_to_l2(scales);
    if (!there) return;
    prefetch_to_l2(from);
    prefetch_to_l2(gradient);
    if (p.weight) prefetch_to_l2(factors);
    if constexpr (Summed) prefetch_to_l2(other);
  };
  wait_prefetching(p.rows > 0, p.early, prefetch, from, gradient, other, to, factors, scales);

  Values x{}, dout{}, dsum{};
  Factors weight{};
  float const rstd = *scales;
  if (there) {
    x = Values::load(from);
    dout = Values::load(gradient);
    if (p.weight) weight = Factors::load(factors);
    if constexpr (Summed) dsum = Values::load(other);
  }
  float a[kElements], g[kElements], w[kElements], columns[kElements] = {}, product = 0.f;  // columns: other blocks'
  read(x, a);
  read(dout, g);
  read_factors(p, weight, w);
  scale(rstd, w, a, g, columns, product);
  float const mean = sum_over_lanes(product, p.lanes_log2, shared.sums[0]) * p.per_dim, slope = rstd * mean * rstd;
  if (there) store_gradient<Summed>(to, 0, slope, a, g, dsum);
}

/// Whole rows, up to `Vectors` vectors of each in a lane. A block goes from row to row, with weights and sums of
/// dweight in registers and the next rows on their way. Several vectors: what a row costs besides its elements is
/// shared.
template <class T, class W, int Vectors, bool Summed>
__device__ void norm_backward_ahead(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  using Factors = Chunk<W, kElements>;
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
  Factors factors[Vectors];
#pragma unroll
  for (int n = 0; n < Vectors; ++n) {
    factors[n] = Factors{};
    if (!p.weight || first + n * step >= p.dim) continue;
    factors[n] = Factors::load(static_cast<W const*>(p.weight) + first + n * step);
  }
  Floats weight, dweight = {};
#pragma unroll
  for (int n = 0; n < Vectors; ++n) read_factors(p, factors[n], weight[n]);

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
      scale(rstd, weight[n], x[n], g[n], dweight[n], product);
    }
    ask(asked);
    float const mean = sum_over_lanes(product, p.lanes_log2, shared.sums[odd]) * p.per_dim, slope = rstd * mean * rstd;
    odd = !odd;
    int const end = row < unsigned(p.rows) ? p.dim : 0;
    int64_t const to = offset_of(p, end ? int(row) : 0, p.dx_stride) + first;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      if (first + n * step < end) store_gradient<Summed>(p.dx, to + n * step, slope, x[n], g[n], other[n]);
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
/// those that are read twice. D: dout's type.
template <class T, class D, int Width>
__device__ void norm_columns(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  using P = RmsNormBackwardParams;
  constexpr int kColumns = Width == 1 ? P::kColumns : P::kColumnsBeside, kLanes = kColumns / Width;
  constexpr int kAtOnce = 4;  // rows of a thread that are on their way
  int const thread = int(threadIdx.x), lane = thread % kLanes, warps = int(blockDim.x) / 32;
  int const first = (int(blockIdx.x) - p.row_blocks) * kColumns, column = first + lane * Width;
  unsigned const rows = unsigned(p.rows), step = blockDim.x / kLanes;
  unsigned number = thread / kLanes;
  T const* x;
  D const* dout;
  float const* rstd;
  auto const find = [&](unsigned wanted) {
    int const row = wanted < rows ? int(wanted) : 0;
    x = static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride) + column;
    dout = static_cast<D const*>(p.dout) + offset_of(p, row, p.dout_stride) + column;
    rstd = p.rstd + row;
  };
  find(number);  // before the wait, which is all where rows are few
  wait_with(rows > 0, x, dout, rstd);
  float sum[Width] = {};
  for (; column < p.dim && number < rows; number += kAtOnce * step) {
    Chunk<T, Width> values[kAtOnce];
    Chunk<D, Width> gradients[kAtOnce];
    float scales[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (number + n * step >= rows) continue;
      values[n] = Chunk<T, Width>::load(x);
      gradients[n] = Chunk<D, Width>::load(dout);
      scales[n] = *rstd;
      find(number + (n + 1) * step);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (number + n * step >= rows) continue;
      float a[Width], d[Width];
      read(values[n], a);
      read(gradients[n], d);
#pragma unroll
      for (int k = 0; k < Width; ++k) sum[k] = fmaf(d[k], a[k] * scales[n], sum[k]);
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

template <class T, int Width>
__device__ void norm_columns_of_any(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  if (p.out_type == kTypeOf<T>) return norm_columns<T, T, Width>(p, shared);
  if constexpr (!std::is_same_v<T, float>) {
    norm_columns<T, float, Width>(p, shared);
  } else if (p.out_type == DType::float16) {
    norm_columns<T, __half, Width>(p, shared);
  } else {
    norm_columns<T, __nv_bfloat16, Width>(p, shared);
  }
}

template <class T, class W, int Vectors, bool Summed>
__device__ void norm_backward_kept(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  p.once ? norm_backward_once<T, W, Summed>(p, shared) : norm_backward_ahead<T, W, Vectors, Summed>(p, shared);
}

template <class T, class W, int Vectors>
__device__ void norm_backward_by_rows(RmsNormBackwardParams const& p, RmsNormBackwardShared& shared) {
  p.dsum ? norm_backward_kept<T, W, Vectors, true>(p, shared) : norm_backward_kept<T, W, Vectors, false>(p, shared);
}

template <class T, int Vectors = RmsNormBackwardParams::kVectors>
__device__ void rms_norm_backward(RmsNormBackwardParams const& p) {
  __shared__ RmsNormBackwardShared shared;
  start_dependents();
  bool const columns = int(blockIdx.x) >= p.row_blocks;
  if (columns && p.walk == Walk::elements) return norm_columns_of_any<T, 1>(p, shared);
  if (columns) return norm_columns_of_any<T, kWidth<T>>(p, shared);
  if (p.walk == Walk::elements) return norm_backward_long<T, 1>(p, shared);
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
