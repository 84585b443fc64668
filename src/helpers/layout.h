// How the tensors of the kernels beside attention lie: which strides count, and whether rows are of whole vectors.
#pragma once

#include <cstdint>

#include "../params.h"

namespace cutlass_fmha {

constexpr int kVectorBytes = 16;

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

}  // namespace cutlass_fmha
