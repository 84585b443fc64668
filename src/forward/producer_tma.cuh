// Rows that copy by TMA: what a thread block works on, its shared memory, and what brings K and V into their rings
// while the warps compute. Tile t is the t-th block of keys in the order of the walk, from the last block to the first.
#pragma once

#include "fragments.cuh"
#include "mask.cuh"
#include "scheduler.h"
#include "tma.cuh"

namespace cutlass_fmha {

/// A tile of queries and the keys that its thread block walks.
struct Work {
  int row_begin;  ///< first query row
  int end;        ///< key blocks [end - blocks, end) are walked, of those that some row of the tile sees
  int blocks;
  int part_row;  ///< where the tile's rows are those of a part (Tail), the first; otherwise -1
  int head, head_kv, batch;
};

template <ForwardConfig C>
CUTE_DEVICE Work work_at(ForwardTmaParams const& p, int index) {
  bool const divided = index >= p.tail.begin;
  KeyPart part{index, 0, 0, -1};
  if (divided) part = tail_part(p.tail, C.tile_m, ceil_div(p.seqlen_k, C.tile_n), index);
  WorkTile const tile = scheduled_tile(p, part.tile);
  int const row_begin = tile.m_block * C.tile_m;
  if (!divided) part.end = part.count = key_blocks(p, row_begin, row_begin + C.tile_m, C.tile_n);
  return {row_begin, part.end, part.count, part.row, tile.head, kv_head(p, tile.head), tile.batch};
}

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, what the block works on, row maxima.
template <ForwardConfig C>
struct TmaLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * 2;
  static constexpr int kTile = C.tile_n * C.head_dim * 2;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kTile;
  static constexpr int kKBarriers = kVOffset + C.stages * kTile;
  static constexpr int kVBarriers = kKBarriers + KvPipeline<C>::kBytes;
  static constexpr int kQBarrier = kVBarriers + KvPipeline<C>::kBytes;
  static constexpr int kWork = kQBarrier + int(sizeof(uint64_t));
  static constexpr int kMaxima = kWork + int(sizeof(Work));
  static constexpr int kBytes = kMaxima + C.tile_m * int(sizeof(float));

  CUTE_DEVICE static RowMaxima maxima(char* smem, int tile_row) {
    return {reinterpret_cast<float*>(smem + kMaxima) + tile_row};
  }

  /// What this block works on. It is here to be read again where it is needed: through the main loop, which leaves no
  /// register free, nothing else must stay alive for the mask and the epilogue.
  CUTE_DEVICE static Work& work(char* smem) { return *reinterpret_cast<Work*>(smem + kWork); }
};

/// By TMA: a lane of the first warp asks for V, one of the last warp for K. What they must know stays in uniform
/// registers through the main loop.
template <ForwardConfig C>
struct TmaProducer {
  using Shared = TmaLayout<C>;
  using Pipe = KvPipeline<C>;

  ForwardTmaParams const& params;
  char* const smem;
  int const warp, end, blocks, head_kv, batch;

  CUTE_DEVICE TmaProducer(ForwardTmaParams const& p, char* smem, int warp, Work const& work)
      : params(p),
        smem(smem),
        warp(warp),
        end(uniform(work.end)),
        blocks(uniform(work.blocks)),
        head_kv(uniform(work.head_kv)),
        batch(uniform(work.batch)) {}

  /// Asks for the first tiles; by one thread.
  CUTE_DEVICE void start() const {
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      if (tile >= blocks) break;
      request(params.k_map, Shared::kKOffset, Shared::kKBarriers, tile);
      request(params.v_map, Shared::kVOffset, Shared::kVBarriers, tile);
    }
  }
  CUTE_DEVICE void refill_k(Pipe const& pipe, int tile) const {
    if (warp == C.warps - 1) refill(pipe, params.k_map, Shared::kKOffset, Shared::kKBarriers, tile);
  }
  CUTE_DEVICE void refill_v(Pipe const& pipe, int tile) const {
    if (warp == 0) refill(pipe, params.v_map, Shared::kVOffset, Shared::kVBarriers, tile);
  }

 private:
  CUTE_DEVICE void refill(Pipe const& pipe, TensorMap const& map, int ring, int barriers, int tile) const {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    if (cute::elect_one_sync()) request(map, ring, barriers, tile);
  }
  CUTE_DEVICE void request(TensorMap const& map, int ring, int barriers, int tile) const {
    TmaTile<C.head_dim, C.tile_n>::load(map, reinterpret_cast<uint64_t*>(smem + barriers + Pipe::full_offset(tile)),
                                        smem + ring + Pipe::stage(tile) * Shared::kTile,
                                        TmaTile<C.head_dim, C.tile_n>::kPanelBytes, (end - 1 - tile) * C.tile_n,
                                        head_kv, batch);
  }
};

}  // namespace cutlass_fmha
