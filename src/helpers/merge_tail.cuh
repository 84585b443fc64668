// The tail of a launch of a plain row: what several blocks have of the same query rows becomes O and LSE.
#pragma once

#include "../core/merge.cuh"
#include "elements.cuh"

namespace cutlass_fmha {

/// Four neighbouring numbers of a row of O.
template <class T>
__device__ void merge_tail(TailParams const& p) {
  int const chunks = p.head_dim / 4, item = int(blockIdx.x) * kHelperThreads + int(threadIdx.x);
  int const rows = p.tail.tiles * p.tile_m, row = item / chunks, dimension = item % chunks * 4;
  int const m_blocks = ceil_div(p.seqlen_q, p.tile_m), tile = p.tail.begin + row / p.tile_m;
  int const sequence = tile / m_blocks, query = tile % m_blocks * p.tile_m + row % p.tile_m;
  if (row >= rows || query >= p.seqlen_q) return;

  MergedState merged;
  float o[4] = {};
  for (int part = 0; part < p.tail.parts; ++part) merged.see(p.tail.maxima[part * rows + row]);
  for (int part = 0; part < p.tail.parts; ++part) {
    int64_t const at = part * rows + row;
    float const weight = merged.weight(p.tail.maxima[at], p.scale_log2);
    float4 const x = *reinterpret_cast<float4 const*>(p.tail.o + at * p.head_dim + dimension);
    merged.add(weight, p.tail.sums[at]);
    add_weighted(o, weight, x);
  }
  float const inverse = 1.f / merged.sum;
#pragma unroll
  for (float& x : o) x = merged.normalised(x, inverse);
  Chunk<T, 4> chunk;
  chunk.write(o);
  int const batch = sequence / p.num_heads, head = sequence % p.num_heads;
  chunk.store(static_cast<T*>(p.o) + batch * p.o_stride.batch + head * p.o_stride.head + query * p.o_stride.seqlen +
              dimension);
  if (p.lse != nullptr && dimension == 0) {
    p.lse[int64_t(sequence) * p.seqlen_q + query] = merged.lse(p.scale_log2);
  }
}

}  // namespace cutlass_fmha
