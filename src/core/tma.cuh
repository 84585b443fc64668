// Tiles moved by TMA: one thread asks for a tile, the copy unit does the rest. Needs sm_90.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "../params.h"
#include "tile.cuh"

namespace cutlass_fmha {

/// By one thread, before it copies by these maps: the copy unit reads a map from memory the first time, which takes as
/// long as a copy does.
template <class... Maps>
CUTE_DEVICE void fetch_maps(Maps const&... maps) {
  (..., cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&maps)));
}

/// `Rows` rows of a [batch, seqlen, head, HeadDim] tensor as they lie in shared memory (see Panels), one box of the
/// copy unit per panel. Rows beyond the tensor's end are read as zeros, which keeps what the mma sees finite, and are
/// not written. `panel_stride`: bytes from one panel to the next.
template <int HeadDim, int Rows, int ElementBytes>
struct TmaTile {
  using P = Panels<HeadDim, ElementBytes>;
  static constexpr int kPanelBytes = Rows * P::kRowBytes;
  static constexpr int kBytes = P::kCount * kPanelBytes;

  /// By one thread. `barrier` completes when all has arrived.
  CUTE_DEVICE static void load(TensorMap const& map, uint64_t* barrier, char* tile, int panel_stride, int row, int head,
                               int batch) {
    cute::set_barrier_transaction_bytes(*barrier, kBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   tile + panel * panel_stride, panel * P::kWidth, row, head, batch);
    }
  }

  /// The same of the tile's rows from `to_row` on, a multiple of 8, as many as the map's boxes have. `barrier` is told
  /// to expect kBytes of the whole tile before.
  CUTE_DEVICE static void load_rows(TensorMap const& map, uint64_t* barrier, char* tile, int to_row, int row, int head,
                                    int batch) {
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   tile + panel * kPanelBytes + to_row * P::kRowBytes, panel * P::kWidth, row, head,
                                   batch);
    }
  }

  /// By one thread, once every write of the tile is fenced (cute::tma_store_fence). Returns when the tile may be
  /// written again.
  CUTE_DEVICE static void store(TensorMap const& map, char const* tile, int panel_stride, int row, int head,
                                int batch) {
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      cute::SM90_TMA_STORE_4D::copy(&map, tile + panel * panel_stride, panel * P::kWidth, row, head, batch);
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
  }
};

}  // namespace cutlass_fmha
