// Launches that overlap (programmatic dependent launch, sm_90 and later): blocks of rows that `overlaps()`, of what
// combines the parts of split keys, and of all that computes gradients may start while the kernel ahead in the stream
// still runs, find their tile, and wait. A launch's own latency is hidden that way, of the order of a microsecond,
// which counts where a problem takes only a few of them.
//
// Why this is sound beside any kernels, in a stream or in a CUDA graph that was captured from one:
// - Every thread waits before its first access to global memory. Reads after the wait see what the kernel ahead wrote,
//   and writes come when it has read all it reads: neither can overtake it.
// - The wait returns when the kernel ahead is complete. If that one was launched this way too, it waited in all of its
//   blocks, so it can't be complete before everything ahead of it is: the order is that of ordinary launches.
// - The trigger says that the next launch may start, not that anything is written. Only a launch that asked for it
//   does, and by the rules of CUDA such a one waits as well. A kernel may pass it before its own wait: what starts then
//   waits for this one, and this one for what is ahead of it.
// - Blocks that wait take no room that the kernel ahead needs: they are scheduled once all of its blocks have passed
//   the trigger or ended, so all are on an SM.
// - What is prefetched before the wait goes to L2, where the writes of all SMs meet. A line that came early is not
//   stale later, and no value is taken from it. The addresses are those of tensors that existed at the launch.
// - Operands are not read as constants (ld.global.nc): that is for memory that nobody writes while the kernel runs, and
//   it now runs beside the one that may write them.
#pragma once

#include <cute/config.hpp>

#include "dependents.cuh"
#include "mask.cuh"
#include "registers.cuh"

namespace cutlass_fmha {

/// Brings rows [begin, end) of a head to L2. A hint: where rows are not aligned to lines of 128 bytes, parts stay out.
template <int HeadDim, int Threads, class Element>
CUTE_DEVICE void prefetch_rows(Element const* tensor, int64_t row_stride, int begin, int end) {
  constexpr int kLine = 128 / int(sizeof(Element)), kLines = ceil_div(HeadDim, kLine);
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < (end - begin) * kLines; i += Threads) {
    prefetch_to_l2(tensor + (begin + i / kLines) * row_stride + i % kLines * kLine);
  }
}

/// The queries of tile `m_block` of a head, and this tile's part of the keys that are seen: its tiles have one part
/// each.
template <int HeadDim, int TileM, int Threads, class Element>
CUTE_DEVICE void prefetch_inputs(ForwardParams const& p, Element const* q, Element const* k, Element const* v,
                                 int m_block) {
  int const seen = visible_keys(p, p.seqlen_q - 1);
  int const keys = ceil_div(seen, ceil_div(p.seqlen_q, TileM));
  int const key_end = min((m_block + 1) * keys, seen);
  prefetch_rows<HeadDim, Threads>(k, p.k_stride.seqlen, m_block * keys, key_end);
  prefetch_rows<HeadDim, Threads>(v, p.v_stride.seqlen, m_block * keys, key_end);
  prefetch_rows<HeadDim, Threads>(q, p.q_stride.seqlen, m_block * TileM, min((m_block + 1) * TileM, p.seqlen_q));
}

}  // namespace cutlass_fmha
