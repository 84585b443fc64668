// The end of a thread block of a row with features: O and the LSE leave, as the caller wants them or as one of several
// parts. Few queries' parts of the keys are merged through shared memory before.
#pragma once

#include "../core/merge.cuh"
#include "../forward/staging.cuh"
#include "layout.cuh"
#include "walk.cuh"

namespace cutlass_fmha {

/// Neighbouring numbers of a row of O, 16 bytes of elements: `there` of them exist.
template <class Element>
CUTE_DEVICE void write_elements(Element* to, float const (&o)[16 / sizeof(Element)], int there, bool vectors) {
  uint32_t packed[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) packed[i] = pack<Element>(o[2 * i], o[2 * i + 1]);
  if (vectors) {
    *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    return;
  }
  CUTE_UNROLL
  for (int i = 0; i < 16 / int(sizeof(Element)); ++i) {
    if (i < there) to[i] = reinterpret_cast<Element const*>(packed)[i];
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
  float const scale_log2 = p.score_unit * kLog2e;
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
  using Element = typename ForwardTypes<C>::Element;
  auto const write_part = [&](int dimension, int there, auto const& at, auto const& merged, auto const& o) {
    int64_t const row = tile.split * p.lse_rows + lse_row(p, s, at);
    write_floats(p.partial_o + row * p.head_dim_v + dimension, o, there, p.vectors);
    if (dimension > 0) return;
    PartLse const lse(merged.state, p.score_unit);
    p.partial_lse[row] = at.query < s.queries ? lse.high : -INFINITY;
    p.partial_low[row] = lse.low;
  };
  auto const write_output = [&](int dimension, int there, auto const& at, auto const& merged, auto const& o) {
    write_elements(output_row<Element>(p, s, at) + dimension, o, there, p.vectors);
    if (p.lse != nullptr && dimension == 0) p.lse[lse_row(p, s, at)] = at.query < s.queries ? merged.lse : -INFINITY;
  };
  if (p.splits > 1) {
    for_merged_pieces<C, 4>(p, smem, s, tile, write_part);
  } else {
    for_merged_pieces<C, 16 / int(sizeof(Element))>(p, smem, s, tile, write_output);
  }
}

// ---- many queries: each warp has rows of its own

/// A row's keys, and the sink of its head where this part of the keys counts it: one more key, whose value is 0.
struct RowEnd {
  float factor;  ///< of O
  float lse;     ///< natural log

  /// `maximum`, `reference`, `sum`: the state of the keys, in units of scores. `unit`: of those, in natural units.
  CUTE_DEVICE RowEnd(float maximum, float reference, float sum, float unit, float sink) {
    bool const empty = sum == 0.f;
    float const r = reference == -INFINITY ? rounded_product(maximum, unit * kLog2e) : reference;
    float above = 0.f;  // by how much the sink exceeds r, in log2 units; exactly, also where r is coarse
    float keys = 1.f, total = sum;
    if (sink != -INFINITY) {
      above = reference == -INFINITY ? fmaf(-maximum, unit, sink) * kLog2e : fmaf(sink, kLog2e, -reference);
      keys = empty ? 0.f : exp2_approx(fminf(0.f, -above));
      total = fmaf(keys, sum, empty ? 1.f : exp2_approx(fminf(0.f, above)));
    }
    bool const by_sink = sink != -INFINITY && (empty || above > 0.f);
    factor = empty ? 0.f : keys / total;
    lse = by_sink ? log_sum_exp(sink * kLog2e, total) : log_sum_exp(r, total);
  }
};

/// O and LSE of this warp's rows.
template <ForwardConfig C>
CUTE_DEVICE void write_tile_rows(FeatureParams const& p, char* smem, typename ForwardTypes<C>::OutputFragment& output,
                                 typename ForwardTypes<C>::Softmax const& softmax, int tile_row) {
  using namespace cute;
  using Shared = FeatureTileLayout<C>;
  using Word = typename ForwardTypes<C>::Word;
  static_assert(ForwardTypes<C>::P::kWidth == ForwardTypes<C>::OutputPanels::kWidth, "rows of O lie within those of Q");
  // What is read of the tile is read before, not anew behind each store.
  Sequence const s = Shared::place(smem).sequence;
  FeatureTile const tile = Shared::place(smem).tile;
  RowMaxima const maxima = Shared::maxima(smem, tile_row);
  float const kept = C.modifies_scores() ? p.dropout_scale : 1.f;
  int const lane = lane_id();
  auto rows = by_row(output);
  typename ForwardTypes<C>::Softmax::PerRow lse;
  if (p.sinks == nullptr) {
    lse = softmax.finalize(rows, maxima, kept);
  } else {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(rows); ++row) {
      float const sink = p.sinks[query_row(p, tile, tile.row_begin + tile_row + accumulator_row(row, lane)).head];
      RowEnd const end(maxima.get(row), softmax.reference[row], QuadOfLanes::sum(softmax.row_sum[row]), p.score_unit,
                       sink);
      float const factor = end.factor * kept;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(rows); ++col) rows(row, col) = factor == 0.f ? 0.f : rows(row, col) * factor;
      lse[row] = end.lse;
    }
  }
  stage_rows<C>(smem, tile_row, rows, lane);
  __syncwarp();
  with_query_rows<C>(p, tile, [&](auto const& at) {
    if (p.lse != nullptr && lane % 4 == 0) {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(rows); ++row) {
        QueryRow const here = at(tile_row + accumulator_row(row, lane));
        if (here.query < s.rows_q) p.lse[lse_row(p, s, here)] = here.query < s.queries ? lse[row] : -INFINITY;
      }
    }
    Word* const o = output_row<Word>(p, s, {0, tile.head});
    for_staged_rows<C>(smem, tile_row, lane, [&](int row, int column, uint128_t const& chunk) {
      QueryRow const here = at(tile_row + row);
      if (here.query >= s.rows_q || column >= p.head_dim_v) return;
      Word* const to = o + uint32_t(here.query) * p.o_stride.seqlen + (here.head - tile.head) * p.o_stride.head;
      *reinterpret_cast<uint128_t*>(to + column) = here.query < s.queries ? chunk : uint128_t{};
    });
  });
}

}  // namespace cutlass_fmha
