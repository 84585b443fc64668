// Few-query rows that copy by TMA: for problems with few query rows, as few_query.cuh, but keys and values pass
// through shared memory, where the warps that share them find them.
//
// Key part s of the keys is blocks s, s + kv_warps, ..., walked from the last to the first by the warps that have it,
// one for each group of query rows. A lane of the first of these asks for their tiles.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../core/product.cuh"
#include "../core/tma.cuh"
#include "few_query_epilogue_tma.cuh"

namespace cutlass_fmha {

template <ForwardConfig C>
struct FewQueryTmaMainloop {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Layout = FewQueryTmaLayout<C>;
  using Pipe = TilePipeline<C.stages>;
  using Product = WarpProduct<C>;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using QFragments = typename Product::QFragments;

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
  CUTE_DEVICE FewQueryTmaMainloop(ForwardTmaParams const& p, char* smem, int warp, WorkTile const& tile, int blocks)
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
  CUTE_DEVICE void start() const {
    if (!asks() || !cute::elect_one_sync()) return;
    CUTE_UNROLL
    for (int step = 0; step < C.stages; ++step) {
      if (step >= steps) break;
      request(params.k_map, 0, step);
      request(params.v_map, 1, step);
    }
  }

  /// Q is in shared memory by now. Leaves the unnormalised O in `output`, which is zero at first, and its l in
  /// `softmax`.
  CUTE_DEVICE void run(Output& output, typename T::Softmax& softmax) const {
    if (steps == 0) return;
    QFragments q;
    Scores scores;
    Probabilities probabilities;
    Product::keep_q(smem, q_lane(), q);
    compute_scores(0, q, scores);
    update<true>(0, scores, probabilities, output, softmax);
    refill(params.k_map, k_pipe, 0, C.stages);
    if (C.dependent_launch && steps > 1) start_dependents();
    accumulate(0, probabilities, output);
    CUTE_NO_UNROLL
    for (int step = 1; step < steps; ++step) {
      compute_scores(step, q, scores);
      refill(params.v_map, v_pipe, 1, step - 1 + C.stages);
      update<false>(step, scores, probabilities, output, softmax);
      refill(params.k_map, k_pipe, 0, step + C.stages);
      accumulate(step, probabilities, output);
    }
  }

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
    Tile::load(map, barrier, smem + Layout::tile(key_part, which, step), Tile::kPanelBytes,
               (last - step * C.kv_warps) * C.tile_n, head_kv, batch);
  }

  CUTE_DEVICE void compute_scores(int step, QFragments const& kept, Scores& scores) const {
    k_pipe.consumer_wait(step);
    uint32_t const tile = Layout::tile(key_part, 0, step);
    Product::query_keys(
        kept, [&](int d, auto&& q) FMHA_INLINE { Product::load_q(smem, q_lane(), d, q); },
        [&](int d, int n, auto&& k) FMHA_INLINE { Product::load_k(smem, tile, k_lane_offset, d, n, k); },
        [](int, int) FMHA_INLINE {}, scores);
    k_pipe.consumer_release(step);
  }

  CUTE_DEVICE void accumulate(int step, Probabilities const& probabilities, Output& output) const {
    v_pipe.consumer_wait(step);
    uint32_t const tile = Layout::tile(key_part, 1, step);
    Product::template add_values<false>(
        probabilities,
        [&](int n, int d, auto&& v) FMHA_INLINE { Product::load_v(smem, tile, qv_lane_offset, n, d, v); },
        []() FMHA_INLINE {}, output);
    v_pipe.consumer_release(step);
  }

  template <bool First>
  CUTE_DEVICE void update(int step, Scores& scores, Probabilities& probabilities, Output& output,
                          typename T::Softmax& softmax) const {
    using namespace cute;
    int const key_begin = (last - step * C.kv_warps) * C.tile_n;
    if (key_begin + C.tile_n > visible_keys(params, row_begin)) {
      apply_mask(params, by_row(scores), score_coordinates<C>(), row_begin, key_begin);
    }
    softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), maxima());
  }
};

}  // namespace cutlass_fmha
