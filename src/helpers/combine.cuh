// States of attention, an output and its log-sum-exp each, made one: all parts of split keys, or two of them.
#pragma once

#include <cmath>

#include "../core/dependent_launch.cuh"
#include "../core/merge.cuh"
#include "elements.cuh"

namespace cutlass_fmha {

/// What a thread block that combines a row passes between its threads.
struct CombineShared {
  static constexpr int kWarps = kHelperThreads / 32;

  alignas(16) float o[kWarps][CombineParams::kMaxHeadDim];
  float weights[kWarps][CombineParams::kMaxSplits];  ///< each warp has its own, so that none waits for another
};

/// Of `splits` values that are `stride` apart, without their low parts, the same in every lane; leaves the weight of
/// each in `weights`. `lse`: this lane's first value. `low`: null, or what is to be added to it.
__device__ inline MergedLse total_of(float const* lse, float const* low, int64_t stride, int splits, float* weights) {
  constexpr int kParts = CombineParams::kMaxSplits / 32;
  int const lane = threadIdx.x % 32;
  float part[kParts], rest[kParts], reference = -INFINITY, sum = 0.f;
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    bool const there = n * 32 + lane < splits;
    part[n] = there ? lse[n * 32 * stride] : -INFINITY;
    rest[n] = there && low != nullptr ? low[n * 32 * stride] : 0.f;  // at once: the two take as long as one
  }
#pragma unroll
  for (int n = 0; n < kParts; ++n) reference = fmaxf(reference, part[n]);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, other));
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    if (n * 32 >= splits) break;
    float w = part[n] == -INFINITY ? 0.f : MergedLse::weight(part[n], reference);  // a NaN stays one
    if (w != 0.f) w *= expf(rest[n]);
    weights[n * 32 + lane] = w;
    sum += w;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  __syncwarp();
  return {reference, sum};
}

/// A lane's columns of every fourth part of a row, a few parts at a time: all of their loads are on their way at once.
template <int Width>
struct PartialRow {
  static constexpr int kChunks = CombineParams::kMaxHeadDim / (32 * Width);
  static constexpr int kParts = 4;

  int const splits, head_dim_v;
  int64_t const stride;       ///< from part to part
  float const* from[kParts];  ///< this lane's first column
  Chunk<float, Width> part[kParts][kChunks];

  /// `row`: where it stands in a part.
  __device__ PartialRow(CombineParams const& p, int64_t row, int first)
      : splits(p.splits), head_dim_v(p.head_dim_v), stride(p.lse_rows * p.partial_dim) {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      from[n] = settled(p.partial_o + row * p.partial_dim + (first + n * CombineShared::kWarps) * stride + column(0));
    }
  }

  __device__ static int column(int chunk) { return (chunk * 32 + int(threadIdx.x % 32)) * Width; }

  /// Parts `first`, first + 4 and so on; each call those after the last one's.
  __device__ void load(int first) {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      int const split = first + n * CombineShared::kWarps;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (split >= splits || column(c) >= head_dim_v) continue;
        part[n][c] = Chunk<float, Width>::load(from[n] + c * 32 * Width);
      }
      from[n] += kParts * CombineShared::kWarps * stride;
    }
  }

  /// Adds them to `acc`. A weight of 0 is that of an empty part, whose o may be anything.
  __device__ void add(float const* weights, int first, float (&acc)[kChunks][Width]) const {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      int const split = first + n * CombineShared::kWarps;
      float const w = split < splits ? weights[split] : 0.f;
      if (w == 0.f) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float x[Width];
        part[n][c].read(x);
#pragma unroll
        for (int k = 0; k < Width; ++k) acc[c][k] = fmaf(w, x[k], acc[c][k]);
      }
    }
  }
};

/// One row of the output, by a whole block: each warp adds up every fourth part, and the first warp the four sums.
template <class T, int Width>
__device__ void combine_row(CombineParams const& p, Row const& row, CombineShared& shared) {
  using Partial = PartialRow<Width>;
  constexpr int kWarps = CombineShared::kWarps, kChunks = Partial::kChunks;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t const at = row.batch * p.lse_batch_stride + row.head * p.lse_head_stride + row.position;
  Partial partial(p, at, warp);
  int64_t const lane_at = at + lane * p.lse_rows;
  float const* const lse = settled(p.partial_lse + lane_at);
  float const* const low = settled(p.partial_low ? p.partial_low + lane_at : nullptr);
  T* const to = settled(static_cast<T*>(p.o) + row.offset(p.o_stride) + Partial::column(0));
  if (p.splits > 0) wait_for_kernels_ahead();  // as it always is

  partial.load(warp);  // without waiting for the weights
  MergedLse const total = total_of(lse, low, p.lse_rows, p.splits, shared.weights[warp]);
  float acc[kChunks][Width] = {};
  for (int first = warp; first < p.splits; first += Partial::kParts * kWarps) {
    if (first > warp) partial.load(first);
    partial.add(shared.weights[warp], first, acc);
  }

#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    Chunk<float, Width> chunk;
    chunk.write(acc[c]);
    chunk.store(shared.o[warp] + Partial::column(c));
  }
  __syncthreads();
  if (warp > 0) return;

  float const factor = total.empty() ? 0.f : 1.f / total.sum;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (Partial::column(c) >= p.head_dim_v) continue;
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      float x[Width];
      Chunk<float, Width>::load(shared.o[other] + Partial::column(c)).read(x);
#pragma unroll
      for (int k = 0; k < Width; ++k) acc[c][k] += x[k];
    }
#pragma unroll
    for (int k = 0; k < Width; ++k) acc[c][k] *= factor;
    Chunk<T, Width> chunk;
    chunk.write(acc[c]);
    chunk.store(to + c * 32 * Width);
  }
  if (p.lse && threadIdx.x == 0) p.lse[at] = total.lse();
}

template <class T>
__device__ void combine(CombineParams const& p) {
  __shared__ CombineShared shared;
  Row const row = row_of(int(blockIdx.x), p.by_num_heads, p.num_heads, p.by_seqlen_q, p.seqlen_q);
  start_dependents();
  if (p.vectors) {
    combine_row<T, 4>(p, row, shared);
  } else {
    combine_row<T, 1>(p, row, shared);
  }
}

template <class T, int Width>
__device__ void merge_row(MergeParams const& p, Row const& row, Lane const& lane) {
  T const* const a = static_cast<T const*>(p.o_a) + row.offset(p.o_a_stride);
  T const* const b = static_cast<T const*>(p.o_b) + row.offset(p.o_b_stride);
  T* const o = static_cast<T*>(p.o) + row.offset(p.o_stride);
  float const lse_a = p.lse_a[row.offset(p.lse_a_stride)], lse_b = p.lse_b[row.offset(p.lse_b_stride)];
  bool const no_a = lse_a == -INFINITY, no_b = lse_b == -INFINITY;
  float const reference = fmaxf(lse_a, lse_b);
  float const weight_a = MergedLse::weight(lse_a, reference), weight_b = MergedLse::weight(lse_b, reference);
  MergedLse const merged{reference, weight_a + weight_b};
  float const factor = 1.f / merged.sum;

  for (int column = lane.lane * Width; column < p.head_dim_v; column += lane.lanes * Width) {
    Chunk<T, Width> chunk{};
    if (no_a && no_b) {
      // zeros
    } else if (no_a || no_b) {
      chunk = Chunk<T, Width>::load((no_a ? b : a) + column);
    } else {
      float x[Width], y[Width];
      Chunk<T, Width>::load(a + column).read(x);
      Chunk<T, Width>::load(b + column).read(y);
      // Each product is rounded, so that the two sides can be exchanged.
#pragma unroll
      for (int n = 0; n < Width; ++n) {
        x[n] = __fadd_rn(__fmul_rn(weight_a, x[n]), __fmul_rn(weight_b, y[n])) * factor;
      }
      chunk.write(x);
    }
    chunk.store(o + column);
  }
  if (lane.lane == 0) {
    p.lse[row.offset(p.lse_stride)] = no_a ? lse_b : no_b ? lse_a : merged.lse_of_some();
  }
}

template <class T>
__device__ void merge(MergeParams const& p) {
  Lane const lane(p.lanes_log2);
  if (lane.row >= int64_t(p.batch) * p.seqlen_q * p.num_heads) return;
  Row const row = row_of(int(lane.row), p.by_num_heads, p.num_heads, p.by_seqlen_q, p.seqlen_q);
  if (p.vectors) {
    merge_row<T, kWidth<T>>(p, row, lane);
  } else {
    merge_row<T, 1>(p, row, lane);
  }
}

}  // namespace cutlass_fmha
