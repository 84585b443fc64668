// Rows on their way between memory and registers, and sums over the lanes that share one.
#pragma once

#include <type_traits>

#include "../core/dependents.cuh"
#include "../core/registers.cuh"
#include "../helpers/elements.cuh"
#include "params.h"

namespace cutlass_fmha {

template <class T>
constexpr DType kTypeOf = std::is_same_v<T, float>    ? DType::float32
                          : std::is_same_v<T, __half> ? DType::float16
                                                      : DType::bfloat16;

/// chunk.read(x), with an instruction for each bfloat16: the compiler takes two where it is a word's high half.
template <class T, int Width>
__device__ void read(Chunk<T, Width> const& chunk, float (&x)[Width]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && Width % 8 == 0) {
#pragma unroll
    for (int n = 0; n < Width / 8; ++n) {
      uint32_t const words[] = {chunk.words[n].x, chunk.words[n].y, chunk.words[n].z, chunk.words[n].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        x[8 * n + 2 * k] = __uint_as_float(words[k] << 16);
        x[8 * n + 2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
      }
    }
  } else {
    chunk.read(x);
  }
}

/// Keeps the compiler from having made floats of it before.
template <class T, int Width>
__device__ void packed(Chunk<T, Width>& chunk) {
  uint32_t words[(sizeof(chunk) + 3) / 4] = {};
  memcpy(words, chunk.words, sizeof(chunk));
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word)::"memory");
  memcpy(chunk.words, words, sizeof(chunk));
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

/// Settles an address, of which the compiler goes on to know that it is no other memory's.
template <class T>
__device__ void keep_address(T*& x) {
  x = static_cast<T*>(__cvta_global_to_generic(reinterpret_cast<uint64_t>(settled(x))));
}

/// wait_for_kernels_ahead() once addresses are known: the compiler puts off what no branch stands before. `launched` is
/// always true, as the compiler must not know.
template <class... T>
__device__ void wait_with(bool launched, T*&... addresses) {
#if __CUDA_ARCH__ >= 900
  (keep_address(addresses), ...);
  if (launched) wait_for_kernels_ahead();
#endif
}

/// The same where blocks that may have to wait, `early` of them, prefetch() meanwhile: the memory has little to do
/// while the last blocks of the kernel ahead end, and nothing from there until rows arrive.
template <class Prefetch, class... T>
__device__ void wait_prefetching(bool launched, int early, Prefetch const& prefetch, T*&... addresses) {
#if __CUDA_ARCH__ >= 900
  (keep_address(addresses), ...);
  if (launched) {
    if (int(blockIdx.x) < early) prefetch();
    wait_for_kernels_ahead();
  }
#endif
}

/// Lanes that share a row, one of the block's groups of them.
struct Group {
  int lanes, lane, group, groups;

  __device__ explicit Group(int lanes_log2)
      : lanes(1 << lanes_log2),
        lane(int(threadIdx.x) & (lanes - 1)),
        group(int(threadIdx.x) >> lanes_log2),
        groups(int(blockDim.x) >> lanes_log2) {}
};

/// Vectors on their way to a thread, so that memory is busy while a block adds up a row: a turn has `Vectors` of them,
/// and p.stages turns are asked for ahead. Each thread has places of its own, so nobody waits for anybody's copies.
template <int Vectors>
struct Ahead {
  int stage = 0;

  /// Vector n of the turn that is read next, or, once that was read, asked for next.
  __device__ uint4& place(int n) const {
    extern __shared__ uint4 ring[];
    return ring[(stage * Vectors + n) * int(blockDim.x) + int(threadIdx.x)];
  }

  /// The same as elements, once they were waited for.
  template <class T>
  __device__ Chunk<T, kWidth<T>> values(int n) const {
    Chunk<T, kWidth<T>> found;
    found.words[0] = place(n);
    return found;
  }

  /// Asks for a vector; zeros if it isn't there.
  __device__ void ask(int n, void const* from, bool there) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(&place(n)))),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  }

  /// All of a turn are asked for.
  __device__ void next(int stages) {
    asm volatile("cp.async.commit_group;" ::: "memory");
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

  /// Until the oldest of the turns asked for is there.
  __device__ static void wait(int stages) {
    if (stages == 3) return wait_but<2>();  // the numbers that launch() comes to
    if (stages == 2) return wait_but<1>();
    wait_but<0>();
  }

  template <int Pending>
  __device__ static void wait_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
  }
};

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
  // A barrier of these lanes alone would have a number that only the launch knows: a block then takes all 16, and few
  // of them fit an SM.
  __syncthreads();
  x = shared[(warp & -warps) + (lane & (warps - 1))];
  for (int other = warps / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

}  // namespace cutlass_fmha
