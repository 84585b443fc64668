// Gated units (Shazeer 2020): an activation of one tensor times another, and its gradients.
#pragma once

#include <cmath>

#include "../core/approximate.cuh"
#include "rows.cuh"

namespace cutlass_fmha {

/// 1 / (1 + exp(-x)). For results of 16 bits by the exponential and the quotient that the hardware has.
template <class T>
__device__ float sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>) return 1.f / (1.f + expf(-x));
  return reciprocal_approx(1.f + exp2_approx(-kLog2e * x));
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
      inner = x * fmaf(kTwice * kCube, x * x, kTwice);
      step = fmaf(3.f * kTwice * kCube, x * x, kTwice);
    }
    float const s = sigmoid<T>(inner);
    return {x * s, s * fmaf(x * (1.f - s), step, 1.f)};
  }
}

/// Where chunk `number` of a tensor stands.
template <int Width, bool Flat>
__device__ int64_t chunk_at(GatedParams const& p, int number, Strides const& s) {
  int const row = p.by_chunks.quotient(number);
  return (Flat ? row * s.head : offset_of(p, row, s)) + int64_t(number - row * p.chunks) * Width;
}

template <class T, int Width, int Count, bool Flat, Activation Kind>
__device__ void gated_chunks(GatedParams const& p) {
  int const step = blockDim.x, first = int(blockIdx.x * step) * Count + int(threadIdx.x), all = p.rows * p.chunks;
  auto const at = [&](int n, Strides const& s) { return chunk_at<Width, Flat>(p, first + n * step, s); };
  Chunk<T, Width> gate[Count], up[Count];
  T const *first_gate = static_cast<T const*>(p.gate) + at(0, p.gate_stride),
          *first_up = static_cast<T const*>(p.up) + at(0, p.up_stride);
  auto const prefetch = [&] {
    if (first >= all) return;
    prefetch_to_l2(first_gate);
    prefetch_to_l2(first_up);
  };
  wait_prefetching(all > 0, p.early, prefetch, first_gate, first_up);
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (first + n * step >= all) continue;
    gate[n] = Chunk<T, Width>::load(n == 0 ? first_gate : static_cast<T const*>(p.gate) + at(n, p.gate_stride));
    up[n] = Chunk<T, Width>::load(n == 0 ? first_up : static_cast<T const*>(p.up) + at(n, p.up_stride));
  }
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (first + n * step >= all) continue;
    float g[Width], u[Width];
    gate[n].read(g);
    up[n].read(u);
#pragma unroll
    for (int k = 0; k < Width; ++k) u[k] *= activate<T, Kind>(g[k]).value;
    store_rounded<T>(p.out, at(n, p.out_stride), u);
  }
}

template <class T, int Width, int Count, bool Flat, Activation Kind>
__device__ void gated_chunks(GatedBackwardParams const& p) {
  int const step = blockDim.x, first = int(blockIdx.x * step) * Count + int(threadIdx.x), all = p.rows * p.chunks;
  auto const at = [&](int n, Strides const& s) { return chunk_at<Width, Flat>(p, first + n * step, s); };
  Chunk<T, Width> gate[Count], up[Count], dout[Count];
  T const *first_gate = static_cast<T const*>(p.gate) + at(0, p.gate_stride),
          *first_up = static_cast<T const*>(p.up) + at(0, p.up_stride),
          *first_dout = static_cast<T const*>(p.dout) + at(0, p.dout_stride);
  auto const prefetch = [&] {
    if (first >= all) return;
    prefetch_to_l2(first_gate);
    prefetch_to_l2(first_up);
    prefetch_to_l2(first_dout);
  };
  start_dependents();  // so late where blocks share SMs: those that start before gather on the SMs that are free first
  wait_prefetching(all > 0, p.early, prefetch, first_gate, first_up, first_dout);
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (first + n * step >= all) continue;
    gate[n] = Chunk<T, Width>::load(n == 0 ? first_gate : static_cast<T const*>(p.gate) + at(n, p.gate_stride));
    up[n] = Chunk<T, Width>::load(n == 0 ? first_up : static_cast<T const*>(p.up) + at(n, p.up_stride));
    dout[n] = Chunk<T, Width>::load(n == 0 ? first_dout : static_cast<T const*>(p.dout) + at(n, p.dout_stride));
  }
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    if (first + n * step >= all) continue;
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
    store_rounded<T>(p.dgate, at(n, p.dgate_stride), g);
    store_rounded<T>(p.dup, at(n, p.dup_stride), d);
    if (p.out) store_rounded<T>(p.out, at(n, p.out_stride), product);
  }
}

template <class T, Activation Kind, int Vectors, class Params>
__device__ void gated_by(Params const& p) {
  if (!p.aligned) return gated_chunks<T, 1, Params::kElements, false, Kind>(p);
  if (!p.flat) return gated_chunks<T, kWidth<T>, Vectors, false, Kind>(p);
  gated_chunks<T, kWidth<T>, Vectors, true, Kind>(p);
}

template <class T, int Vectors, class Params>
__device__ void gated_any(Params const& p) {
  if (p.activation == Activation::silu) return gated_by<T, Activation::silu, Vectors>(p);
  if (p.activation == Activation::gelu) return gated_by<T, Activation::gelu, Vectors>(p);
  gated_by<T, Activation::gelu_tanh, Vectors>(p);
}

template <class T, int Vectors = GatedParams::kVectors>
__device__ void gated(GatedParams const& p) {
  start_dependents();
  gated_any<T, Vectors>(p);
}

template <class T, int Vectors = GatedBackwardParams::kVectors>
__device__ void gated_backward(GatedBackwardParams const& p) {
  if (p.alone) start_dependents();
  gated_any<T, Vectors>(p);
}

}  // namespace cutlass_fmha
