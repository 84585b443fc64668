// The kernel that ours are held against in emulation builds: FlashAttention-2's schedule (Dao 2023) and the tiles that
// its release launches on sm_8x, made of this project's own building blocks. Per key block, all warps together:
//   K is there; bring V; S = Q K^T; V is there; bring the next K; standard online softmax; O += P V.
// Each warp owns query rows; the row maximum comes first, and l and O are rescaled at every step. K and V have one
// buffer each, Q is read from shared memory at each step, nobody takes turns.
#pragma once

#include "core/product.cuh"
#include "core/scheduler.h"
#include "forward/epilogue.cuh"

namespace cutlass_fmha {

/// The online softmax as it is usually written. `scores`, `pairs` and `output` as OnlineSoftmax::step has them.
template <int Rows, class Element>
struct StandardSoftmax {
  float scale_log2;
  cute::array<float, Rows> maximum, sum;

  template <bool First, class Scores, class Pairs, class Output>
  CUTE_DEVICE void step(Scores const& scores, Pairs&& pairs, Output&& output) {
    CUTE_UNROLL
    for (int row = 0; row < Rows; ++row) {
      float m = scores(row, 0);
      CUTE_UNROLL
      for (int col = 1; col < cute::size<1>(scores); ++col) m = fmaxf(m, scores(row, col));
      m = QuadOfLanes::max(m);
      if constexpr (!First) m = fmaxf(m, maximum[row]);
      float const reference = m == -INFINITY ? 0.f : m * scale_log2;
      if constexpr (!First) {
        float const factor = exp2_approx(fmaf(maximum[row], scale_log2, -reference));
        sum[row] *= factor;
        CUTE_UNROLL
        for (int col = 0; col < cute::size<1>(output); ++col) output(row, col) *= factor;
      }
      maximum[row] = m;
      float block_sum = 0.f;
      CUTE_UNROLL
      for (int pair = 0; pair < cute::size<1>(pairs); ++pair) {
        float const p0 = exp2_approx(fmaf(scores(row, 2 * pair), scale_log2, -reference));
        float const p1 = exp2_approx(fmaf(scores(row, 2 * pair + 1), scale_log2, -reference));
        pairs(row, pair) = pack<Element>(p0, p1);
        block_sum += p0 + p1;
      }
      sum[row] = First ? block_sum : sum[row] + block_sum;
    }
  }
};

template <ForwardConfig C>
struct StandardTile {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Shared = SharedLayout<C>;
  using Loader = TileLoader<C.head_dim, C.tile_n, C.threads(), C.copy>;
  using Product = WarpProduct<C>;
  using Scores = typename Product::Scores;
  using Output = typename Product::Output;
  using Probabilities = typename Product::Probabilities;
  using Softmax = StandardSoftmax<2 * T::kRowSteps, Element>;

  ForwardParams const& params;
  char* const smem;
  int const tile_row;         ///< the warp's first row within the tile
  int const row_begin;        ///< and within the sequence
  Loader k_loader, v_loader;  ///< at the next block to bring

  /// Q is on its way into shared memory, not yet committed. `full_blocks`: those before which no row needs a mask.
  /// Leaves the unnormalised O.
  CUTE_DEVICE void run(int blocks, int full_blocks, Output& output, Softmax& softmax) {
    int block = blocks - 1;
    k_loader.source += int64_t(block) * C.tile_n * params.k_stride.seqlen;
    v_loader.source += int64_t(block) * C.tile_n * params.v_stride.seqlen;
    load<true>(k_loader, Shared::kKOffset, params.k_stride.seqlen, block);
    Probabilities probabilities;
    step<true, true>(block, probabilities, output, softmax);
    CUTE_NO_UNROLL
    while (block > full_blocks) step<false, true>(--block, probabilities, output, softmax);
    CUTE_NO_UNROLL
    while (block > 0) step<false, false>(--block, probabilities, output, softmax);
  }

 private:
  template <bool Partial>
  CUTE_DEVICE void load(Loader& loader, int buffer, int64_t stride, int block) {
    loader.template load<Partial>(smem + buffer, stride, params.seqlen_k - block * C.tile_n);
    loader.source -= C.tile_n * stride;
    cute::cp_async_fence();
  }
  CUTE_DEVICE static void wait_for_tile() {
    wait_for_committed_cp_async();
    __syncthreads();
  }

  template <bool First, bool Masked>
  CUTE_DEVICE void step(int block, Probabilities& probabilities, Output& output, Softmax& softmax) {
    using namespace cute;
    Scores scores;
    wait_for_tile();
    load<First>(v_loader, Shared::kVOffset, params.v_stride.seqlen, block);
    compute_scores(scores);
    if constexpr (Masked) apply_mask(params, by_row(scores), score_coordinates<C>(), row_begin, block * C.tile_n);
    wait_for_tile();
    if (block > 0) load<false>(k_loader, Shared::kKOffset, params.k_stride.seqlen, block - 1);
    softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output));
    accumulate(probabilities, output);
  }

  CUTE_DEVICE void compute_scores(Scores& scores) const {
    int const lane = lane_id();
    uint32_t const q_lane = Product::q_lane(lane, tile_row), k_lane = Product::k_lane(lane);
    Product::query_keys(
        typename Product::QFragments{}, [&](int step, auto&& q) FMHA_INLINE { Product::load_q(smem, q_lane, step, q); },
        [&](int step, int n, auto&& k) FMHA_INLINE { Product::load_k(smem, Shared::kKOffset, k_lane, step, n, k); },
        [](int, int) FMHA_INLINE {}, scores);
  }

  CUTE_DEVICE void accumulate(Probabilities const& probabilities, Output& output) const {
    uint32_t const v_lane = Product::v_lane(lane_id());
    Product::template add_values<false>(
        probabilities,
        [&](int step, int n, auto&& v) FMHA_INLINE { Product::load_v(smem, Shared::kVOffset, v_lane, step, n, v); },
        []() FMHA_INLINE {}, output);
  }
};

/// O = softmax(scale Q K^T + mask) V with a positive scale, at least one key and as many queries as keys. Thread blocks
/// come in the order of our own kernels, longest first under a diagonal.
template <ForwardConfig C>
CUTE_DEVICE void standard_forward(ForwardParams const& p) {
  using Tile = StandardTile<C>;
  using Shared = SharedLayout<C>;
  using T = ForwardTypes<C>;
  extern __shared__ __align__(1024) char smem[];
  WorkTile const tile = work_tile(p, C.tile_m, blockIdx.x);
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  int const tile_begin = tile.m_block * C.tile_m;
  int const tile_row = warp * T::kRows;
  int const head_kv = tile.head / (p.num_heads / p.num_heads_kv);
  auto const offset = [&](void const* tensor, Strides const& s, int head, int row) {
    return static_cast<uint16_t const*>(tensor) + tile.batch * s.batch + head * s.head + row * s.seqlen;
  };
  if (threadIdx.x == 0) Shared::position(smem) = {tile_begin, tile.head, tile.batch};
  TileLoader<C.head_dim, C.tile_m, C.threads(), C.copy> const q_loader(offset(p.q, p.q_stride, tile.head, tile_begin),
                                                                       p.q_stride.seqlen, threadIdx.x);
  q_loader.template load<true>(smem, p.q_stride.seqlen, p.seqlen_q - tile_begin);
  Tile mainloop{
      .params = p,
      .smem = smem,
      .tile_row = tile_row,
      .row_begin = tile_begin + tile_row,
      .k_loader = {offset(p.k, p.k_stride, head_kv, 0), p.k_stride.seqlen, int(threadIdx.x)},
      .v_loader = {offset(p.v, p.v_stride, head_kv, 0), p.v_stride.seqlen, int(threadIdx.x)},
  };
  typename T::OutputFragment output;
  cute::clear(output);
  typename Tile::Softmax softmax{.scale_log2 = p.scale_log2};
  mainloop.run(key_blocks(p, tile_begin, tile_begin + C.tile_m, C.tile_n), full_key_blocks(p, tile_begin, C.tile_n),
               output, softmax);

  typename T::Softmax state(p.scale_log2);  // as the epilogue wants it
  CUTE_UNROLL
  for (int row = 0; row < 2 * T::kRowSteps; ++row) {
    state.reference[row] = softmax.maximum[row] * p.scale_log2;
    state.row_sum[row] = softmax.sum[row];
  }
  epilogue<C>(p, smem, output, state, tile_row, threadIdx.x % 32);
}

}  // namespace cutlass_fmha
