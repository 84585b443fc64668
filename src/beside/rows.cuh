// Rows on their way between memory and registers, and sums over the lanes that share one.
#pragma once

#include <type_traits>

#include "../core/dependents.cuh"
#include "../helpers/elements.cuh"
#include "params.h"

namespace cutlass_fmha {

template <class T>
constexpr DType kTypeOf = std::is_same_v<T, float>    ? DType::float32
                          : std::is_same_v<T, __half> ? DType::float16
                                                      : DType::bfloat16;

/// What is read once, and need not stay in a cache.
template <class T, int Width>
__device__ Chunk<T, Width> load_once(T const* from) {
  using Values = Chunk<T, Width>;
  if constexpr (sizeof(typename Values::Words) == 16) {
    Values chunk;
#pragma unroll
    for (int n = 0; n < Values::kCount; ++n) chunk.words[n] = __ldcs(reinterpret_cast<uint4 const*>(from) + n);
    return chunk;
  } else {
    return Values::load(from);
  }
}

/// Elements at, at + 1, ... of a tensor whose type only the launch knows: T or float, where T is float any.
template <class T, int Width>
__device__ void read_as(DType type, void const* from, int64_t at, float (&x)[Width]) {
  if (type == kTypeOf<T>) return Chunk<T, Width>::load(static_cast<T const*>(from) + at).read(x);
  if constexpr (!std::is_same_v<T, float>) {
    Chunk<float, Width>::load(static_cast<float const*>(from) + at).read(x);
  } else if (type == DType::float16) {
    Chunk<__half, Width>::load(static_cast<__half const*>(from) + at).read(x);
  } else {
    Chunk<__nv_bfloat16, Width>::load(static_cast<__nv_bfloat16 const*>(from) + at).read(x);
  }
}

template <class U, int Width>
__device__ void store_rounded(void* to, int64_t at, float const (&x)[Width]) {
  Chunk<U, Width> chunk;
  chunk.write(x);
  chunk.store(static_cast<U*>(to) + at);
}

/// The other way.
template <class T, int Width>
__device__ void write_as(DType type, void* to, int64_t at, float const (&x)[Width]) {
  if (type == kTypeOf<T>) return store_rounded<T>(to, at, x);
  if constexpr (!std::is_same_v<T, float>) {
    store_rounded<float>(to, at, x);
  } else if (type == DType::float16) {
    store_rounded<__half>(to, at, x);
  } else {
    store_rounded<__nv_bfloat16>(to, at, x);
  }
}

/// Where row `number` of a tensor begins.
__device__ inline int64_t offset_of(RowsParams const& p, int number, Strides const& s) {
  if (p.flat) return number * s.head;
  return row_of(number, p.by_inner, int(p.sizes[2]), p.by_middle, int(p.sizes[1])).offset(s);
}

/// What a kernel on rows begins with, before it reads or writes anything: the next one may get ready while it runs.
__device__ inline void begin_rows() {
  start_dependents();
  wait_for_kernels_ahead();
}

/// The same sum in all of the 2^lanes_log2 lanes that share a row, in a fixed order. Those beyond a warp meet in
/// `shared`, a float for each of the block's warps, which nobody reads any more.
__device__ inline float sum_over_lanes(float x, int lanes_log2, float* shared) {
  if (lanes_log2 < 5) {
    for (int other = (1 << lanes_log2) / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  if (lanes_log2 == 5) return x;
  int const warps = 1 << (lanes_log2 - 5), warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = shared[(warp & -warps) + (lane & (warps - 1))];
  for (int other = warps / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

}  // namespace cutlass_fmha
