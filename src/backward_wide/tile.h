// Which gradient a thread block of the family backward_wide computes, of which rows, and what it walks. Plain integer
// arithmetic, the same on host and device.
#pragma once

#include "../backward/params.h"
#include "../core/visibility.h"
#include "config.h"

namespace cutlass_fmha {

/// Of which tensor a block has the gradient.
enum class GradientOf : int { query, key, value };

/// Rows of X or Y, those of one sequence.
struct WideOperand {
  void const* tensor;
  int64_t first;  ///< where row 0 stands
  int64_t row_stride, head_stride;
  int dims;
};

/// What a block computes.
struct WideBackwardTile {
  Sequence sequence;
  GradientOf of;
  int head;          ///< of queries or of keys, as `of` says; of the first queries that it meets, where it has keys
  int begin, end;    ///< rows of X
  int walked;        ///< rows of Y
  int first, tiles;  ///< of Y: those that a head has
  int heads;         ///< of Y
  int score_steps, all_score_steps, steps;  ///< of a tile: of S, of S and dP, and with those of the gradient
  WideOperand x[2], y[2];
  float const* terms;  ///< row_terms of the first query tile of the head
  int64_t terms_stride;

  FMHA_HOST_DEVICE bool has_queries() const { return of == GradientOf::query; }
  /// What is multiplied by P or dS.
  FMHA_HOST_DEVICE WideOperand const& factor() const { return y[of == GradientOf::value]; }
};

/// Blocks that a gradient has.
FMHA_HOST_DEVICE inline int64_t wide_blocks(BackwardParams const& p, GradientOf of, int tile) {
  bool const queries = of == GradientOf::query;
  bool const wanted = queries                 ? p.dq != nullptr || p.dbias != nullptr
                      : of == GradientOf::key ? p.dk != nullptr
                                              : p.dv != nullptr;
  int const length = queries ? p.seqlen_q : p.seqlen_k, heads = queries ? p.num_heads : p.num_heads_kv;
  return wanted ? int64_t(p.batch) * heads * ceil_div(length, tile) : 0;
}

/// Whose walk is longest comes first: keys, and of them the first; of queries the last.
FMHA_HOST_DEVICE inline void find_tile(BackwardParams const& p, WideBackwardConfig c, int number, WideBackwardTile& t) {
  int const keys = int(wide_blocks(p, GradientOf::key, c.tile_m)),
            values = int(wide_blocks(p, GradientOf::value, c.tile_m));
  t.of = number < keys ? GradientOf::key : number < keys + values ? GradientOf::value : GradientOf::query;
  number -= t.of == GradientOf::key ? 0 : t.of == GradientOf::value ? keys : keys + values;
  bool const queries = t.has_queries();
  int const tiles = ceil_div(queries ? p.seqlen_q : p.seqlen_k, c.tile_m),
            heads = queries ? p.num_heads : p.num_heads_kv;
  int const place = number / tiles, batch = place / heads, head = place - batch * heads;
  int const rank = number - place * tiles, group = p.num_heads / p.num_heads_kv;
  Sequence const s = sequence_at(p, batch);
  t.sequence = s;
  t.begin = (queries ? tiles - 1 - rank : rank) * c.tile_m;
  t.end = queries ? s.queries : s.keys;
  t.walked = queries ? s.keys : s.queries;
  t.head = queries ? head : head * group;
  t.heads = queries ? 1 : group;
  int const head_kv = queries ? head / group : head;
  auto const operand = [&](void const* tensor, Strides const& stride, bool of_keys, int dims) {
    int64_t const first = of_keys ? s.entry_k * stride.batch + s.first_k * stride.seqlen + head_kv * stride.head
                                  : s.entry_q * stride.batch + s.first_q * stride.seqlen + t.head * stride.head;
    return WideOperand{tensor, first, stride.seqlen, of_keys ? 0 : stride.head, dims};
  };
  WideOperand const of_queries[] = {operand(p.q, p.q_stride, false, p.head_dim),
                                    operand(p.dout, p.dout_stride, false, p.head_dim_v)};
  WideOperand const of_keys[] = {operand(p.k, p.k_stride, true, p.head_dim),
                                 operand(p.v, p.v_stride, true, p.head_dim_v)};
  for (int i = 0; i < 2; ++i) {
    t.x[i] = queries ? of_queries[i] : of_keys[i];
    t.y[i] = queries ? of_keys[i] : of_queries[i];
  }
  t.terms_stride = kTermsOfQuery * c.tile_m * p.head_tiles;
  t.terms = p.row_terms + t.head * t.terms_stride + first_query_tile(p, s, c.tile_m) * kTermsOfQuery * c.tile_m;
  t.first = t.tiles = 0;
  int const last = smaller(t.begin + c.tile_m, t.end) - 1;
  if (last >= t.begin && queries) {
    KeyWalk const walk = range_walk(p, s, t.begin, last, c.tile_m);
    t.first = walk.first, t.tiles = walk.tiles;
  } else if (last >= t.begin) {
    QueryWalk const walk = query_walk(visible_queries(p, s, t.begin), visible_queries(p, s, last), c.tile_m);
    t.first = walk.first, t.tiles = walk.tiles;
  }
  t.score_steps = ceil_div(p.head_dim, c.step_dims());
  t.all_score_steps = t.score_steps + (t.of == GradientOf::value ? 0 : ceil_div(p.head_dim_v, c.step_dims()));
  t.steps = t.all_score_steps + ceil_div(t.factor().dims, c.step_columns());
}

}  // namespace cutlass_fmha
