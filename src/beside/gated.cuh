// Gated units (Shazeer 2020): an activation of one tensor times another, and its gradients.
#pragma once

#include <cmath>

#include "rows.cuh"

namespace cutlass_fmha {

/// 1 / (1 + exp(-x)). For results of 16 bits by the exponential and the quotient that the hardware has.
template <class T>
__device__ float sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>) return 1.f / (1.f + expf(-x));
  return __fdividef(1.f, 1.f + __expf(-x));
}

struct ValueAndSlope {
  float value, slope;
};

/// An activation and its derivative: x Phi(x), or x sigmoid(inner(x)). gelu's 1 + tanh(y) is 2 sigmoid(2 y).
template <class T, Activation Kind>
__device__ ValueAndSlope activate(float x) {
  if constexpr (Kind == Activation::gelu) {
    float const normal = fmaf(0.5f, erff(x * 0.70710678f), 0.5f);
    return {x * normal, fmaf(x, 0.39894228f * expf(-0.5f * x * x), normal)};
  } else {
    constexpr float kTwice = 1.5957691f, kCube = 0.044715f;  // 2 sqrt(2 / pi)
    float inner = x, step = 1.f;
    if constexpr (Kind == Activation::gelu_tanh) {
      inner = kTwice * fmaf(kCube * x * x, x, x);
      step = kTwice * fmaf(3.f * kCube * x, x, 1.f);
    }
    float const s = sigmoid<T>(inner);
    return {x * s, s * fmaf(x * (1.f - s), step, 1.f)};
  }
}

/// Which chunks a thread has, and where they stand.
template <int Width, int Count>
struct GatedChunks {
  GatedParams const& p;
  int const first;

  __device__ explicit GatedChunks(GatedParams const& params)
      : p(params), first(int(blockIdx.x) * (kHelperThreads * Count) + int(threadIdx.x)) {}

  __device__ bool has(int n) const { return first + n * kHelperThreads < p.rows * p.chunks; }

  __device__ int64_t at(int n, Strides const& s) const {
    int const number = first + n * kHelperThreads, row = p.by_chunks.quotient(number);
    return row_of(p, row).offset(s) + int64_t(number - row * p.chunks) * Width;
  }
};

template <class T, int Width, int Count, Activation Kind>
__device__ void gated_chunks(GatedParams const& p) {
  GatedChunks<Width, Count> const mine(p);
  Chunk<T, Width> gate[Count], up[Count];
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (!mine.has(n)) continue;
    gate[n] = load_once<T, Width>(static_cast<T const*>(p.gate) + mine.at(n, p.gate_stride));
    up[n] = load_once<T, Width>(static_cast<T const*>(p.up) + mine.at(n, p.up_stride));
  }
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (!mine.has(n)) continue;
    float g[Width], u[Width];
    gate[n].read(g);
    up[n].read(u);
#pragma unroll
    for (int k = 0; k < Width; ++k) u[k] *= activate<T, Kind>(g[k]).value;
    store_rounded<T>(p.out, mine.at(n, p.out_stride), u);
  }
}

template <class T, int Width, int Count, Activation Kind>
__device__ void gated_backward_chunks(GatedBackwardParams const& p) {
  GatedChunks<Width, Count> const mine(p);
  Chunk<T, Width> gate[Count], up[Count], dout[Count];
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (!mine.has(n)) continue;
    gate[n] = load_once<T, Width>(static_cast<T const*>(p.gate) + mine.at(n, p.gate_stride));
    up[n] = load_once<T, Width>(static_cast<T const*>(p.up) + mine.at(n, p.up_stride));
    dout[n] = load_once<T, Width>(static_cast<T const*>(p.dout) + mine.at(n, p.dout_stride));
  }
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (!mine.has(n)) continue;
    float g[Width], u[Width], d[Width], product[Width];
    gate[n].read(g);
    up[n].read(u);
    dout[n].read(d);
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      ValueAndSlope const found = activate<T, Kind>(g[k]);
      product[k] = found.value * u[k];
      g[k] = d[k] * u[k] * found.slope;
      d[k] *= found.value;
    }
    store_rounded<T>(p.dgate, mine.at(n, p.dgate_stride), g);
    store_rounded<T>(p.dup, mine.at(n, p.dup_stride), d);
    if (p.out) store_rounded<T>(p.out, mine.at(n, p.out_stride), product);
  }
}

template <class T, Activation Kind>
__device__ void gated_by(GatedParams const& p) {
  if (!p.aligned) return gated_chunks<T, 1, GatedParams::kVectors, Kind>(p);
  if (!p.many) return gated_chunks<T, kWidth<T>, 1, Kind>(p);
  gated_chunks<T, kWidth<T>, GatedParams::kVectors, Kind>(p);
}

template <class T, Activation Kind>
__device__ void gated_by(GatedBackwardParams const& p) {
  if (!p.aligned) return gated_backward_chunks<T, 1, GatedBackwardParams::kVectors, Kind>(p);
  if (!p.many) return gated_backward_chunks<T, kWidth<T>, 1, Kind>(p);
  gated_backward_chunks<T, kWidth<T>, GatedBackwardParams::kVectors, Kind>(p);
}

template <class T, class Params>
__device__ void gated_any(Params const& p) {
  if (p.activation == Activation::silu) return gated_by<T, Activation::silu>(p);
  if (p.activation == Activation::gelu) return gated_by<T, Activation::gelu>(p);
  gated_by<T, Activation::gelu_tanh>(p);
}

template <class T>
__device__ void gated(GatedParams const& p) {
  gated_any<T>(p);
}

template <class T>
__device__ void gated_backward(GatedBackwardParams const& p) {
  gated_any<T>(p);
}

}  // namespace cutlass_fmha
