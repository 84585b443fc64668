// Where the warps that divide the keys of a tile meet at its end: each leaves the unnormalised O of its key part in
// shared memory, in fp32, with the softmax state that belongs to it, and whole rows are merged from there. One key part
// is a merger of one.
#pragma once

#include "fragments.cuh"
#include "merge.cuh"

namespace cutlass_fmha {

/// Rows of O, of `RowFloats` each, take the place of what the walk had in shared memory, `TileBytes` in all; their
/// states stand behind.
template <ForwardConfig C, int RowFloats, int TileBytes>
struct KeyPartStates {
  static constexpr int kOutput = C.kv_warps * C.tile_m * RowFloats * int(sizeof(float));
  static constexpr int kMaxima = TileBytes > kOutput ? TileBytes : kOutput;
  static constexpr int kSums = kMaxima + C.kv_warps * C.tile_m * int(sizeof(float));
  static constexpr int kBytes = kSums + C.kv_warps * C.tile_m * int(sizeof(float));
  static_assert(kBytes <= 99 * 1024, "sm_89 and sm_120 have no more");

  CUTE_DEVICE static float* maxima(char* smem) { return reinterpret_cast<float*>(smem + kMaxima); }
  CUTE_DEVICE static float* sums(char* smem) { return reinterpret_cast<float*>(smem + kSums); }

 protected:
  CUTE_DEVICE static float* output(char* smem, int key_part, int row) {
    return reinterpret_cast<float*>(smem) + (key_part * C.tile_m + row) * RowFloats;
  }
};

/// Rows of O whose walk had columns in order: [key part][row][dimension]. What is added to a row keeps neighbouring
/// ones in different banks.
template <ForwardConfig C, int TileBytes>
struct KeyPartLayout : KeyPartStates<C, C.head_dim_v() + 8, TileBytes> {
  /// The dimension of the number at a `place` of a row, which four neighbouring ones share a float4 with.
  CUTE_DEVICE static int dimension(int place) { return place; }
  CUTE_DEVICE static float4 const& at(char* smem, int key_part, int row, int place) {
    return reinterpret_cast<float4 const*>(KeyPartLayout::output(smem, key_part, row) + place)[0];
  }
  /// This lane's part of a row of an accumulator.
  template <class Row>
  CUTE_DEVICE static void write(char* smem, int key_part, int row, int lane, Row const& o) {
    float* const to = KeyPartLayout::output(smem, key_part, row) + lane % 4 * 2;
    CUTE_UNROLL
    for (int col = 0; col < cute::size(o); col += 2) {
      *reinterpret_cast<float2*>(to + col / 2 * 8) = make_float2(o(col), o(col + 1));
    }
  }
};

/// Leaves this warp's O and l where MergedRow finds them. Nobody reads tiles any more. `there`: rows of the tile, those
/// from there on are not merged.
template <ForwardConfig C, class Layout>
CUTE_DEVICE void write_key_part(char* smem, int key_part, int tile_row,
                                typename ForwardTypes<C>::OutputFragment& output,
                                typename ForwardTypes<C>::Softmax const& softmax, int there = C.tile_m) {
  using namespace cute;
  int const lane = lane_id();
  auto rows = by_row(output);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rows); ++row) {
    if (there < C.tile_m && tile_row + accumulator_row(row, 0) >= there) break;
    int const r = tile_row + accumulator_row(row, lane);
    Layout::write(smem, key_part, r, lane, rows(row, _));
    float const sum = QuadOfLanes::sum(softmax.row_sum[row]);
    if (lane % 4 == 0) Layout::sums(smem)[key_part * C.tile_m + r] = sum;
  }
}

/// What the key parts of a row come to: its LSE, and a few neighbouring numbers of O at a time.
template <ForwardConfig C, class Layout>
struct MergedRow {
  float weight[C.kv_warps];
  MergedState state;
  float lse;

  CUTE_DEVICE MergedRow(char* smem, int row, float scale_log2) {
    float const* const maxima = Layout::maxima(smem) + row;
    CUTE_UNROLL
    for (int key_part = 0; key_part < C.kv_warps; ++key_part) state.see(maxima[key_part * C.tile_m]);
    CUTE_UNROLL
    for (int key_part = 0; key_part < C.kv_warps; ++key_part) {
      weight[key_part] = state.weight(maxima[key_part * C.tile_m], scale_log2);
      state.add(weight[key_part], Layout::sums(smem)[key_part * C.tile_m + row]);
    }
    lse = state.lse(scale_log2);
  }

  /// O from a place on, times `factor`; 0 where no key is visible, whatever V held.
  template <int Count>
  CUTE_DEVICE void read(char* smem, int row, int place, float factor, float (&o)[Count]) const {
    CUTE_UNROLL
    for (int i = 0; i < Count; ++i) o[i] = 0.f;
    CUTE_UNROLL
    for (int key_part = 0; key_part < C.kv_warps; ++key_part) {
      CUTE_UNROLL
      for (int n = 0; n < Count / 4; ++n) {
        add_weighted(o + 4 * n, weight[key_part], Layout::at(smem, key_part, row, place + 4 * n));
      }
    }
    float const inverse = factor / state.sum;
    CUTE_UNROLL
    for (int i = 0; i < Count; ++i) o[i] = state.normalised(o[i], inverse);
  }
};

}  // namespace cutlass_fmha
