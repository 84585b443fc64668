// The forward kernel: O = softmax(scale Q K^T + mask) V and its LSE, one tile of query rows of one head per block.
#pragma once

#include "../core/dependent_launch.cuh"
#include "../core/scheduler.h"
#include "epilogue.cuh"
#include "epilogue_tma.cuh"
#include "few_query_epilogue.cuh"
#include "few_query_ldg.cuh"
#include "few_query_tma.cuh"

namespace cutlass_fmha {

/// What a kernel takes.
template <ForwardConfig C>
using KernelParams = cute::conditional_t<C.copy == Copy::tma, ForwardTmaParams, ForwardParams>;

template <ForwardConfig C>
constexpr int forward_smem_bytes() {
  if constexpr (C.kv_warps > 1 && C.copy == Copy::tma) {
    return FewQueryTmaLayout<C>::kBytes;
  } else if constexpr (C.kv_warps > 1) {
    return LdgKeyParts<C>::kBytes;
  } else if constexpr (C.copy == Copy::tma) {
    return TmaLayout<C>::kBytes;
  } else {
    return SharedLayout<C>::kBytes;
  }
}

/// Each warp has query rows of its own and walks all their keys.
template <ForwardConfig C>
CUTE_DEVICE void forward_rows(ForwardParams const& p) {
  using T = ForwardTypes<C>;
  using Shared = SharedLayout<C>;
  static_assert(C.tile_m % (16 * C.warps) == 0 && C.tile_n % 16 == 0 && C.head_dim % 32 == 0 && C.warps % 2 == 0);
  static_assert(C.kv_warps == 1 && C.copy != Copy::ldg_16 && !C.dependent_launch);
  extern __shared__ __align__(1024) char smem[];

  WorkTile const tile = work_tile(p.schedule, blockIdx.x);
  int const lane = threadIdx.x % 32;
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform, and the compiler knows it
  bool const second_group = warp >= C.warps / 2;
  int const tile_begin = tile.m_block * C.tile_m;
  int const blocks = key_blocks(p, tile_begin, tile_begin + C.tile_m, C.tile_n);
  int const head_kv = kv_head(p, tile.head);

  auto const offset = [&](void const* tensor, Strides const& s, int head, int row) {
    return static_cast<typename T::Word const*>(tensor) + tile.batch * s.batch + head * s.head + row * s.seqlen;
  };
  // Where there is room, what is computed here stays: the compiler must not compute it again in each phase.
  auto const keep = [](uint32_t x) { return is_roomy(C) ? settled(x) : x; };
  uint32_t const barriers = cute::cast_smem_ptr_to_uint(smem + Shared::kBarriers);
  int const half_thread = threadIdx.x % (C.threads() / 2);
  using Keys = CpAsyncKeys<C>;
  Keys keys{
      .params = p,
      .smem = smem,
      .warp_tile_row = tile_row_of<C>(warp),
      .in_second_group = second_group,
      .blocks = blocks,
      .k_pipe = {barriers},
      .v_pipe = {barriers + KvPipeline<C>::kBytes},
      .qv_lane_offset = keep(WarpProduct<C>::v_lane(lane)),
      .k_lane_offset = keep(WarpProduct<C>::k_lane(lane)),
      .loader = second_group
                    ? typename Keys::Loader(offset(p.k, p.k_stride, head_kv, 0), p.k_stride.seqlen, half_thread)
                    : typename Keys::Loader(offset(p.v, p.v_stride, head_kv, 0), p.v_stride.seqlen, half_thread),
  };

  if constexpr (C.copy == Copy::cp_async_16) keys.loader.destination = keep(keys.loader.destination);
  int const row_begin = tile_begin + tile_row_of<C>(warp);
  keys.first_phase = blocks - key_blocks(p, row_begin, row_begin + T::kRows, C.tile_n);
  keys.all_see_from = uniform(blocks - full_key_blocks(p, row_begin, C.tile_n));
  if (threadIdx.x == 0) Shared::position(smem) = {tile_begin, tile.head, tile.batch};
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.scale_log2);
  if (blocks > 0) {
    keys.init_shared();
    TileLoader<C.head_dim, C.tile_m, C.threads(), C.copy, C.element_bytes()> q_loader(
        offset(p.q, p.q_stride, tile.head, tile_begin), p.q_stride.seqlen, threadIdx.x);
    q_loader.template load<true>(smem, p.q_stride.seqlen, p.seqlen_q - tile_begin);
    cute::cp_async_fence();
    __syncthreads();  // the pipelines' barriers exist
    keys.prologue();
    wait_for_committed_cp_async();  // Q, the only committed group: K and V report to their pipelines
    __syncthreads();
    transform_q<C>(p, smem);
    TileWalk<C, Keys>{smem, keys}.run(output, softmax);
  } else {
    __syncthreads();
  }
  epilogue<C>(p, smem, output, softmax, keys.tile_row(), lane);
}

/// Groups of C.kv_warps warps share query rows and divide the keys.
template <ForwardConfig C>
CUTE_DEVICE void few_query(ForwardParams const& p) {
  using T = ForwardTypes<C>;
  static_assert(C.tile_m % (16 * (C.warps / C.kv_warps)) == 0 && C.warps % C.kv_warps == 0 && C.tile_n % 16 == 0);
  static_assert(C.copy == Copy::ldg_16 && !C.ping_pong && C.head_dim % 32 == 0);
  static_assert(!C.dependent_launch || C.architecture().copy_unit);
  extern __shared__ __align__(1024) char smem[];

  WorkTile const tile = work_tile(p.schedule, blockIdx.x);
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  int const kv_warp = warp % C.kv_warps;
  int const tile_row = warp / C.kv_warps * T::kRows;
  int const row_begin = tile.m_block * C.tile_m + tile_row;
  int const head_kv = kv_head(p, tile.head);
  auto const slice = [&](void const* tensor, Strides const& s, int head) {
    return static_cast<typename T::Word const*>(tensor) + tile.batch * s.batch + head * s.head;
  };
  LdgKeys<C> const keys{
      .params = p,
      .q = slice(p.q, p.q_stride, tile.head),
      .k = slice(p.k, p.k_stride, head_kv),
      .v = slice(p.v, p.v_stride, head_kv),
      .row_maxima = {LdgKeyParts<C>::maxima(smem) + kv_warp * C.tile_m + tile_row},
      .row_begin = row_begin,
      .kv_warp = kv_warp,
      .blocks = key_blocks(p, row_begin, row_begin + T::kRows, C.tile_n),
  };
  if constexpr (C.dependent_launch) {
    prefetch_inputs<C.head_dim, C.tile_m, C.threads()>(p, keys.q, keys.k, keys.v, tile.m_block);
    wait_for_kernels_ahead();
  }
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.scale_log2);
  if (keys.blocks > kv_warp) {
    walk_steps<C>(keys, output, softmax);
  } else {
    start_without_keys<C>(keys.maxima(), softmax);
  }
  few_query_epilogue<C, LdgKeyParts<C>>(p, smem, tile, kv_warp, tile_row, output, softmax);
}

/// few_query() by TMA.
template <ForwardConfig C>
CUTE_DEVICE void few_query_tma(ForwardTmaParams const& p) {
  using T = ForwardTypes<C>;
  using Layout = FewQueryTmaLayout<C>;
  using QTile = TmaTile<C.head_dim, C.tile_m, C.element_bytes()>;
  static_assert(C.tile_m % (16 * (C.warps / C.kv_warps)) == 0 && C.warps % C.kv_warps == 0 && C.tile_n % 16 == 0);
  static_assert(C.architecture().copy_unit && !C.ping_pong && C.head_dim % 32 == 0);
  extern __shared__ __align__(1024) char smem[];

  if (threadIdx.x == 0 && p.seqlen_k > 0) fetch_maps(p.q_map, p.k_map, p.v_map);  // without keys there is only o_map
  WorkTile const tile = work_tile(p.schedule, blockIdx.x);
  int const warp = uniform(threadIdx.x / 32);
  int const tile_begin = tile.m_block * C.tile_m;
  int const blocks = key_blocks(p, tile_begin, tile_begin + C.tile_m, C.tile_n);
  FewQueryTmaKeys<C> const keys(p, smem, warp, tile, blocks);
  auto* const q_barrier = reinterpret_cast<uint64_t*>(smem + Layout::kQBarrier);
  if (keys.asks() && lane_id() == 0) {
    keys.init_pipelines();
    if (warp == 0) mbarrier_init(cute::cast_smem_ptr_to_uint(q_barrier), 1);
    cutlass::arch::fence_barrier_init();
  }
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.scale_log2);
  start_without_keys<C>(keys.maxima(), softmax);
  __syncthreads();  // the barriers exist
  if constexpr (C.dependent_launch) {
    auto const slice = [&](void const* tensor, Strides const& s, int head) {
      return static_cast<typename T::Word const*>(tensor) + tile.batch * s.batch + head * s.head;
    };
    prefetch_inputs<C.head_dim, C.tile_m, C.threads()>(p, slice(p.q, p.q_stride, tile.head),
                                                       slice(p.k, p.k_stride, keys.head_kv),
                                                       slice(p.v, p.v_stride, keys.head_kv), tile.m_block);
    wait_for_kernels_ahead();
  }
  if (blocks > 0) {
    if (threadIdx.x == 0) QTile::load(p.q_map, q_barrier, smem, QTile::kPanelBytes, tile_begin, tile.head, tile.batch);
    keys.request_first();
    mbarrier_wait(cute::cast_smem_ptr_to_uint(q_barrier), 0);
    transform_q<C>(p, smem);
    if (keys.steps > 0) walk_steps<C>(keys, output, softmax);
  }
  __syncthreads();  // nobody reads tiles any more
  few_query_epilogue<C, typename Layout::KeyParts>(p, smem, tile, keys.key_part, keys.tile_row, output, softmax);
}

/// forward_rows() by TMA.
template <ForwardConfig C>
CUTE_DEVICE void forward_tma(ForwardTmaParams const& p) {
  using T = ForwardTypes<C>;
  using Shared = TmaLayout<C>;
  using QTile = TmaTile<C.head_dim, C.tile_m, C.element_bytes()>;
  static_assert(C.tile_m % (16 * C.warps) == 0 && C.tile_n % 16 == 0 && C.head_dim % 32 == 0 && C.warps % 2 == 0);
  static_assert(C.architecture().copy_unit && C.kv_warps == 1 && C.tile_m <= 256 && C.tile_n <= 256 &&
                !C.dependent_launch);
  extern __shared__ __align__(1024) char smem[];

  Work const work = work_at<C>(p, blockIdx.x);
  int const lane = threadIdx.x % 32;
  int const warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) Shared::work(smem) = work;
  TmaKeys<C> keys(p, smem, warp, work);
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.scale_log2);
  if (work.blocks > 0) {
    TmaProducer<C> const producer(p, smem, warp, work);
    keys.producer = &producer;
    auto* const q_barrier = reinterpret_cast<uint64_t*>(smem + Shared::kQBarrier);
    if (threadIdx.x == 0) {
      keys.k_pipe.init(1, C.threads());
      keys.v_pipe.init(1, C.threads());
      mbarrier_init(cute::cast_smem_ptr_to_uint(q_barrier), 1);
      cutlass::arch::fence_barrier_init();
      QTile::load(p.q_map, q_barrier, smem, QTile::kPanelBytes, work.row_begin, work.head, work.batch);
      producer.start();
    }
    __syncthreads();  // the barriers exist
    mbarrier_wait(cute::cast_smem_ptr_to_uint(q_barrier), 0);
    transform_q<C>(p, smem);
    TileWalk<C, TmaKeys<C>>{smem, keys}.run(output, softmax);
  } else {
    __syncthreads();
  }
  tma_epilogue<C>(p, smem, Shared::work(smem), output, softmax, keys.tile_row, lane);
}

template <ForwardConfig C>
CUTE_DEVICE void forward(KernelParams<C> const& p) {
  if constexpr (C.kv_warps > 1 && C.copy == Copy::tma) {
    few_query_tma<C>(p);
  } else if constexpr (C.kv_warps > 1) {
    few_query<C>(p);
  } else if constexpr (C.copy == Copy::tma) {
    forward_tma<C>(p);
  } else {
    forward_rows<C>(p);
  }
}

}  // namespace cutlass_fmha
