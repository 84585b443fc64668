// Whether rows can be moved in whole vectors, and how many threads and blocks they need: of every launch beside
// attention.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <stdexcept>
#include <string>

#include "params.h"

namespace cutlass_fmha {

constexpr int kVectorBytes = 16;
constexpr int kMaxLanesLog2 = 5;  // a warp

/// The stride of a dimension of size 1 is never used, and may be anything: 0.
inline Strides used(Strides s, int64_t batch, int64_t seqlen, int64_t heads) {
  return {batch > 1 ? s.batch : 0, seqlen > 1 ? s.seqlen : 0, heads > 1 ? s.head : 0};
}

inline bool aligned(void const* pointer, int64_t strides_in_bytes = 0) {
  return (int64_t(reinterpret_cast<uintptr_t>(pointer)) | strides_in_bytes) % kVectorBytes == 0;
}

/// Whether the rows of a tensor are made of whole, aligned vectors.
inline bool is_aligned(void const* pointer, Strides const& s, int head_dim, int bytes) {
  return aligned(pointer, (s.batch | s.seqlen | s.head | head_dim) * bytes);
}

/// Whether a vector of a row is rotated with whole vectors, or with halves of them, and has no pair's half of another.
inline bool is_aligned(Rotary const& rotary, int bytes) {
  if (!rotary.cos) return true;
  int const table_bytes = rotary.float32 ? 4 : bytes, width = kVectorBytes / bytes;
  return aligned(rotary.cos, rotary.cos_stride * table_bytes) && aligned(rotary.sin, rotary.sin_stride * table_bytes) &&
         (rotary.interleaved ? rotary.dim : rotary.dim / 2) % width == 0;
}

/// How many threads share a row: as many as it has chunks, rounded up to a power of two, a warp at most.
inline int lanes_log2(int head_dim, bool vectors, int bytes) {
  int const chunks = std::max(1, ceil_div(head_dim, vectors ? kVectorBytes / bytes : 1));
  return std::min(kMaxLanesLog2, int(std::bit_width(unsigned(chunks - 1))));
}

/// Blocks for as many rows as there are, whose numbers are divided as 31-bit ones.
inline dim3 grid_of(int64_t rows, int lanes_log2) {
  if (rows > INT_MAX) {
    throw std::invalid_argument("a tensor has " + std::to_string(rows) + " rows (batch x seqlen x heads); " +
                                "at most 2147483647 can be combined, merged, rotated or appended");
  }
  return dim3(unsigned(((rows << lanes_log2) + kHelperThreads - 1) / kHelperThreads));
}

}  // namespace cutlass_fmha
