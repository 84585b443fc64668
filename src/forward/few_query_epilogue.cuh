// The end of a thread block whose warps divide the keys: their partial O and l are merged through shared memory, in one
// exchange with one barrier, and leave as whole rows.
#pragma once

#include "../core/merge.cuh"
#include "../core/scheduler.h"
#include "few_query.cuh"

namespace cutlass_fmha {

/// Shared memory of a block: the unnormalised O of each of the C.kv_warps parts of the keys, [key_part][row][column]
/// in fp32, and the softmax state that belongs to it, [key_part][row].
///
/// An output chunk of 8 dimensions (16 bytes) is 8 floats here, in two pieces of 16 bytes. Where they lie in a row:
/// a quad's lanes hold the chunks (or, with panels of 32 dimensions, halves of them) that are written together, and
/// must find them in neighbouring pieces; so must the eight lanes that read together. The XOR keeps two neighbouring
/// rows, which are written together, in different banks.
template <ForwardConfig C>
struct FewQueryLayout {
  using P = typename ForwardTypes<C>::P;
  static constexpr int kChunks = C.head_dim / 8;
  static constexpr int kPanelChunks = P::kChunks;  // 8 or 4: two chunks or one for each lane of a quad
  static constexpr int kOutput = C.kv_warps * C.tile_m * C.head_dim * int(sizeof(float));
  static constexpr int kBytes = kOutput + C.kv_warps * C.tile_m * int(sizeof(float2));
  static_assert(kBytes <= 99 * 1024, "the partial outputs of the warps must fit what sm_89 and sm_120 have");

  CUTE_DEVICE static float2* states(char* smem) { return reinterpret_cast<float2*>(smem + kOutput); }

  /// Where the chunk that starts at dimension 8 * chunk stands among those of its row.
  CUTE_DEVICE static int place(int chunk) {
    int const in_panel = chunk % kPanelChunks;
    return chunk - in_panel + (kPanelChunks == 8 ? in_panel % 2 * 4 + in_panel / 2 : in_panel);
  }
  CUTE_DEVICE static int chunk_at(int place) {
    int const in_panel = place % kPanelChunks;
    return place - in_panel + (kPanelChunks == 8 ? in_panel % 4 * 2 + in_panel / 4 : in_panel);
  }
  CUTE_DEVICE static float4& piece(char* smem, int key_part, int row, int place, int half) {
    int const index = (half * kChunks + place) ^ (row % 2 * 4);
    return reinterpret_cast<float4*>(smem)[(key_part * C.tile_m + row) * (C.head_dim / 4) + index];
  }
};

/// Writes a warp's O. Lane t of a quad holds, in panel p, dimensions (2t + e) * W + i as element e of n8 tile i, where
/// W = 8 (4) is the number of such tiles: FewQueryMainloop.
template <ForwardConfig C>
CUTE_DEVICE void write_partial(char* smem, int kv_warp, int tile_row,
                               typename ForwardTypes<C>::OutputFragment& output) {
  using namespace cute;
  using Shared = FewQueryLayout<C>;
  constexpr int kWidth = Shared::P::kWidth / 8;
  int const lane = lane_id();
  auto rows = by_row(output);  // (row, (e, n8 tile))
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    CUTE_UNROLL
    for (int panel = 0; panel < Shared::P::kCount; ++panel) {
      CUTE_UNROLL
      for (int group = 0; group < kWidth / 2; ++group) {  // four of the lane's dimensions
        int const e = group / (kWidth / 4), i = group % (kWidth / 4) * 4;
        int const chunk = panel * Shared::kPanelChunks + (lane % 4 * 2 + e) * kWidth / 8;
        auto value = [&](int j) { return rows(row, make_coord(e, panel * kWidth + i + j)); };
        Shared::piece(smem, kv_warp, tile_row + accumulator_row(row, lane), Shared::place(chunk), group % 2) =
            make_float4(value(0), value(1), value(2), value(3));
      }
    }
  }
}

/// One chunk of a row, merged over the parts of the keys: O = sum(w O_i) / sum(w l_i) with w = 2^(r_i - r).
template <ForwardConfig C>
CUTE_DEVICE void merge_chunk(ForwardParams const& p, char* smem, WorkTile const& tile, int row, int place) {
  using namespace cute;
  using T = ForwardTypes<C>;
  using Shared = FewQueryLayout<C>;
  float2 state[C.kv_warps];
  MergedState merged;
  CUTE_UNROLL
  for (int key_part = 0; key_part < C.kv_warps; ++key_part) {
    state[key_part] = Shared::states(smem)[key_part * C.tile_m + row];
    merged.see(state[key_part].x);
  }
  float o[8] = {};
  CUTE_UNROLL
  for (int key_part = 0; key_part < C.kv_warps; ++key_part) {
    float const weight = merged.weight(state[key_part].x, p.scale_log2);
    merged.add(weight, state[key_part].y);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      add_weighted(o + 4 * half, weight, Shared::piece(smem, key_part, row, place, half));
    }
  }
  float const inverse = 1.f / merged.sum;
  auto normalised = [&](float x) { return merged.normalised(x, inverse); };
  uint4 packed;
  packed.x = pack<typename T::Element>(normalised(o[0]), normalised(o[1]));
  packed.y = pack<typename T::Element>(normalised(o[2]), normalised(o[3]));
  packed.z = pack<typename T::Element>(normalised(o[4]), normalised(o[5]));
  packed.w = pack<typename T::Element>(normalised(o[6]), normalised(o[7]));
  int const query = tile.m_block * C.tile_m + row;
  if (query >= p.seqlen_q) return;
  auto* const to = static_cast<typename T::Word*>(p.o) + tile.batch * p.o_stride.batch + tile.head * p.o_stride.head +
                   query * p.o_stride.seqlen + Shared::chunk_at(place) * 8;
  *reinterpret_cast<uint4*>(to) = packed;
  if (p.lse != nullptr && place == 0) {
    p.lse[(int64_t(tile.batch) * p.num_heads + tile.head) * p.seqlen_q + query] = merged.lse(p.scale_log2);
  }
}

template <ForwardConfig C>
CUTE_DEVICE void merge_epilogue(ForwardParams const& p, char* smem, WorkTile const& tile, int kv_warp, int tile_row,
                                typename ForwardTypes<C>::OutputFragment& output) {
  using Shared = FewQueryLayout<C>;
  write_partial<C>(smem, kv_warp, tile_row, output);
  __syncthreads();
  constexpr int kItems = C.tile_m * Shared::kChunks;
  CUTE_UNROLL
  for (int begin = 0; begin < kItems; begin += C.threads()) {
    int const item = begin + int(threadIdx.x);
    if (kItems % C.threads() == 0 || item < kItems) {
      merge_chunk<C>(p, smem, tile, item / Shared::kChunks, item % Shared::kChunks);
    }
  }
}

}  // namespace cutlass_fmha
