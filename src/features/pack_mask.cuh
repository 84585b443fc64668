// A mask's bits in the order in which masked rows have scores: MaskBits. An eighth of the bytes comes to the SMs, for
// each head and batch entry again, and whole lines of them at once.
#pragma once

#include "params.h"

namespace cutlass_fmha {

/// Of four bytes, which are not zero: four bits at the upper end of a word.
__device__ inline uint32_t nonzero_bytes(uint32_t bytes) {
  uint32_t const found = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  return (found >> 7) * 0x10204080u;
}

/// A word a thread, four words of keys a block.
template <class Element>
__device__ void pack_mask(PackMaskParams const& p) {
  MaskBits const& of = p.groups;
  int const at_once = blockDim.x / MaskBits::kLanes, lane = threadIdx.x % MaskBits::kLanes;
  unsigned const blocks = (of.key_groups + at_once - 1) / at_once, line = blockIdx.x / blocks;
  int const group = (blockIdx.x - line * blocks) * at_once + threadIdx.x / MaskBits::kLanes;
  if (group >= of.key_groups) return;
  unsigned const entry = line / of.query_groups, query_group = line - entry * of.query_groups;
  unsigned const batch = entry / of.heads, head = entry - batch * of.heads;

  int const first_key = group * MaskBits::kKeys + lane % 4 * kMaskRun;
  uint32_t bytes[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const query = query_group * MaskBits::kQueries + lane / 4 + 8 * half;
    uint8_t const* const from =
        p.mask + p.stride.offset(batch, head, query < p.queries ? query : p.queries - 1, first_key);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      int const there = p.keys - first_key - 16 * step;
      if (there <= 0) continue;
      if (p.vectors) {
        bytes[half][step] = *reinterpret_cast<uint32_t const*>(from + 16 * step);
      } else {
#pragma unroll
        for (int i = 0; i < kMaskRun; ++i) {
          if (i < there) bytes[half][step] |= uint32_t{from[(16 * step + i) * p.stride.key]} << 8 * i;
        }
      }
    }
  }
  uint32_t word = 0;
#pragma unroll
  for (int step = 3; step >= 0; --step) {
#pragma unroll
    for (int half = 1; half >= 0; --half) word = __funnelshift_l(nonzero_bytes(bytes[half][step]), word, 4);
  }
  // MaskedOrder: lanes 2 and 3 of four have the upper two keys first.
  uint32_t const swapped = (word & 0x33333333u) << 2 | (word >> 2 & 0x33333333u);
  p.bits[int64_t(line) * of.key_groups * MaskBits::kLanes + group * MaskBits::kLanes + lane] =
      lane & 2 ? swapped : word;
}

}  // namespace cutlass_fmha
