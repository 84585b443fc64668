// Gradients of float32 and of head dims above 256. A thread block owns tile_m rows of one gradient: of dQ, and walks
// the keys that its queries see; or of dK or dV, and walks the queries, of all heads that share the keys, one head
// after the other. So every sum has one order, and no two blocks write to the same place; a bias's gradient apart.
//
// The three are one computation. With X what is owned and Y what is walked, [Q, dO] and [K, V] or the other way around,
//     S = X0 Y0^T      dP = X1 Y1^T      dS = P (dP - D)      dX0 = scale dS Y0      dV = P dO
// Scores are computed again for each, so that a thread keeps one gradient in registers. Operands pass through shared
// memory in steps, some dimensions at a time: one is on its way while the other is multiplied.
#pragma once

#include "../backward/listed_tile.cuh"
#include "../features/lane_dropout.cuh"
#include "../wide/steps.cuh"
#include "tile.h"

namespace cutlass_fmha {

template <WideBackwardConfig C, class T>
struct WideBackwardStorage : WideSteps<C, T, 2> {
  alignas(16) float terms[kTermsOfQuery * C.tile_m];                  ///< row_terms of the queries
  float derivatives[C.tile_m * C.tile_n / C.threads()][C.threads()];  ///< of a softcap, by each thread's scores
  WideBackwardTile tile;
};

template <WideBackwardConfig C, class T>
struct WideBackward {
  using Products = WideProducts<C, T>;
  using Storage = WideBackwardStorage<C, T>;
  static constexpr int kSteps = C.head_dim / C.step_columns();

  BackwardParams const& p;
  Storage& shared;
  WideBackwardTile const& tile = shared.tile;
  Products const products{};
  int const warp_row = static_cast<int>(threadIdx.y) / 2 * 16, half = static_cast<int>(threadIdx.y) % 2;
  int turn = 0;         ///< which step's memory holds what is multiplied next
  uint32_t pieces = 0;  ///< of the tile of scores, those that block lists name; without them all
  typename Products::Scores weights, other;
  typename Products::Sums gradient[kSteps] = {};

  /// The first row of Y of the tile of that number, and its head, counted from the block's first.
  CUTE_DEVICE int walked_head(int number) const { return number / tile.tiles; }
  CUTE_DEVICE int walked_begin(int number) const {
    return (tile.first + number - walked_head(number) * tile.tiles) * C.tile_n;
  }
  CUTE_DEVICE int query_head(int number) const { return tile.head + walked_head(number); }
  CUTE_DEVICE int first_query(int number) const { return tile.has_queries() ? tile.begin : walked_begin(number); }
  CUTE_DEVICE int first_key(int number) const { return tile.has_queries() ? walked_begin(number) : tile.begin; }

  /// The next tile from there on of which block lists name something.
  CUTE_DEVICE int named_from(int number) {
    pieces = ~0u;
    if (p.block_counts == nullptr) return number;
    for (int const group = p.num_heads / p.num_heads_kv; number < tile.tiles * tile.heads; ++number) {
      int const head = query_head(number), head_kv = head / group;
      pieces = listed_tile(p, tile.sequence, head_kv, head - head_kv * group, first_query(number) / C.tile_m,
                           first_key(number))
                   .pieces;
      if (pieces != 0) break;
    }
    return number;
  }

  template <int Dim, class Tile>
  CUTE_DEVICE void copy(Tile& to, WideOperand const& from, int64_t head, int begin, int end, int dim) const {
    copy_rows<Dim, C.threads()>(to, from.tensor, from.first + head * from.head_stride + dim, from.row_stride, begin,
                                end, from.dims - dim);
  }

  /// Asks for what a step multiplies.
  CUTE_DEVICE void load(int number, int step) const {
    WideStep<C, T>& to = shared.steps[turn];
    int const head = walked_head(number), begin = walked_begin(number);
    if (step >= tile.all_score_steps) {
      int const column = (step - tile.all_score_steps) * C.step_columns();
      return copy<C.step_columns()>(to.factor.y, tile.factor(), head, begin, tile.walked, column);
    }
    bool const second = step >= tile.score_steps;
    int const dim = (step - (second ? tile.score_steps : 0)) * C.step_dims();
    copy<C.step_dims()>(to.scores.x, tile.x[second], 0, tile.begin, tile.end, dim);
    copy<C.step_dims()>(to.scores.y, tile.y[second], head, begin, tile.walked, dim);
    // Nobody reads these any more: since the last tile's were used, everybody has come to another step.
    int const thread = threadIdx.y * 32 + threadIdx.x;
    if (step > 0 || thread >= kTermsOfQuery * C.tile_m / 4) return;
    int const query = tile.has_queries() ? tile.begin : begin;
    float const* const from = tile.terms + head * tile.terms_stride + query / C.tile_m * (kTermsOfQuery * C.tile_m);
    cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(reinterpret_cast<cute::uint128_t const*>(from)[thread],
                                                           reinterpret_cast<cute::uint128_t*>(shared.terms)[thread]);
  }

  // ---- what becomes of scores

  static constexpr int kLaneScores = 4 * Products::kScores;
  CUTE_DEVICE static float& lane_score(typename Products::Scores& scores, int i) { return scores.x[0][i / 4][i % 4]; }

  /// The query of a lane's score and its key, counted from the tile's first ones.
  struct Place {
    int query, key;
  };
  CUTE_DEVICE Place place(int i) const {
    int const row = warp_row + static_cast<int>(threadIdx.x) / 4 + i % 4 / 2 * 8;
    int const column = half * (C.tile_n / 2) + static_cast<int>(threadIdx.x) % 4 * 2 + i / 4 * 8 + i % 2;
    return tile.has_queries() ? Place{row, column} : Place{column, row};
  }
  /// Calls f(score, its number, its place) for each of this lane's.
  template <class Function>
  CUTE_DEVICE void for_each(typename Products::Scores& scores, Function&& f) const {
    CUTE_UNROLL
    for (int i = 0; i < kLaneScores; ++i) f(lane_score(scores, i), i, place(i));
  }
  CUTE_DEVICE float& derivative(int i) const { return shared.derivatives[i][threadIdx.y * 32 + threadIdx.x]; }

  CUTE_DEVICE bool exists(int query, int key) const {
    return query < tile.sequence.queries && key < tile.sequence.keys;
  }

  /// S -> P, in `weights`. LSE is +inf of queries that see nothing and of those that don't exist.
  CUTE_DEVICE void exponentiate(int number) {
    Sequence const& s = tile.sequence;
    int const head = query_head(number), query = first_query(number), key = first_key(number);
    float unit = p.scale * kLog2e;
    if (p.softcap != 0.f) {
      unit = p.softcap * kLog2e;
      for_each(weights, [&](float& score, int i, Place) {
        score = tanh_of_product<T>(score, p.cap_scale);
        derivative(i) = __saturatef(fmaf(-score, score, 1.f));  // 0 of what is no number: it may be hidden
      });
    }
    if (p.bias == nullptr && p.alibi_slopes == nullptr) {
      for_each(weights,
               [&](float& score, int, Place at) { score = exp2_approx(fmaf(score, unit, -shared.terms[at.query])); });
    } else {
      float const slope = p.alibi_slopes == nullptr ? 0.f : alibi_slope(p, s.batch, head);
      for_each(weights, [&](float& score, int, Place at) {
        float added = -slope * fabsf(float(query + at.query + s.offset - key - at.key));
        if (p.bias != nullptr && exists(query + at.query, key + at.key)) {
          int64_t const from = p.bias_stride.offset(s.batch, head, query + at.query, key + at.key);
          added += p.bias_type == BiasType::float32 ? static_cast<float const*>(p.bias)[from]
                                                    : static_cast<float>(static_cast<T const*>(p.bias)[from]);
        }
        score = exp2_approx(fmaf(score, unit, fmaf(added, kLog2e, -shared.terms[at.query])));
      });
    }
    hide(number);
  }

  /// What a query doesn't see becomes 0.
  CUTE_DEVICE void hide(int number) {
    Sequence const& s = tile.sequence;
    int const head = query_head(number), query = first_query(number), key = first_key(number);
    CommonView const view(p, s, query, smaller(query + C.tile_m, s.queries) - 1);
    if (p.mask == nullptr && pieces == ~0u && query + C.tile_m <= s.queries && view.all_see(key, C.tile_n)) return;
    for_each(weights, [&](float& score, int, Place at) {
      bool seen = visible_keys(p, s, query + at.query).sees(key + at.key) &&
                  (pieces >> (at.query / kListedQueries * (C.tile_n / kListedKeys) + at.key / kListedKeys) & 1) != 0;
      if (seen && p.mask != nullptr) {
        seen = p.mask[p.mask_stride.offset(s.batch, head, query + at.query, key + at.key)] != 0;
      }
      if (!seen) score = 0.f;
    });
  }

  /// Which of the lane's scores dropout keeps: a bit of each.
  CUTE_DEVICE uint32_t kept_scores(int number) const {
    if (p.dropout_threshold == 0) return ~0u;
    static_assert(kLaneScores <= 32);
    int const sequence_head = tile.sequence.batch * p.num_heads + query_head(number);
    uint32_t kept = 0;
    CUTE_NO_UNROLL
    for (int i = 0; i < kLaneScores; ++i) {
      Place const at = place(i);
      int const query = first_query(number) + at.query, key = first_key(number) + at.key;
      PhiloxWords const made =
          dropout_numbers(*p.dropout_seed, sequence_head, dropout_query(query), dropout_key(key), WideProduct{});
      int const word = dropout_word(query, key);
      uint32_t const low = word & 1 ? made.word[1] : made.word[0], high = word & 1 ? made.word[3] : made.word[2];
      kept |= (kept_pair(p.kept, word & 2 ? high : low) >> (key & 1) * 16 & 1) << i;
    }
    return kept;
  }

  /// P as dV has it.
  CUTE_DEVICE void drop_out(int number) {
    uint32_t const kept = kept_scores(number);
    for_each(weights, [&](float& weight, int i, Place) { weight = kept >> i & 1 ? weight * p.dropout_scale : 0.f; });
  }

  /// P and dP -> dS, in `weights`. What a mask hides stays 0, whatever dP is.
  CUTE_DEVICE void differentiate(int number) {
    uint32_t const kept = kept_scores(number);
    for_each(weights, [&](float& weight, int i, Place at) {
      float const of_output = kept >> i & 1 ? lane_score(other, i) * p.dropout_scale : 0.f;
      float const ds = weight * (of_output + shared.terms[C.tile_m + at.query]);
      weight = weight == 0.f ? 0.f : ds;
    });
    if (p.dbias != nullptr && tile.has_queries()) add_to_bias(number);
    if (p.softcap == 0.f) return;
    for_each(weights, [&](float& weight, int i, Place) { weight *= derivative(i); });
  }

  CUTE_DEVICE void add_to_bias(int number) {
    for_each(weights, [&](float& ds, int, Place at) {
      if (ds == 0.f || !exists(first_query(number) + at.query, first_key(number) + at.key)) return;
      float* const to = p.dbias + p.dbias_stride.offset(tile.sequence.batch, tile.head, first_query(number) + at.query,
                                                        first_key(number) + at.key);
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(ds) : "memory");
    });
  }

  CUTE_DEVICE void store_weights() {
    int const row = warp_row + threadIdx.x / 4, column = half * (C.tile_n / 2) + threadIdx.x % 4 * 2;
    CUTE_UNROLL
    for (int n = 0; n < Products::kScores; ++n) {
      float const(&x)[4] = weights.x[0][n];
      Products::store(&shared.weights[row][column + 8 * n], x[0], x[1]);
      Products::store(&shared.weights[row + 8][column + 8 * n], x[2], x[3]);
    }
  }

  CUTE_DEVICE void multiply(int number, int step, WideStep<C, T> const& from) {
    if (step >= tile.all_score_steps) {
      CUTE_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        if (i == step - tile.all_score_steps) {
          products.add_values(shared.weights, from.factor, warp_row, half * (C.step_columns() / 2), gradient[i]);
        }
      }
      return;
    }
    int const column = half * (C.tile_n / 2);
    if (step < tile.score_steps) {
      if (step == 0) weights.clear();
      products.add_scores(from.scores, warp_row, column, weights);
      if (step == tile.score_steps - 1) exponentiate(number);
      if (step == tile.all_score_steps - 1) drop_out(number);  // a gradient of V
    } else {
      if (step == tile.score_steps) other.clear();
      products.add_scores(from.scores, warp_row, column, other);
      if (step == tile.all_score_steps - 1) differentiate(number);
    }
    if (step == tile.all_score_steps - 1) store_weights();
  }

  CUTE_DEVICE void run() {
    int const numbers = tile.tiles * tile.heads;
    int number = named_from(0), step = 0;
    if (number >= numbers) return;
    load(number, 0);
    cute::cp_async_fence();
    while (number < numbers) {
      cute::cp_async_wait<0>();
      __syncthreads();  // the step's operands have arrived, as have weights; everybody is done with those before
      WideStep<C, T> const& from = shared.steps[turn];
      bool const ends = step + 1 == tile.steps;
      // The last step of a tile has no use for its pieces.
      int const next = ends ? named_from(number + 1) : number, next_step = ends ? 0 : step + 1;
      turn ^= 1;
      if (next < numbers) load(next, next_step);
      cute::cp_async_fence();
      multiply(number, step, from);
      number = next, step = next_step;
    }
  }

  CUTE_DEVICE void write() {
    bool const queries = tile.has_queries();
    void* const to = queries ? p.dq : tile.of == GradientOf::key ? p.dk : p.dv;
    if (to == nullptr) return;  // the block had a bias's
    Strides const& stride = queries ? p.dq_stride : tile.of == GradientOf::key ? p.dk_stride : p.dv_stride;
    Sequence const& s = tile.sequence;
    int const group = p.num_heads / p.num_heads_kv, dims = tile.factor().dims;
    int64_t const first = queries
                              ? s.entry_q * stride.batch + s.first_q * stride.seqlen + tile.head * stride.head
                              : s.entry_k * stride.batch + s.first_k * stride.seqlen + tile.head / group * stride.head;
    float const factor = tile.of == GradientOf::value ? 1.f : p.scale;
    int const rows = queries ? s.rows_q : s.keys, existing = queries ? s.queries : s.keys;
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const column = i * C.step_columns() + half * (C.step_columns() / 2);
      CUTE_UNROLL
      for (int below = 0; below < 2; ++below) {
        int const row = tile.begin + warp_row + static_cast<int>(threadIdx.x) / 4 + 8 * below;
        if (row >= rows) continue;
        if (row >= existing) {  // its dS is 0, but perhaps not all keys are numbers
          CUTE_UNROLL
          for (auto& sums : gradient[i]) sums[2 * below] = sums[2 * below + 1] = 0.f;
        }
        products.write(static_cast<T*>(to) + first + row * stride.seqlen + column, below, dims - column, factor,
                       gradient[i]);
      }
    }
  }
};

template <WideBackwardConfig C>
using WideBackwardMemory = WideBackwardStorage<C, typename WideScalar<C.dtype>::type>;

template <WideBackwardConfig C>
CUTE_DEVICE void backward_wide(BackwardParams const& p) {
  extern __shared__ __align__(16) char smem_of_gradients[];
  auto& shared = *reinterpret_cast<WideBackwardMemory<C>*>(smem_of_gradients);
  if (threadIdx.x == 0 && threadIdx.y == 0) find_tile(p, C, blockIdx.x, shared.tile);
  __syncthreads();
  if (shared.tile.begin >= (shared.tile.has_queries() ? shared.tile.sequence.rows_q : shared.tile.end)) return;
  WideBackward<C, typename WideScalar<C.dtype>::type> block{p, shared};
  block.run();
  block.write();
}

template <WideBackwardConfig C>
constexpr int backward_wide_smem_bytes() {
  static_assert(sizeof(WideBackwardMemory<C>) <= 99 * 1024, "sm_89 and sm_120 have no more");
  return sizeof(WideBackwardMemory<C>);
}

}  // namespace cutlass_fmha
