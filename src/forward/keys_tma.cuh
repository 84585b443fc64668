// Keys for the walk of tile_walk.cuh that the copy unit brings: what a thread block works on, its shared memory, and
// who asks for K and V while the warps compute.
#pragma once

#include "../core/mask.cuh"
#include "../core/scheduler.h"
#include "../core/tma.cuh"
#include "tile_walk.cuh"

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
  WorkTile const tile = work_tile(p.schedule, part.tile);
  int const row_begin = tile.m_block * C.tile_m;
  if (!divided) part.end = part.count = key_blocks(p, row_begin, row_begin + C.tile_m, C.tile_n);
  return {row_begin, part.end, part.count, part.row, tile.head, kv_head(p, tile.head), tile.batch};
}

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, what the block works on, row maxima.
template <ForwardConfig C>
struct TmaLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kKTile = C.tile_n * C.head_dim * C.element_bytes(), kVTile = kKTile;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kKTile;
  static constexpr int kKBarriers = kVOffset + C.stages * kVTile;
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
    using Tile = TmaTile<C.head_dim, C.tile_n, C.element_bytes()>;
    Tile::load(map, reinterpret_cast<uint64_t*>(smem + barriers + Pipe::full_offset(tile)),
               smem + ring + Pipe::stage(tile) * Shared::kKTile, Tile::kPanelBytes, (end - 1 - tile) * C.tile_n,
               head_kv, batch);
  }
};

template <ForwardConfig C>
struct TmaKeys {
  using T = ForwardTypes<C>;
  using Shared = TmaLayout<C>;
  using Pipe = KvPipeline<C>;
  using Product = WarpProduct<C>;
  using Turn = Turns<C.warps, C.ping_pong>;
  static constexpr bool kEndsEarly = false, kMaskedFirst = true;
  static constexpr bool kAsksInTurn = false, kBringsInSoftmax = false;
  static constexpr int kPassAt = T::kKeySteps - (C.head_dim < 96 ? 1 : 2);

  struct Lanes {
    uint32_t qv_offset, k_offset, q_begin;

    CUTE_DEVICE uint32_t q() const { return qv_offset + q_begin; }
    CUTE_DEVICE uint32_t k() const { return k_offset; }
    CUTE_DEVICE uint32_t v() const { return qv_offset; }
  };

  ForwardTmaParams const& params;
  char* const smem;
  int const warp;
  int const tile_row;  ///< the warp's first row within the tile of Q
  bool const in_second_group;
  Pipe const k_pipe, v_pipe;
  uint32_t const qv_lane_offset, k_lane_offset;

  int const end;  ///< key blocks [end - blocks, end) are walked
  int const blocks;
  int const first_phase;   ///< before it, no key is visible to this warp
  int const all_see_from;  ///< from this phase on, every row of this warp sees all keys of a block
  TmaProducer<C> const* producer = nullptr;

  CUTE_DEVICE TmaKeys(ForwardTmaParams const& params, char* smem, int warp, Work const& work)
      : params(params),
        smem(smem),
        warp(warp),
        tile_row(tile_row_of<C>(warp)),
        in_second_group(warp >= C.warps / 2),
        k_pipe{cute::cast_smem_ptr_to_uint(smem + Shared::kKBarriers)},
        v_pipe{cute::cast_smem_ptr_to_uint(smem + Shared::kVBarriers)},
        qv_lane_offset(settled(Product::v_lane(threadIdx.x))),
        k_lane_offset(settled(Product::k_lane(threadIdx.x))),
        end(work.end),
        blocks(uniform(work.blocks)),
        first_phase(min(end - visible_blocks(params, work.row_begin + tile_row_of<C>(warp)), blocks)),
        all_see_from(uniform(end - full_key_blocks(params, work.row_begin + tile_row_of<C>(warp), C.tile_n))) {}

  // What the walk asks for.
  CUTE_DEVICE void take() const { Turn::take(warp); }
  CUTE_DEVICE void pass() const { Turn::pass(warp); }
  CUTE_DEVICE bool second_group() const { return in_second_group; }
  CUTE_DEVICE void before_turn(int phase) const {
    if (phase >= 2) producer->refill_v(v_pipe, phase - 2 + C.stages);
  }
  CUTE_DEVICE void end_scores(int phase) const { producer->refill_k(k_pipe, phase + C.stages); }
  CUTE_DEVICE uint32_t q_lane() const { return qv_lane_offset + tile_row * Product::kQRowBytes; }
  CUTE_DEVICE char const* memory() const { return smem; }
  CUTE_DEVICE Lanes lanes() const { return {qv_lane_offset, k_lane_offset, tile_row * Product::kQRowBytes}; }
  CUTE_DEVICE int end_phase() const { return blocks; }
  CUTE_DEVICE int masked_end() const { return min(all_see_from, blocks); }
  CUTE_DEVICE bool is_masked(int phase) const { return phase < all_see_from; }
  template <class Scores>
  CUTE_DEVICE void before_softmax(int phase, bool masked, Scores& scores) const {
    if (!masked) return;
    apply_mask(params, by_row(scores), score_coordinates<C>(), Shared::work(smem).row_begin + tile_row,
               (end - 1 - phase) * C.tile_n);
  }
  CUTE_DEVICE RowMaxima maxima() const { return Shared::maxima(smem, tile_row); }

 private:
  CUTE_DEVICE static int visible_blocks(ForwardTmaParams const& p, int row_begin) {
    return key_blocks(p, row_begin, row_begin + T::kRows, C.tile_n);
  }
};

}  // namespace cutlass_fmha
