// Which rows a thread block of a wide row computes, which it only clears, and which keys it walks. Plain integer
// arithmetic, the same on host and device.
#pragma once

#include "../features/sequence.h"

namespace cutlass_fmha {

/// Rows are numbered within a sequence: the queries of one head or, packed, the heads of a group for the only query.
///
/// Rows before `masked` and from `live` on see no key. The block numbered `begin` / tile_m clears such rows in
/// [begin, end), and computes rows [first, first + rows), counted off from `masked` on: so that a block computes rows
/// that all see a key, which the example takes for granted.
struct WideTile {
  Sequence sequence;
  int head;  ///< of row 0
  int begin, end;
  int masked, live;
  int first, rows;
  int keys;      ///< that one of these rows sees: 0 .. keys - 1
  int diagonal;  ///< row r sees keys up to r + diagonal; kNoDiagonal: all of them

  FMHA_HOST_DEVICE bool clears(int row) const { return row < masked || row >= live; }
};

FMHA_HOST_DEVICE inline WideTile wide_tile(FeatureParams const& p, int tile_m, int block) {
  FeatureTile const place = tile_at(p, tile_m, block);
  Sequence const s = sequence_at(p, place.batch);
  WideTile t;
  t.sequence = s;
  t.head = place.head;
  t.begin = place.row_begin;
  bool const all = p.window_right < 0;
  int const diagonal = s.offset + p.window_right;
  int const blind = all ? 0 : smaller(larger(-diagonal, 0), s.queries);
  t.masked = (s.keys == 0 ? s.queries : blind) * p.pack;
  t.live = s.queries * p.pack;
  t.end = smaller(t.begin + tile_m, s.rows_q * p.pack);
  t.first = t.masked + t.begin;
  t.rows = larger(0, smaller(tile_m, t.live - t.first));
  // Packed rows are of one query: what it sees is all that there is to walk.
  int const last_query = p.pack == 1 ? t.first + t.rows - 1 : 0;
  t.keys = all ? s.keys : smaller(s.keys, last_query + diagonal + 1);
  t.diagonal = all || p.pack > 1 ? kNoDiagonal : diagonal;
  return t;
}

/// Where row 0 of the tile's sequence stands in Q or O, and how far apart rows are.
struct RowPlace {
  int64_t base, step;

  FMHA_HOST_DEVICE int64_t operator[](int row) const { return base + row * step; }
};

FMHA_HOST_DEVICE inline RowPlace query_rows(FeatureParams const& p, WideTile const& t, Strides const& stride) {
  Sequence const& s = t.sequence;
  return {s.entry_q * stride.batch + s.first_q * stride.seqlen + t.head * stride.head,
          p.pack == 1 ? stride.seqlen : stride.head};
}

/// Where the first key that counts stands in K or V, for the tile's heads.
FMHA_HOST_DEVICE inline int64_t first_key(FeatureParams const& p, WideTile const& t, Strides const& stride) {
  Sequence const& s = t.sequence;
  int const head = t.head / (p.num_heads / p.num_heads_kv);
  return s.entry_k * stride.batch + s.first_k * stride.seqlen + head * stride.head;
}

FMHA_HOST_DEVICE inline RowPlace lse_rows(FeatureParams const& p, WideTile const& t) {
  Sequence const& s = t.sequence;
  return {s.batch * p.lse_batch_stride + t.head * p.lse_head_stride + s.first_q, p.pack == 1 ? 1 : p.lse_head_stride};
}

/// Float32 space for O: [batch, seqlen_q, num_heads, head_dim_v] or [total_q, ...], contiguous.
FMHA_HOST_DEVICE inline RowPlace accumulator_rows(FeatureParams const& p, WideTile const& t) {
  int64_t const token = int64_t(t.sequence.entry_q) * p.seqlen_q + t.sequence.first_q;
  return {(token * p.num_heads + t.head) * p.head_dim_v, int64_t(p.pack == 1 ? p.num_heads : 1) * p.head_dim_v};
}

FMHA_HOST_DEVICE inline RowPlace bias_rows(FeatureParams const& p, WideTile const& t) {
  return {t.sequence.batch * p.bias_stride.batch + t.head * p.bias_stride.head,
          p.pack == 1 ? p.bias_stride.query : p.bias_stride.head};
}

}  // namespace cutlass_fmha
