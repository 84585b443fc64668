// RMSNorm (Zhang and Sennrich 2019), alone or of a sum.
#pragma once

#include "rows.cuh"

namespace cutlass_fmha {

/// What becomes of a lane's vector of a row whose rstd is known.
template <class T, class W>
__device__ void norm_vector(RmsNormParams const& p, Chunk<T, kWidth<T>> const& x, Chunk<W, kWidth<T>> const& weight,
                            float rstd, int64_t to, int column) {
  constexpr int kElements = kWidth<T>;
  float a[kElements], w[kElements];
  read(x, a);
#pragma unroll
  for (int k = 0; k < kElements; ++k) a[k] *= rstd;
  if (p.weight) {
    read(weight, w);
#pragma unroll
    for (int k = 0; k < kElements; ++k) a[k] *= w[k] + p.weight_offset;
  }
  if (p.bias) {
    Chunk<W, kElements>::load(static_cast<W const*>(p.bias) + column).read(w);
#pragma unroll
    for (int k = 0; k < kElements; ++k) a[k] += w[k];
  }
  write_as<T>(p.out_type, p.out, to + column, a);
}

/// x + residual, as it is written.
template <class T>
__device__ void add(Chunk<T, kWidth<T>>& x, Chunk<T, kWidth<T>> const& residual) {
  float a[kWidth<T>], b[kWidth<T>];
  read(x, a);
  read(residual, b);
#pragma unroll
  for (int k = 0; k < kWidth<T>; ++k) a[k] += b[k];
  x.write(a);
}

template <class T>
__device__ float squares_of(Chunk<T, kWidth<T>> const& x, float sum) {
  float a[kWidth<T>];
  read(x, a);
#pragma unroll
  for (int k = 0; k < kWidth<T>; ++k) sum = fmaf(a[k], a[k], sum);
  return sum;
}

__device__ inline float rstd_of(RmsNormParams const& p, float squares, float* shared) {
  return rsqrtf(sum_over_lanes(squares, p.lanes_log2, shared) * p.per_dim + p.eps);
}

/// Few rows: a vector in each lane, and a row of its own.
template <class T, class W>
__device__ void norm_kept(RmsNormParams const& p, float* shared) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  Lane const lane(p.lanes_log2, int(blockDim.x));
  int const column = lane.lane * kElements;
  bool const there = lane.row < p.rows && column < p.dim;  // other lanes go along
  int const row = there ? int(lane.row) : 0;
  Values x{};
  Chunk<W, kElements> weight;
  if (there) {
    x = Values::load(static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride) + column);
    if (p.weight) weight = Chunk<W, kElements>::load(static_cast<W const*>(p.weight) + column);
    if (p.residual) {
      add(x, Values::load(static_cast<T const*>(p.residual) + offset_of(p, row, p.residual_stride) + column));
      x.store(static_cast<T*>(p.sum) + offset_of(p, row, p.sum_stride) + column);
    }
  }
  float const rstd = rstd_of(p, squares_of<T>(x, 0.f), shared);
  if (p.rstd && there && lane.lane == 0) p.rstd[row] = rstd;
  if (there) norm_vector<T, W>(p, x, weight, rstd, offset_of(p, row, p.out_stride), column);
}

/// Many rows: a block goes from row to row, with the weights in registers and the next rows on their way.
template <class T, class W, bool Summed, int Vectors>
__device__ void norm_ahead(RmsNormParams const& p, float (*shared)[RmsNormParams::kMaxThreads / 32]) {
  constexpr int kElements = kWidth<T>;
  using Values = Chunk<T, kElements>;
  Group const at(p.lanes_log2);
  int const first = at.lane * kElements, step = at.lanes * kElements;
  Chunk<W, kElements> weight[Vectors];
#pragma unroll
  for (int n = 0; n < Vectors; ++n) {
    if (p.weight && first + n * step < p.dim) {
      weight[n] = Chunk<W, kElements>::load(static_cast<W const*>(p.weight) + first + n * step);
    }
  }
  Ahead<Vectors*(Summed ? 2 : 1)> ahead;
  auto const ask = [&](unsigned number) {
    bool const there = number < unsigned(p.rows);
    int const row = there ? int(number) : 0;
    T const* const x = static_cast<T const*>(p.x) + offset_of(p, row, p.x_stride);
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      int const column = first + n * step;
      ahead.ask(n, x + column, there && column < p.dim);
    }
    if constexpr (Summed) {
      T const* const residual = static_cast<T const*>(p.residual) + offset_of(p, row, p.residual_stride);
#pragma unroll
      for (int n = 0; n < Vectors; ++n) {
        int const column = first + n * step;
        ahead.ask(Vectors + n, residual + column, there && column < p.dim);
      }
    }
    ahead.next(p.stages);
  };
  unsigned const turn = gridDim.x * at.groups;
  unsigned row = blockIdx.x * at.groups + at.group, asked = row;
  for (int n = 0; n < p.stages; ++n, asked += turn) ask(asked);
  bool odd = false;
  for (unsigned begin = blockIdx.x * at.groups; begin < unsigned(p.rows); begin += turn, row += turn, asked += turn) {
    ahead.wait(p.stages);
    int const end = row < unsigned(p.rows) ? p.dim : 0;  // lanes without a row go along
    Values x[Vectors];
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      x[n] = ahead.template values<T>(n);
      if constexpr (Summed) {
        add(x[n], ahead.template values<T>(Vectors + n));
        if (first + n * step < end) {
          x[n].store(static_cast<T*>(p.sum) + offset_of(p, int(row), p.sum_stride) + first + n * step);
        }
      }
      squares = squares_of<T>(x[n], squares);
    }
    ask(asked);
    float const rstd = rstd_of(p, squares, shared[odd]);
    odd = !odd;
    if (end == 0) continue;
    if (p.rstd && at.lane == 0) p.rstd[row] = rstd;
    int64_t const to = offset_of(p, int(row), p.out_stride);
#pragma unroll
    for (int n = 0; n < Vectors; ++n) {
      int const column = first + n * step;
      if (column < end) norm_vector<T, W>(p, x[n], weight[n], rstd, to, column);
    }
  }
  ahead.template wait_but<0>();
}

template <class T, class W, int Vectors>
__device__ void norm_by_rows(RmsNormParams const& p, float (*shared)[RmsNormParams::kMaxThreads / 32]) {
  if (p.stages == 0) return norm_kept<T, W>(p, shared[0]);
  p.residual ? norm_ahead<T, W, true, Vectors>(p, shared) : norm_ahead<T, W, false, Vectors>(p, shared);
}

/// Rows that are read twice.
template <class T, int Width>
__device__ void norm_long(RmsNormParams const& p, float* shared) {
  using Values = Chunk<T, Width>;
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

template <class T, int Vectors = RmsNormParams::kVectors>
__device__ void rms_norm(RmsNormParams const& p) {
  __shared__ float shared[2][RmsNormParams::kMaxThreads / 32];  // by turns, so that one barrier a row is enough
  begin_rows();
  if (p.walk == Walk::vectors) return norm_long<T, kWidth<T>>(p, shared[0]);
  if (p.walk == Walk::elements) return norm_long<T, 1>(p, shared[0]);
  if (p.weight_type == kTypeOf<T>) return norm_by_rows<T, T, Vectors>(p, shared);
  if constexpr (!std::is_same_v<T, float>) norm_by_rows<T, float, Vectors>(p, shared);
}

}  // namespace cutlass_fmha
