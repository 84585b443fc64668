// What a thread block of a ranged or score-mod row walks, for forward/tile_walk.cuh: the shared memory of
// such a row, and what its sources of keys (keys_cp_async.cuh, keys_tma.cuh) have in common.
#pragma once

#include "../core/product.cuh"
#include "masks.cuh"
#include "place.cuh"

namespace cutlass_fmha {

/// What a warp asks for in every phase.
struct alignas(16) WarpPhases {
  int first_phase = 0, end_phase = 0;  ///< before and from which on it sees no key
  int full_begin = 0, full_end = 0;    ///< phases of which each of its rows sees every key,
  int prefix_begin = 0;                ///< and so they do from this one on
  int row_begin = 0;                   ///< its first packed row
  int last_begin = 0;                  ///< FeatureWalk::last_begin
  uint32_t q_begin = 0;                ///< where its rows begin in the tile of Q, in bytes

  WarpPhases() = default;
  /// Of `blocks` phases, the first of which has the keys from `last_begin` on.
  CUTE_DEVICE WarpPhases(CommonView const& view, int row_begin, int blocks, int last_begin, int tile_n)
      : end_phase(blocks), row_begin(row_begin), last_begin(last_begin) {
    int const last = last_begin / tile_n;  // a tile's number; phase n has tile last - n
    auto const phase = [&](int tile) { return larger(0, smaller(last - tile, blocks)); };
    int const some_end = larger(view.some_end, view.prefix);
    first_phase = phase(ceil_div(some_end, tile_n) - 1);
    if (view.prefix == 0) end_phase = larger(first_phase, phase(view.some_begin / tile_n - 1));
    full_begin = phase(view.all_end / tile_n - 1);
    full_end = phase(ceil_div(view.all_begin, tile_n) - 1);
    prefix_begin = phase(view.prefix / tile_n - 1);
    if (view.prefix == 0 && some_end <= view.some_begin) first_phase = end_phase = blocks;
  }
  /// `Branches`: with fewer registers.
  template <bool Branches>
  CUTE_DEVICE bool is_full(int phase) const {
    if constexpr (Branches) return (phase >= full_begin && phase < full_end) || phase >= prefix_begin;
    return (int(phase >= full_begin) & int(phase < full_end)) | int(phase >= prefix_begin);
  }
};

/// Whether lanes keep where they read: others ask anew in every phase. On sm_120 rows that modify scores have no room
/// for what ptxas makes of it ahead of the loop.
constexpr bool keeps_lanes(ForwardConfig const& c) {
  return is_roomy(c) && !c.reads_masks() && !(c.modifies_scores() && c.arch == 120);
}

/// How many tiles before the last one a walk's tile is that is walked as number `phase`. Keys near the queries come
/// first where ALiBi makes them count most: what comes after them raises no maximum. But the last tile, of which not
/// all keys may exist, always comes first.
struct TilesBack {
  int tiles, put_off;

  CUTE_DEVICE int operator()(int phase) const {
    int const back = phase + put_off;
    return phase == 0 ? 0 : back < tiles ? back : back - (tiles - 1);
  }
  /// How many further back the next one is.
  CUTE_DEVICE int step(int phase) const {
    return phase == 0 ? 1 + put_off : phase + put_off == tiles - 1 ? 2 - tiles : 1;
  }
};

/// How many tiles are put off where all queries see all keys, the last of the block's being beside such a key.
CUTE_DEVICE int tiles_put_off(int tiles, int beside, int tile_n) {
  return larger(0, smaller(tiles - 2, tiles - 2 - beside / tile_n));
}

/// Shared memory of a block: Q (O on the way out), K and V rings, barriers, what the block works on, which pages the
/// next tiles are in, what warps and lanes read anew in each phase.
template <ForwardConfig C>
struct FeatureTileLayout {
  using Place = TilePlace<typename ForwardTypes<C>::Word>;
  static constexpr int kQ = C.tile_m * C.head_dim * C.element_bytes();
  static constexpr int kKTile = C.tile_n * C.head_dim * C.element_bytes();
  static constexpr int kVTile = C.tile_n * C.head_dim_v() * C.element_bytes();
  static constexpr int kRuns = C.tile_n / kPageRun;
  static constexpr int kKOffset = kQ;
  static constexpr int kVOffset = kKOffset + C.stages * kKTile;
  static constexpr int kBarriers = kVOffset + C.stages * kVTile;
  static constexpr int kPartial = kBarriers + 2 * KvPipeline<C>::kBytes;
  static constexpr int kPlace = kPartial + int(sizeof(uint64_t));
  static constexpr int kWarps = cute::ceil_div(kPlace + int(sizeof(Place)), 16) * 16;
  static constexpr int kPages = kWarps + C.warps * int(sizeof(WarpPhases));
  static constexpr int kLanes = kPages + 4 * C.stages * kRuns * int(sizeof(int));
  using Lane = cute::conditional_t<C.reads_masks(), uint4, uint2>;
  static constexpr int kMaxima = kLanes + (keeps_lanes(C) ? 0 : 32 * int(sizeof(Lane)));
  static constexpr int kSlopes = kMaxima + C.tile_m * int(sizeof(float));
  static constexpr int kWarpScores = kSlopes + C.tile_m * int(sizeof(float));
  static constexpr int kMasks = kSlopes;
  static constexpr int kBytes = C.modifies_scores() ? kWarpScores + C.warps * int(sizeof(WarpScores))
                                : C.reads_masks()   ? kMasks + int(sizeof(MaskSource))
                                                    : kSlopes;
  static_assert(kMasks % alignof(MaskSource) == 0 && kLanes % alignof(Lane) == 0);
  static_assert(kWarpScores % alignof(WarpScores) == 0);
  static_assert(kBytes <= 99 * 1024, "sm_89 and sm_120 have no more");

  /// What completes when a tile has arrived of which not all keys exist.
  CUTE_DEVICE static uint64_t* partial_barrier(char* smem) { return reinterpret_cast<uint64_t*>(smem + kPartial); }
  CUTE_DEVICE static Place& place(char* smem) { return *reinterpret_cast<Place*>(smem + kPlace); }
  CUTE_DEVICE static WarpPhases& phases(char* smem, int warp) {
    return reinterpret_cast<WarpPhases*>(smem + kWarps)[warp];
  }
  /// Which pages a tile's runs are in, asked for by the threads that copy K or V. Two turns of a ring: those of a tile
  /// are asked for when the tile before it in its stage is.
  CUTE_DEVICE static int* pages(char* smem, bool values, uint32_t tile) {
    return reinterpret_cast<int*>(smem + kPages) + ((values ? 2 * C.stages : 0) + tile % (2 * C.stages)) * kRuns;
  }
  CUTE_DEVICE static float* slopes(char* smem, int tile_row) {
    return reinterpret_cast<float*>(smem + kSlopes) + tile_row;
  }
  CUTE_DEVICE static WarpScores& scores(char* smem, int warp) {
    return reinterpret_cast<WarpScores*>(smem + kWarpScores)[warp];
  }
  CUTE_DEVICE static MaskSource& masks(char* smem) { return *reinterpret_cast<MaskSource*>(smem + kMasks); }
  CUTE_DEVICE static RowMaxima maxima(char* smem, int tile_row) {
    return {reinterpret_cast<float*>(smem + kMaxima) + tile_row};
  }
};

/// By one of the threads that bring K or V for each run of a tile, whose first key is `key_begin`: which page it is in.
template <ForwardConfig C>
CUTE_DEVICE void ask_for_page(FeatureParams const& p, char* smem, bool values, int tile, int key_begin, int run) {
  using Shared = FeatureTileLayout<C>;
  if (run >= Shared::kRuns) return;
  Sequence const& s = Shared::place(smem).sequence;
  // A tile that lies in one page is looked up as a whole.
  int const count = p.keys_stand == KeysStand::whole_pages ? C.tile_n : kPageRun;
  int const row = s.first_k + Shared::place(smem).behind.kept(key_begin + run * kPageRun, count);
  int const* const entry = p.page_table + s.batch * p.page_table_stride + p.by_page_size.quotient(row);
  cute::SM80_CP_ASYNC_CACHEALWAYS<int>::copy(*entry, Shared::pages(smem, values, tile)[run]);
}

/// A walk's key tiles, each with the number of its phase.
template <ForwardConfig C>
struct FeatureWalk {
  using Shared = FeatureTileLayout<C>;

  FeatureParams const& p;
  char* const smem;
  int const warp;        ///< the same for all lanes, and the compiler knows it
  int const blocks;      ///< key tiles that the thread block walks
  int const last_begin;  ///< the first key of phase 0
  int const put_off;     ///< KeyWalk
  KvPipeline<C> const k_pipe, v_pipe;

  CUTE_DEVICE FeatureWalk(FeatureParams const& p, char* smem, int warp, KeyWalk const& walk)
      : p(p),
        smem(smem),
        warp(warp),
        blocks(uniform(walk.tiles)),
        last_begin(uniform((walk.first + walk.skipped + walk.tiles - 1) * C.tile_n)),
        put_off(C.modifies_scores() ? uniform(walk.put_off) : 0),
        k_pipe{barriers(smem)},
        v_pipe{k_pipe.barriers + KvPipeline<C>::kBytes} {}

  CUTE_DEVICE bool second_group() const { return warp >= C.warps / 2; }
  CUTE_DEVICE typename Shared::Place const& place() const { return Shared::place(smem); }

  /// Where shared memory begins at address 0, as on sm_89, this is known; else it is a uniform register where cp.async
  /// reports to it, which takes a loop over lanes from another one.
  CUTE_DEVICE static uint32_t barriers(char* smem) {
    uint32_t const at = cute::cast_smem_ptr_to_uint(smem + Shared::kBarriers);
    return C.copy == Copy::tma ? at : uniform(at);
  }

  /// Whether pages are looked up ahead.
  CUTE_DEVICE bool looks_ahead() const {
    return p.keys_stand == KeysStand::whole_pages || p.keys_stand == KeysStand::page_runs;
  }
};

}  // namespace cutlass_fmha
