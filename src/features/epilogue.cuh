// The end of a thread block of a scored row: the parts of the keys are merged through shared memory, and whole rows
// of O and the LSE leave, as the caller wants them or as one of several parts.
#pragma once

#include "../core/merge.cuh"
#include "few_query.cuh"

namespace cutlass_fmha {

/// Eight neighbouring numbers of a row of O: `there` of them exist.
template <class Element>
CUTE_DEVICE void write_elements(uint16_t* to, float const (&o)[8], int there, bool vectors) {
  uint32_t packed[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) packed[i] = pack<Element>(o[2 * i], o[2 * i + 1]);
  if (vectors) {
    *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    return;
  }
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (i < there) to[i] = uint16_t(packed[i / 2] >> (i % 2 * 16));
  }
}

/// Four of them in fp32, into a part of O.
CUTE_DEVICE void write_floats(float* to, float const (&o)[4], int there, bool vectors) {
  if (vectors) {
    *reinterpret_cast<float4*>(to) = make_float4(o[0], o[1], o[2], o[3]);
    return;
  }
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (i < there) to[i] = o[i];
  }
}

/// Calls write(dimension, there, at, merged, o) for the rows of the tile, in pieces of `Count` numbers
/// of O from `dimension` on, of which `there` exist. What a sequence's unused queries get is 0.
template <ForwardConfig C, int Count, class Write>
CUTE_DEVICE void for_merged_pieces(FeatureParams const& p, char* smem, Sequence const& s, FeatureTile const& tile,
                                   Write const& write) {
  constexpr int kPieces = C.head_dim_v() / Count;
  int const rows = rows_of(p, tile, C.tile_m);
  float const scale_log2 = score_unit(p) * kLog2e;
  CUTE_NO_UNROLL
  for (int item = threadIdx.x; item < rows * kPieces; item += C.threads()) {
    int const row = item / kPieces, dimension = item % kPieces * Count;
    QueryRow const at = query_row(p, tile, tile.row_begin + row);
    int const there = p.head_dim_v - dimension;
    if (at.query >= s.rows_q || there <= 0) continue;
    MergedRow<C, typename FeatureLayout<C>::KeyParts> const merged(smem, row, scale_log2);
    float o[Count];
    merged.read(smem, row, dimension, p.dropout_scale, o);
    CUTE_UNROLL
    for (int i = 0; i < Count; ++i) o[i] = at.query < s.queries ? o[i] : 0.f;
    write(dimension, there, at, merged, o);
  }
}

template <ForwardConfig C>
CUTE_DEVICE void merge_rows(FeatureParams const& p, char* smem, Sequence const& s, FeatureTile const& tile) {
  auto const write_part = [&](int dimension, int there, auto const& at, auto const& merged, auto const& o) {
    int64_t const row = tile.split * p.lse_rows + lse_row(p, s, at);
    write_floats(p.partial_o + row * p.head_dim_v + dimension, o, there, p.vectors);
    if (dimension > 0) return;
    PartLse const lse(merged.state, score_unit(p));
    p.partial_lse[row] = at.query < s.queries ? lse.high : -INFINITY;
    p.partial_low[row] = lse.low;
  };
  auto const write_output = [&](int dimension, int there, auto const& at, auto const& merged, auto const& o) {
    uint16_t* const to = output_row(p, s, at) + dimension;
    write_elements<typename ForwardTypes<C>::Element>(to, o, there, p.vectors);
    if (p.lse != nullptr && dimension == 0) p.lse[lse_row(p, s, at)] = at.query < s.queries ? merged.lse : -INFINITY;
  };
  if (p.splits > 1) {
    for_merged_pieces<C, 4>(p, smem, s, tile, write_part);
  } else {
    for_merged_pieces<C, 8>(p, smem, s, tile, write_output);
  }
}

}  // namespace cutlass_fmha
