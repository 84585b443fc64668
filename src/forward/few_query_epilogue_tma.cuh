// Few-query rows that copy by TMA: their shared memory, and how what the key parts have of a row becomes O and LSE.
#pragma once

#include "../core/key_parts.cuh"
#include "../core/pipeline.cuh"
#include "../core/scheduler.h"

namespace cutlass_fmha {

/// Q, then for each key part its stages of K and V, in whose place the key parts meet; barriers behind them.
template <ForwardConfig C>
struct FewQueryTmaLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kTile = C.tile_n * C.head_dim * C.element_bytes();
  using KeyParts = KeyPartLayout<C, kQ + C.kv_warps * C.stages * 2 * kTile>;
  static constexpr int kBarriers = (KeyParts::kBytes + 7) / 8 * 8;
  static constexpr int kPipe = TilePipeline<C.stages>::kBytes;
  static constexpr int kQBarrier = kBarriers + 2 * C.kv_warps * kPipe;
  static constexpr int kBytes = kQBarrier + int(sizeof(uint64_t));

  /// `which`: 0 for K, 1 for V
  CUTE_DEVICE static int tile(int key_part, int which, int step) {
    return kQ + ((key_part * C.stages + uint32_t(step) % C.stages) * 2 + which) * kTile;
  }
  CUTE_DEVICE static int barriers(int key_part, int which) { return kBarriers + (key_part * 2 + which) * kPipe; }
};

/// Whole rows of O and their LSE, merged from the key parts.
template <ForwardConfig C>
CUTE_DEVICE void few_query_tma_epilogue(ForwardParams const& p, char* smem, WorkTile const& tile) {
  constexpr int kChunks = C.head_dim / 8, kItems = C.tile_m * kChunks;
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  CUTE_UNROLL
  for (int begin = 0; begin < kItems; begin += C.threads()) {
    int const item = begin + int(threadIdx.x);
    int const row = item / kChunks, dimension = item % kChunks * 8;
    int const query = tile.m_block * C.tile_m + row;
    if ((kItems % C.threads() != 0 && item >= kItems) || query >= p.seqlen_q) continue;
    MergedRow<C, typename FewQueryTmaLayout<C>::KeyParts> const merged(smem, row, p.scale_log2);
    float o[8];
    merged.read(smem, row, dimension, 1.f, o);
    uint4 const packed = make_uint4(pack<Element>(o[0], o[1]), pack<Element>(o[2], o[3]), pack<Element>(o[4], o[5]),
                                    pack<Element>(o[6], o[7]));
    *reinterpret_cast<uint4*>(static_cast<typename T::Word*>(p.o) + tile.batch * p.o_stride.batch +
                              tile.head * p.o_stride.head + query * p.o_stride.seqlen + dimension) = packed;
    if (p.lse != nullptr && dimension == 0) {
      p.lse[(int64_t(tile.batch) * p.num_heads + tile.head) * p.seqlen_q + query] = merged.lse;
    }
  }
}

}  // namespace cutlass_fmha
