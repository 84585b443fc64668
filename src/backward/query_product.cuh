// dQ where dS was written to memory: dQ = scale dS K, a product over all keys that some of a block's queries see, or
// that lists name with them.
//
// Both operands come through a ring of steps in shared memory. What dS isn't written of, because nobody there sees the
// keys, is zeros.
#pragma once

#include "../features/loader.cuh"
#include "layout.cuh"
#include "overlap.cuh"

namespace cutlass_fmha {

template <QueryProductConfig C>
struct QueryProductLayout {
  static constexpr int kScoresStep = C.tile_m * C.tile_n * 2, kKeysStep = C.tile_n * C.head_dim * 2;
  static constexpr int kStep = kScoresStep + kKeysStep;
  static constexpr int kBarriers = C.stages * kStep;
  static constexpr int kBytes = kBarriers + TilePipeline<C.stages>::kBytes;
  static_assert(kBytes <= 99 * 1024, "sm_89 and sm_120 have no more");
};

template <QueryProductConfig C>
constexpr int query_product_smem_bytes() {
  return QueryProductLayout<C>::kBytes;
}

/// The accumulators of a warp, and its operands.
template <QueryProductConfig C>
struct QueryProductTypes : MmaTypes<C.dtype, C.tile_m / C.query_warps()> {
  using Gradient = typename MmaTypes<C.dtype, C.tile_m / C.query_warps()>::template Accumulator<C.columns()>;
};

/// How a step of dS stands in shared memory, [key, query]: as in memory, but for queries of all the block's tiles
/// beside each other. It is transposed as it is read.
template <QueryProductConfig C>
struct ScoresStep {
  static constexpr int kEights = C.tile_m / 8;

  CUTE_DEVICE static uint32_t lane_offset(MatrixLane at, int query_begin) {
    return ((at.row / 8 * kEights + (query_begin + at.column) / 8) * 8 + at.row % 8) * 16;
  }
  CUTE_DEVICE static uint32_t piece(uint32_t lane_offset, int row_step, int column_step) {
    return lane_offset + (2 * row_step * kEights + 2 * column_step) * 128;
  }
};

/// What a thread brings of dS: chunks of the same eight queries.
template <QueryProductConfig C>
struct ScoresLoader {
  static constexpr int kEights = ScoresStep<C>::kEights;       ///< of the block's queries
  static constexpr int kAtOnce = C.threads() / (8 * kEights);  ///< eights of keys
  static_assert(C.threads() == 8 * kEights * kAtOnce && C.tile_n % (8 * kAtOnce) == 0);

  BackwardParams const& p;
  Sequence const& s;
  int head_kv, head;  ///< heads of keys before it in memory; of those that share its keys
  int query_tile;
  int offset;             ///< in elements, of the chunk in its tile
  int key_tile = -1;      ///< of which:
  uint16_t const* there;  ///< null where none is written

  CUTE_DEVICE ScoresLoader(BackwardParams const& p, Sequence const& s, int head_kv, int head, int query_begin)
      : p(p), s(s), head_kv(head_kv), head(head) {
    int const thread = threadIdx.x, query = query_begin + thread / 8 % kEights * 8;
    query_tile = query / p.tile_m;
    offset = scores_matrix(p.tile_m, thread / (8 * kEights), (query - query_tile * p.tile_m) / 8) + thread % 8 * 8;
  }

  /// Of the tile.n keys from `begin` on, which no tile of dS ends within.
  template <bool Listed>
  CUTE_DEVICE void load(char* to, int begin) {
    int const tile = begin / p.scores_tile_n;
    if (tile != key_tile) {
      key_tile = tile;
      Written const found = Listed ? written_by_lists(tile) : written(tile);
      int64_t const number = first_scores_tile(p, head_kv, tile, found.steps) + found.step;
      there = found.step < 0 ? nullptr : p.scores + number * (p.tile_m * p.scores_tile_n) + offset;
    }
    int const eights = (begin - tile * p.scores_tile_n) / 8;
    CUTE_UNROLL
    for (int eight = 0; eight < C.tile_n / 8; eight += kAtOnce) {
      auto const* const from = there == nullptr ? p.scores : there + scores_matrix(p.tile_m, eights + eight, 0);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(from),
          *reinterpret_cast<cute::uint128_t*>(to + (eight * kEights * 8 + threadIdx.x) * 16), there != nullptr);
    }
  }

 private:
  /// In which step of a walk dS was written, -1: in none; and how many steps that has.
  struct Written {
    int step, steps;
  };
  CUTE_DEVICE Written written(int tile) const {
    int const first = tile * p.scores_tile_n, last = smaller(first + p.scores_tile_n, s.keys) - 1;
    QueryWalk const walk = query_walk(visible_queries(p, s, first), visible_queries(p, s, last), p.tile_m);
    bool const found = query_tile >= walk.first && query_tile < walk.first + walk.tiles;
    return {found ? head * walk.tiles + query_tile - walk.first : -1, walk.tiles * (p.num_heads / p.num_heads_kv)};
  }
  CUTE_DEVICE Written written_by_lists(int tile) const {
    if (query_tile * p.tile_m >= s.queries) return {-1, 0};
    int const of_keys = p.scores_first + head_kv - s.batch * p.num_heads_kv;
    int const of_queries = of_keys * (p.num_heads / p.num_heads_kv) + head;
    return {p.listed_steps[listed_steps_of(p, s.batch, of_queries, query_tile, p.tile_m, p.tile_n) + tile],
            p.listed_tiles[listing_tile(p, s.batch, of_keys, tile, p.tile_n)]};
  }
};

/// What lists name of the keys of a block's queries, `begin` .. `last` of a head.
struct NamedByLists {
  BackwardParams const& p;
  Sequence const& s;
  int head, begin, last;

  /// Whether dS of a tile of keys was written, of some of the queries.
  CUTE_DEVICE bool has(int key_tile) const {
    int const first = begin / p.tile_m, tiles = last / p.tile_m - first + 1;
    int const* const steps = p.listed_steps + listed_steps_of(p, s.batch, head, first, p.tile_m, p.tile_n) + key_tile;
    for (int i = 0; i < tiles; ++i) {
      if (steps[int64_t(i) * p.scores_tiles] >= 0) return true;
    }
    return false;
  }
  /// Steps of `step` keys from `key` to `end`.
  CUTE_DEVICE int count(int key, int end, int step) const {
    int found = 0;
    while (key < end) {
      int const tile = key / p.scores_tile_n, next = smaller((tile + 1) * p.scores_tile_n, end);
      if (has(tile)) found += (next - key) / step;
      key = next;
    }
    return found;
  }
  /// Where the first one begins from `key` on; there is one.
  CUTE_DEVICE int first_from(int key) const {
    while (!has(key / p.scores_tile_n)) key = (key / p.scores_tile_n + 1) * p.scores_tile_n;
    return key;
  }
};

/// With block lists or without: what one of them asks in each step takes registers from the other.
template <QueryProductConfig C, bool Listed>
CUTE_DEVICE void query_product_of(BackwardParams const& p) {
  using namespace cute;
  using T = QueryProductTypes<C>;
  using L = QueryProductLayout<C>;
  using KTile = LdmatrixTile<C.head_dim, C.tile_n, C.element_bytes()>;
  using KeyLoader = RowLoader<C.head_dim, C.tile_n, C.threads(), C.element_bytes()>;
  extern __shared__ __align__(1024) char smem[];
  // Under a diagonal, the last queries see most keys: they come first.
  int const group = p.num_heads / p.num_heads_kv, heads = p.scores_turn * group;
  int const rank = blockIdx.x / heads, number = blockIdx.x - rank * heads;
  int const begin = (ceil_div(p.seqlen_q, C.tile_m) - 1 - rank) * C.tile_m;
  int const of_turn = number / group, head = number - of_turn * group;
  int const batch = (p.scores_first + of_turn) / p.num_heads_kv;
  int const head_kv = p.scores_first + of_turn - batch * p.num_heads_kv;
  Sequence const s = sequence_at(p, batch);
  if (begin >= s.rows_q) return;
  int const last = smaller(begin + C.tile_m, s.queries) - 1;
  NamedByLists const named{p, s, head_kv * group + head, begin, last};
  int steps = 0, next = 0;  // of keys; and where the next one that comes begins
  if (last >= begin && s.keys > 0) {
    KeyWalk const walk = range_walk(p, s, begin, last, C.tile_n);
    steps = walk.tiles, next = walk.first * C.tile_n;
    if constexpr (Listed) steps = named.count(next, next + steps * C.tile_n, C.tile_n);
  }

  TilePipeline<C.stages> const pipe{cast_smem_ptr_to_uint(smem + L::kBarriers)};
  if (threadIdx.x == 0) pipe.init(C.threads(), C.threads());
  __syncthreads();
  ScoresLoader<C> scores(p, s, of_turn, head, begin);
  auto const* const keys = static_cast<uint16_t const*>(p.k) + s.entry_k * p.k_stride.batch +
                           head_kv * p.k_stride.head + int64_t(s.first_k) * p.k_stride.seqlen;
  auto const load = [&](int step) FMHA_INLINE {
    if (step >= steps) return;
    if (Listed && next / p.scores_tile_n != scores.key_tile) next = named.first_from(next);
    int const first = next;
    next += C.tile_n;
    pipe.producer_acquire(step);
    char* const to = smem + pipe.stage(step) * L::kStep;
    scores.template load<Listed>(to, first);
    KeyLoader::load(to + L::kScoresStep, keys, p.head_dim, true, [&](int row) {
      return first + row < s.keys ? keys + int64_t(first + row) * p.k_stride.seqlen : nullptr;
    });
    pipe.producer_commit_cp_async(step);
  };

  int const warp = uniform(threadIdx.x / 32), lane = lane_id();
  int const row_begin = warp % C.query_warps() * 32, column_begin = warp / C.query_warps() * C.columns();
  uint32_t const of_scores = ScoresStep<C>::lane_offset(MatrixLane::columns_first(lane), row_begin);
  uint32_t const of_keys = KTile::lane_offset(MatrixLane::rows_first(lane));
  typename T::Gradient dq;
  clear(dq);
  for (int step = 0; step < C.stages - 1; ++step) load(step);
  CUTE_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    load(step + C.stages - 1);
    pipe.consumer_wait(step);
    uint32_t const tile = pipe.stage(step) * L::kStep;
    add_product<T, C.tile_n / 16, C.columns() / 16>(
        [&](int i, auto&& ds) FMHA_INLINE {
          CUTE_UNROLL
          for (int m = 0; m < T::kRowSteps; ++m) {
            load_piece<ScoresStep<C>, true>(smem, tile, of_scores, i, m, ds(_, m));
          }
        },
        [&](int i, int n, auto&& k)
            FMHA_INLINE { load_piece<KTile, true>(smem, tile + L::kScoresStep, of_keys, i, column_begin / 16 + n, k); },
        dq);
    pipe.consumer_release(step);
  }

  auto* const to = static_cast<uint16_t*>(p.dq) + s.entry_q * p.dq_stride.batch +
                   (head_kv * group + head) * p.dq_stride.head + int64_t(s.first_q) * p.dq_stride.seqlen;
  auto const rows = by_row(dq);
  CUTE_UNROLL
  for (int row = 0; row < 2 * T::kRowSteps; ++row) {
    int const query = begin + row_begin + accumulator_row(row, lane);
    if (query >= s.rows_q) continue;
    uint16_t* const at = to + query * p.dq_stride.seqlen + column_begin + lane % 4 * 2;
    CUTE_UNROLL
    for (int n = 0; n < C.columns() / 8; ++n) {
      if (column_begin + 8 * n >= p.head_dim) break;
      uint32_t const found = pack<typename T::Element>(rows(row, 2 * n) * p.scale, rows(row, 2 * n + 1) * p.scale);
      *reinterpret_cast<uint32_t*>(at + 8 * n) = query < s.queries ? found : 0;
    }
  }
}

template <QueryProductConfig C>
CUTE_DEVICE void query_product(BackwardParams const& p) {
  if constexpr (C.dependent_launch) meet_dependents();
  p.listed == nullptr ? query_product_of<C, false>(p) : query_product_of<C, true>(p);
}

}  // namespace cutlass_fmha
