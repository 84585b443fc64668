// Rows on their way between memory and registers, and sums over the lanes that share one.
#pragma once

#include <type_traits>

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

__device__ inline Row row_of(RowsParams const& p, int number) {
  return row_of(number, p.by_inner, int(p.sizes[2]), p.by_middle, int(p.sizes[1]));
}

/// The same sum in all of the 2^lanes_log2 lanes that share a row, in a fixed order. Those beyond a warp meet in
/// `shared`, [Threads / 32], which nobody reads any more.
template <int Threads>
__device__ float sum_over_lanes(float x, int lanes_log2, float* shared) {
  for (int other = (1 << min(lanes_log2, 5)) / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  if (lanes_log2 <= 5) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  int const warps = 1 << (lanes_log2 - 5), first = int(threadIdx.x) / 32 / warps * warps;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < Threads / 32; ++n) sum += n < warps ? shared[first + n] : 0.f;
  return sum;
}

}  // namespace cutlass_fmha
