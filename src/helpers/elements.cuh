// Elements on their way between memory and registers, several at a time, and which row of a tensor a number is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace cutlass_fmha {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T rounded(float x);
template <>
__device__ inline float rounded(float x) {
  return x;
}
template <>
__device__ inline __half rounded(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 rounded(float x) {
  return __float2bfloat16_rn(x);
}

/// What a thread moves at once, unchanged: 4-byte words, or one element.
template <int Bytes>
struct WordsOf {
  using Type = uint4;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<4> {
  using Type = uint32_t;
};
template <>
struct WordsOf<2> {
  using Type = uint16_t;
};

/// `Width` elements, together 2, 4, 8 or a multiple of 16 bytes, at an address that is a multiple of that or of 16.
template <class T, int Width>
struct Chunk {
  using Words = typename WordsOf<Width* int(sizeof(T))>::Type;
  static constexpr int kCount = Width * int(sizeof(T)) / int(sizeof(Words));

  Words words[kCount];

  __device__ static Chunk load(T const* from) {
    Chunk chunk;
#pragma unroll
    for (int n = 0; n < kCount; ++n) chunk.words[n] = reinterpret_cast<Words const*>(from)[n];
    return chunk;
  }

  __device__ void store(T* to) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) reinterpret_cast<Words*>(to)[n] = words[n];
  }

  __device__ void read(float (&x)[Width]) const {
    T elements[Width];
    memcpy(elements, words, sizeof(words));
#pragma unroll
    for (int n = 0; n < Width; ++n) x[n] = to_float(elements[n]);
  }

  __device__ void write(float const (&x)[Width]) {
    T elements[Width];
#pragma unroll
    for (int n = 0; n < Width; ++n) elements[n] = rounded<T>(x[n]);
    memcpy(words, elements, sizeof(words));
  }
};

/// Elements that a thread moves at once where everything is aligned.
template <class T>
constexpr int kWidth = 16 / int(sizeof(T));

struct Row {
  int batch, position, head;

  __device__ int64_t offset(Strides const& s) const { return batch * s.batch + position * s.seqlen + head * s.head; }
  __device__ int64_t offset(LseStrides const& s) const { return batch * s.batch + head * s.head + position * s.seqlen; }
};

/// Row `number` of [batch, seqlen, num_heads].
__device__ inline Row row_of(int number, Divisor const& by_num_heads, int num_heads, Divisor const& by_seqlen,
                             int seqlen) {
  int const token = by_num_heads.quotient(number);
  int const batch = by_seqlen.quotient(token);
  return {batch, token - batch * seqlen, number - token * num_heads};
}

/// The sequence that a row is of, -1 for none, and its number there.
struct Token {
  int sequence, position;
};

__device__ inline Token token_of(int const* cu_seqlens, int sequences, Row const& row) {
  if (!cu_seqlens) return {row.batch, row.position};
  int low = 0, high = sequences;  // the row is of none of the sequences before low and from high on
  while (high - low > 1) {
    int const middle = (low + high) / 2;
    (cu_seqlens[middle] <= row.position ? low : high) = middle;
  }
  int const begin = cu_seqlens[low];
  bool const inside = sequences > 0 && begin <= row.position && row.position < cu_seqlens[low + 1];
  return {inside ? low : -1, row.position - begin};
}

/// The part of a row that a thread has where 2^lanes_log2 threads share one: chunks lane, lane + lanes, ...
struct Lane {
  int64_t row;
  int lane, lanes;

  __device__ explicit Lane(int lanes_log2, int threads = kHelperThreads) : lanes(1 << lanes_log2) {
    int64_t const thread = int64_t(blockIdx.x) * threads + threadIdx.x;
    row = thread >> lanes_log2;
    lane = int(thread) & (lanes - 1);
  }
};

}  // namespace cutlass_fmha
