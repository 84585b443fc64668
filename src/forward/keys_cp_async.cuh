// Keys for the walk of tile_walk.cuh that threads copy, by cp.async or element by element: the first half of the warps
// brings V, the second half K. And the shared memory of such a row.
#pragma once

#include "../core/mask.cuh"
#include "tile_walk.cuh"

namespace cutlass_fmha {

/// Where a thread block's tile of queries lies. Kept in shared memory and read again where it is needed: through the
/// main loop, which leaves no register free, nothing else must stay alive for the mask and the epilogue.
struct TilePosition {
  int row_begin;  ///< first query row
  int head, batch;
};

/// What a warp asks for in every phase, computed once.
struct WarpConstants {
  uint32_t q_begin;  ///< byte offset of its rows in the tile of Q
  int masked_end;    ///< from this phase on, every row sees all keys of a block
};

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, which tile this is, what warps and lanes
/// read anew before each turn.
template <ForwardConfig C>
struct SharedLayout {
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kKTile = C.tile_n * C.head_dim * C.element_bytes(), kVTile = kKTile;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kKTile;
  static constexpr int kBarriers = kVOffset + C.stages * kVTile;
  static constexpr int kTileBegin = kBarriers + 2 * KvPipeline<C>::kBytes;
  static constexpr int kMaxima = kTileBegin + int(sizeof(TilePosition));
  static constexpr int kLanes = (kMaxima + C.tile_m * int(sizeof(float)) + 7) / 8 * 8;
  static constexpr int kWarps = kLanes + 32 * int(sizeof(uint2));
  static constexpr int kBytes = kWarps + C.warps * int(sizeof(WarpConstants));

  CUTE_DEVICE static RowMaxima maxima(char* smem, int tile_row) {
    return {reinterpret_cast<float*>(smem + kMaxima) + tile_row};
  }
  CUTE_DEVICE static TilePosition& position(char* smem) { return *reinterpret_cast<TilePosition*>(smem + kTileBegin); }
};

template <ForwardConfig C>
struct CpAsyncKeys {
  using T = ForwardTypes<C>;
  using Shared = SharedLayout<C>;
  using Product = WarpProduct<C>;
  using Turn = Turns<C.warps, C.ping_pong>;
  static constexpr int kHalfThreads = C.threads() / 2;
  static constexpr bool kRoomy = is_roomy(C);
  /// Whether what a warp asks for in every phase stays in registers. The largest O (128 of them) leaves none.
  static constexpr bool kKeepsConstants =
      C.architecture().uniform_phases || kRoomy || C.rows_per_warp() * C.head_dim < 32 * 128;
  static constexpr bool kEndsEarly = false, kMaskedFirst = true;
  static constexpr bool kAsksInTurn = true, kBringsInSoftmax = false;
  static constexpr int kPassAt = T::kKeySteps / 2;
  using Loader = TileLoader<C.head_dim, C.tile_n, kHalfThreads, C.copy, C.element_bytes()>;

  struct Lanes {
    uint32_t q_offset, k_offset, v_offset;

    CUTE_DEVICE uint32_t q() const { return q_offset; }
    CUTE_DEVICE uint32_t k() const { return k_offset; }
    CUTE_DEVICE uint32_t v() const { return v_offset; }
  };

  ForwardParams const& params;
  char* const smem;
  // The same for all lanes. Asked for by tile_row(), second_group() and constants(), which know another way where
  // registers are scarce.
  int const warp_tile_row;
  bool const in_second_group;
  int all_see_from;  ///< WarpConstants::masked_end

  int const blocks;  ///< key blocks that the thread block walks
  int first_phase;   ///< before it, no key is visible to this warp

  KvPipeline<C> const k_pipe, v_pipe;
  uint32_t const qv_lane_offset, k_lane_offset;
  Loader loader;  ///< of V in the first group, of K in the second; points at the next block to bring

  /// What shared memory holds before anything is copied there.
  CUTE_DEVICE void init_shared() const {
    if (threadIdx.x == 0) {
      k_pipe.init(kHalfThreads, C.threads());
      v_pipe.init(kHalfThreads, C.threads());
    }
    if (threadIdx.x < 32) {
      reinterpret_cast<uint2*>(smem + Shared::kLanes)[threadIdx.x] = {qv_lane_offset, k_lane_offset};
    }
    if (!kKeepsConstants && lane_id() == 0) {
      auto* const table = reinterpret_cast<WarpConstants*>(smem + Shared::kWarps);
      table[threadIdx.x / 32] = {tile_row() * Product::kQRowBytes, all_see_from};
    }
  }

  /// Starts the first loads of K and V. Only the last block of the keys, walked first, can be a partial one.
  CUTE_DEVICE void prologue() {
    loader.source += int64_t(blocks - 1) * C.tile_n * (second_group() ? params.k_stride : params.v_stride).seqlen;
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      refill_k<true>(tile);
      refill_v<true>(tile);
    }
  }

  // What the walk asks for.
  CUTE_DEVICE void take() const { Turn::take(); }
  CUTE_DEVICE void pass() const { Turn::pass(); }
  /// Whether this warp is one of the second half. After a vote the compiler knows that all lanes agree: phases stay
  /// uniform, and nothing needs to converge.
  CUTE_DEVICE bool second_group() const {
    return kKeepsConstants ? in_second_group : __any_sync(0xffffffffu, thread_id() >= kHalfThreads);
  }
  CUTE_DEVICE void before_turn(int phase) {
    if (phase >= 2) refill_v<false>(phase - 2 + C.stages);
  }
  CUTE_DEVICE void end_scores(int phase) { refill_k<false>(phase + C.stages); }
  CUTE_DEVICE uint32_t q_lane() const { return qv_lane_offset + constants().q_begin; }
  /// Where registers are scarce, they hold this for the length of a turn only: read anew before each.
  CUTE_DEVICE char const* memory() const { return smem; }
  CUTE_DEVICE Lanes lanes() const {
    uint32_t const q = C.q_in_registers ? 0 : constants().q_begin;
    if constexpr (kRoomy || !C.ping_pong || C.head_dim < 64) {
      return {qv_lane_offset + q, k_lane_offset, qv_lane_offset};
    } else {
      uint2 const offsets = reinterpret_cast<uint2 const*>(smem + Shared::kLanes)[lane_id()];
      return {offsets.x + q, offsets.y, offsets.x};
    }
  }
  CUTE_DEVICE int end_phase() const { return blocks; }
  CUTE_DEVICE int masked_end() const { return constants().masked_end; }
  CUTE_DEVICE bool is_masked(int phase) const {
    bool const masked = phase < constants().masked_end;
    return kKeepsConstants ? masked : __any_sync(0xffffffffu, masked);
  }
  template <class Scores>
  CUTE_DEVICE void before_softmax(int phase, bool masked, Scores& scores) const {
    if (!masked) return;
    apply_mask(params, by_row(scores), score_coordinates<C>(), Shared::position(smem).row_begin + tile_row(),
               (blocks - 1 - phase) * C.tile_n);
  }
  CUTE_DEVICE RowMaxima maxima() const { return Shared::maxima(smem, tile_row()); }

  /// This warp's first row within the tile.
  CUTE_DEVICE int tile_row() const { return kKeepsConstants ? warp_tile_row : tile_row_of<C>(thread_id() / 32); }

 private:
  CUTE_DEVICE WarpConstants constants() const {
    if constexpr (kKeepsConstants) {
      return {warp_tile_row * Product::kQRowBytes, all_see_from};
    } else {
      return reinterpret_cast<WarpConstants const*>(smem + Shared::kWarps)[thread_id() / 32];
    }
  }

  /// Brings a tile of K or V, the next one in the walk of the thread's group, if there is one.
  template <bool Partial>
  CUTE_DEVICE void refill(KvPipeline<C> const& pipe, int ring, int64_t row_stride, int tile) {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    loader.template load<Partial>(smem + ring + pipe.stage(tile) * Shared::kKTile, row_stride,
                                  params.seqlen_k - (blocks - 1 - tile) * C.tile_n);
    loader.source -= C.tile_n * row_stride;
    if constexpr (C.copy == Copy::cp_async_16) {
      pipe.producer_commit_cp_async(tile);
    } else {
      pipe.producer_commit(tile);
    }
  }
  template <bool Partial>
  CUTE_DEVICE void refill_k(int tile) {
    if (second_group()) refill<Partial>(k_pipe, Shared::kKOffset, params.k_stride.seqlen, tile);
  }
  template <bool Partial>
  CUTE_DEVICE void refill_v(int tile) {
    if (!second_group()) refill<Partial>(v_pipe, Shared::kVOffset, params.v_stride.seqlen, tile);
  }
};

}  // namespace cutlass_fmha
