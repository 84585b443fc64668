// The forward kernel: O = softmax(scale Q K^T + mask) V and its LSE, one tile of query rows of one head per block.
#pragma once

#include "../registry.h"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "scheduler.h"

namespace cutlass_fmha {

template <ForwardConfig C>
constexpr int forward_smem_bytes() {
  return SharedLayout<C>::kBytes;
}

/// Moves the sign of the softmax scale into Q, see set_scale().
template <ForwardConfig C>
CUTE_DEVICE void transform_q(ForwardParams const& p, char* smem) {
  if (p.q_and == 0xffffffffu && p.q_xor == 0u) return;
  for (int i = threadIdx.x; i < SharedLayout<C>::kQ / 4; i += C.threads()) {
    uint32_t& pair = reinterpret_cast<uint32_t*>(smem)[i];
    pair = (pair & p.q_and) ^ p.q_xor;
  }
  __syncthreads();
}

template <ForwardConfig C>
CUTE_DEVICE void forward(ForwardParams const& p) {
  using T = ForwardTypes<C>;
  using Shared = SharedLayout<C>;
  static_assert(C.tile_m % (16 * C.warps) == 0 && C.tile_n % 16 == 0 && C.head_dim % 32 == 0 && C.warps % 2 == 0);
  extern __shared__ __align__(1024) char smem[];

  WorkTile const tile = work_tile(p, C.tile_m, blockIdx.x);
  int const lane = threadIdx.x % 32;
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform, and the compiler knows it
  bool const second_group = warp >= C.warps / 2;
  int const tile_begin = tile.m_block * C.tile_m;
  int const blocks = key_blocks(p, tile_begin, tile_begin + C.tile_m, C.tile_n);
  int const head_kv = tile.head / (p.num_heads / p.num_heads_kv);

  auto const offset = [&](void const* tensor, Strides const& s, int head, int row) {
    return static_cast<uint16_t const*>(tensor) + tile.batch * s.batch + head * s.head + row * s.seqlen;
  };
  uint32_t const barriers = cute::cast_smem_ptr_to_uint(smem + Shared::kBarriers);
  int const half_thread = threadIdx.x % (C.threads() / 2);
  Mainloop<C> mainloop{
      .params = p,
      .smem = smem,
      .uniform_tile_row = Mainloop<C>::tile_row_of(warp),
      .blocks = blocks,
      .second_group = second_group,
      .k_pipe = {barriers},
      .v_pipe = {barriers + TilePipeline<C.stages>::kBytes},
      .qv_lane_offset = Mainloop<C>::KvTile::lane_offset(lane % 16, lane / 16 * 8),
      .k_lane_offset = Mainloop<C>::KvTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8),
      .loader =
          second_group
              ? typename Mainloop<C>::KvLoader(offset(p.k, p.k_stride, head_kv, 0), p.k_stride.seqlen, half_thread)
              : typename Mainloop<C>::KvLoader(offset(p.v, p.v_stride, head_kv, 0), p.v_stride.seqlen, half_thread),
  };

  int const row_begin = tile_begin + mainloop.tile_row();
  mainloop.first_phase = blocks - key_blocks(p, row_begin, row_begin + T::kRows, C.tile_n);
  if (threadIdx.x == 0) {
    *reinterpret_cast<TilePosition*>(smem + Shared::kTileBegin) = {tile_begin, tile.head, tile.batch};
  }
  typename T::OutputFragment output;
  cute::clear(output);
  typename T::Softmax softmax(p.scale_log2);
  if (blocks > 0) {
    mainloop.init_pipelines();
    TileLoader<C.head_dim, C.tile_m, C.threads(), C.copy> q_loader(offset(p.q, p.q_stride, tile.head, tile_begin),
                                                                   p.q_stride.seqlen, threadIdx.x);
    q_loader.template load<true>(smem, p.q_stride.seqlen, p.seqlen_q - tile_begin);
    cute::cp_async_fence();
    __syncthreads();  // the pipelines' barriers exist
    mainloop.prologue();
    wait_for_committed_cp_async();  // Q, the only committed group: K and V report to their pipelines
    __syncthreads();
    transform_q<C>(p, smem);
    mainloop.run(output, softmax);
  } else {
    __syncthreads();
  }
  epilogue<C>(p, smem, output, softmax, mainloop.tile_row(), lane);
}

}  // namespace cutlass_fmha
