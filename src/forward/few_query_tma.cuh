// Keys for the walk of step_walk.cuh that travel by TMA, through shared memory, where all warps of a key part find
// them.
//
// Key part s of the keys is blocks s, s + kv_warps, ..., walked from the last to the first by the warps that have it,
// one for each group of query rows. A lane of the first of these asks for their tiles.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../core/key_parts.cuh"
#include "../core/pipeline.cuh"
#include "../core/scheduler.h"
#include "../core/tma.cuh"
#include "step_walk.cuh"

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

template <ForwardConfig C>
struct FewQueryTmaKeys {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Layout = FewQueryTmaLayout<C>;
  using Pipe = TilePipeline<C.stages, Copy::tma>;
  using Product = WarpProduct<C>;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using Held = typename Product::QFragments;
  static constexpr bool kFirstApart = true;

  ForwardTmaParams const& params;
  char* const smem;
  int const warp, key_part;
  int const row_begin;  ///< first query row of this warp
  int const tile_row;   ///< the same within the tile
  int const steps;      ///< of this key part
  int const last;       ///< its first key block to be walked
  int const head_kv, batch;
  Pipe const k_pipe, v_pipe;
  uint32_t const qv_lane_offset, k_lane_offset;

  /// `blocks`: key blocks of which some row of the tile sees some key.
  CUTE_DEVICE FewQueryTmaKeys(ForwardTmaParams const& p, char* smem, int warp, WorkTile const& tile, int blocks)
      : params(p),
        smem(smem),
        warp(warp),
        key_part(warp % C.kv_warps),
        row_begin(tile.m_block * C.tile_m + warp / C.kv_warps * T::kRows),
        tile_row(warp / C.kv_warps * T::kRows),
        steps(blocks <= key_part ? 0 : (blocks - 1 - key_part) / C.kv_warps + 1),
        last(key_part + (steps - 1) * C.kv_warps),
        head_kv(uniform(kv_head(p, tile.head))),
        batch(uniform(tile.batch)),
        k_pipe{cute::cast_smem_ptr_to_uint(smem + Layout::barriers(key_part, 0))},
        v_pipe{cute::cast_smem_ptr_to_uint(smem + Layout::barriers(key_part, 1))},
        qv_lane_offset(Product::v_lane(lane_id())),
        k_lane_offset(Product::k_lane(lane_id())) {}

  CUTE_DEVICE RowMaxima maxima() const { return {Layout::KeyParts::maxima(smem) + key_part * C.tile_m + tile_row}; }
  CUTE_DEVICE bool asks() const { return warp < C.kv_warps; }

  /// By one warp of each key part.
  CUTE_DEVICE void init_pipelines() const {
    k_pipe.init(1, C.warps / C.kv_warps * 32);
    v_pipe.init(1, C.warps / C.kv_warps * 32);
  }
  CUTE_DEVICE void request_first() const {
    if (!asks() || !cute::elect_one_sync()) return;
    CUTE_UNROLL
    for (int step = 0; step < C.stages; ++step) {
      if (step >= steps) break;
      request(params.k_map, 0, step);
      request(params.v_map, 1, step);
    }
  }

  // What the walk asks for.
  CUTE_DEVICE int start(Held& q) const {
    Product::keep_q(smem, q_lane(), q);
    return 0;
  }
  CUTE_DEVICE bool more(int step) const { return step + 1 < steps; }
  CUTE_DEVICE static void next(int& step, Held&) { ++step; }
  CUTE_DEVICE void multiply(int step, Held const& kept, Scores& scores) const {
    k_pipe.consumer_wait(step);
    Product::query_tile(smem, kept, q_lane(), Layout::tile(key_part, 0, step), k_lane_offset, scores);
    k_pipe.consumer_release(step, made_of(scores));
  }
  template <bool First>
  CUTE_DEVICE void after_scores(int step, Held&) const {
    if constexpr (!First) refill(params.v_map, v_pipe, 1, step - 1 + C.stages);
  }
  CUTE_DEVICE int key_begin(int step) const { return (last - step * C.kv_warps) * C.tile_n; }
  CUTE_DEVICE void before_softmax(int key_begin, Scores& scores) const {
    hide_unseen<C>(params, row_begin, key_begin, scores);
  }
  CUTE_DEVICE static void after_softmax(int, Probabilities&) {}
  template <bool First>
  CUTE_DEVICE void before_values(int step, Held&) const {
    refill(params.k_map, k_pipe, 0, step + C.stages);
    if (First && C.dependent_launch && steps > 1) start_dependents();
  }
  CUTE_DEVICE void add_values(int step, Held const&, Probabilities const& probabilities, Output& output) const {
    v_pipe.consumer_wait(step);
    Product::add_tile(smem, probabilities, Layout::tile(key_part, 1, step), qv_lane_offset, output);
    v_pipe.consumer_release(step, made_of(output));
  }
  CUTE_DEVICE static void after_values(int) {}

 private:
  CUTE_DEVICE uint32_t q_lane() const { return qv_lane_offset + tile_row * Product::kQRowBytes; }

  CUTE_DEVICE void refill(TensorMap const& map, Pipe const& pipe, int which, int step) const {
    if (!asks() || step >= steps) return;
    pipe.producer_acquire(step);
    if (cute::elect_one_sync()) request(map, which, step);
  }
  CUTE_DEVICE void request(TensorMap const& map, int which, int step) const {
    using Tile = TmaTile<C.head_dim, C.tile_n, C.element_bytes()>;
    auto* const barrier =
        reinterpret_cast<uint64_t*>(smem + Layout::barriers(key_part, which) + Pipe::full_offset(step));
    Tile::load(map, barrier, smem + Layout::tile(key_part, which, step), Tile::kPanelBytes, key_begin(step), head_kv,
               batch);
  }
};

}  // namespace cutlass_fmha
