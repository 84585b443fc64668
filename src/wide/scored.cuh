// A wide row for all that a call may say. A thread block owns tile_m query rows, perhaps of several heads that share a
// key head, and walks the keys that they see. Operands pass through shared memory in steps, some dimensions at a time
// (steps.cuh), since neither float32 nor head dims above 256 leave room for whole tiles on sm_89 and sm_120. Two warps
// share 16 query rows: each has half of a tile's keys when scores are computed, and half of O's columns when they are
// used. Between the two, row maxima and P go through shared memory.
//
// Scores are in natural units, and what is subtracted from them is their maximum itself.
#pragma once

#include "../core/merge.cuh"
#include "../features/lane_dropout.cuh"
#include "../features/place.cuh"
#include "config.h"
#include "steps.cuh"

namespace cutlass_fmha {

/// Steps in shared memory: two are on their way.
constexpr int kWideStages = 3;

template <WideScoredConfig C, class T>
struct WideScoredStorage : WideSteps<C, T, kWideStages> {
  static constexpr int64_t kNowhere = -1;

  int64_t queries[C.tile_m];  ///< where rows of Q stand; kNowhere: there is none
  int64_t keys[3][C.tile_n];  ///< rows of K, of the tile that is multiplied and the two after it
  int64_t values[3][C.tile_n];
  int begin[3];             ///< the first key of these
  float rows[2][C.tile_m];  ///< of each warp's keys: maxima, and in the end sums
  FeatureTile tile;
  Sequence sequence;
  KeyWalk walk;
  LeftBehind behind;
};

template <WideScoredConfig C, class T>
struct WideScored {
  using Products = WideProducts<C, T>;
  using Storage = WideScoredStorage<C, T>;
  static constexpr int kSteps = C.head_dim / C.step_columns(), kHalf = C.tile_n / 2;

  FeatureParams const& p;
  Storage& shared;
  FeatureTile const& tile = shared.tile;
  Sequence const& sequence = shared.sequence;
  Products const products{};
  int const thread = threadIdx.y * 32 + threadIdx.x;
  int const warp_row = static_cast<int>(threadIdx.y) / 2 * 16, half = static_cast<int>(threadIdx.y) % 2;
  int const lane_row = warp_row + static_cast<int>(threadIdx.x) / 4, lane_key = half * kHalf + threadIdx.x % 4 * 2;
  int const score_steps = ceil_div(p.head_dim, C.step_dims());
  int const steps = score_steps + ceil_div(p.head_dim_v, C.step_columns());
  CommonView view{};
  typename Products::Scores scores;
  typename Products::Sums output[kSteps] = {};
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  CUTE_DEVICE QueryRow at(int row) const { return query_row(p, tile, tile.row_begin + row); }

  // ---- what is copied

  CUTE_DEVICE void find_queries() const {
    if (thread >= C.tile_m) return;
    QueryRow const q = at(thread);
    shared.queries[thread] = q.query < sequence.queries
                                 ? sequence.entry_q * p.q_stride.batch +
                                       (sequence.first_q + q.query) * p.q_stride.seqlen + q.head * p.q_stride.head
                                 : Storage::kNowhere;
  }

  /// Of a tile of keys, for the steps that copy it: two steps later at the earliest.
  CUTE_DEVICE void find_keys(int number) const {
    if (thread >= C.tile_n || number >= shared.walk.tiles) return;
    int const begin = shared.walk.key_begin(p, number, C.tile_n), key = begin + thread;
    bool const exists = key < sequence.keys && !shared.behind.has(key, 1);
    auto const place = [&](Strides const& stride) FMHA_INLINE {
      return exists
                 ? key_entry_offset(p, stride, sequence) + key_row_offset(p, stride, sequence, sequence.first_k + key) +
                       tile.head / (p.num_heads / p.num_heads_kv) * stride.head
                 : Storage::kNowhere;
    };
    shared.keys[number % 3][thread] = place(p.k_stride);
    shared.values[number % 3][thread] = place(p.v_stride);
    if (thread == 0) shared.begin[number % 3] = begin;
  }

  /// Columns [column, column + Columns) of rows that stand at `places`, zeros where there are none.
  template <int Columns, int Rows, int Width>
  CUTE_DEVICE void copy(T (&to)[Rows][Width], void const* tensor, int64_t const* places, int column, int dims) const {
    using Bytes = cute::uint128_t;
    constexpr int kElements = sizeof(Bytes) / sizeof(T), kVectors = Columns / kElements, kStep = C.threads() / kVectors;
    static_assert(Rows % kStep == 0);
    int const first = thread / kVectors, own = thread % kVectors * kElements;
    CUTE_UNROLL
    for (int row = first; row < first + Rows; row += kStep) {
      int64_t const place = places[row];
      bool const there = place != Storage::kNowhere && column + own < dims;
      T const* const from = static_cast<T const*>(tensor) + (there ? place + column + own : 0);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Bytes>::copy(*reinterpret_cast<Bytes const*>(from),
                                                         *reinterpret_cast<Bytes*>(&to[row][own]), there);
    }
  }

  CUTE_DEVICE void load(int number, int step, int stage) const {
    if (number < shared.walk.tiles) {
      WideStep<C, T>& to = shared.steps[stage];
      int64_t const *keys = shared.keys[number % 3], *values = shared.values[number % 3];
      if (step < score_steps) {
        int const dim = step * C.step_dims();
        copy<C.step_dims()>(to.scores.x, p.q, shared.queries, dim, p.head_dim);
        copy<C.step_dims()>(to.scores.y, p.k, keys, dim, p.head_dim);
      } else {
        copy<C.step_columns()>(to.factor.y, p.v, values, (step - score_steps) * C.step_columns(), p.head_dim_v);
      }
    }
    cute::cp_async_fence();
  }

  // ---- what becomes of scores

  template <class Value>
  CUTE_DEVICE static float read(void const* tensor, int64_t offset) {
    return static_cast<float>(static_cast<Value const*>(tensor)[offset]);
  }
  CUTE_DEVICE int64_t offset(ScoreStrides const& stride, QueryRow const& q, int key) const {
    return stride.offset(tile.batch, q.head, q.query, key);
  }
  /// q k -> score, -inf where the query doesn't see the key.
  CUTE_DEVICE void modify(int begin) {
    bool const all_see = view.all_see(begin, C.tile_n);
    CUTE_UNROLL
    for (int below = 0; below < 2; ++below) {
      QueryRow const q = at(lane_row + 8 * below);
      bool const exists = q.query < sequence.queries;
      VisibleKeys const visible = visible_keys(p, sequence, q.query);
      float const slope = p.alibi_slopes != nullptr ? alibi_slope(p, tile.batch, q.head) : 0.f;
      int const beside = q.query + sequence.offset;
      CUTE_UNROLL
      for (int i = 0; i < 2 * Products::kScores; ++i) {
        float& score = scores.x[0][i / 2][2 * below + i % 2];
        int const key = begin + lane_key + i / 2 * 8 + i % 2;
        score = p.softcap != 0.f ? p.softcap * tanh_of_product<T>(score, p.cap_scale) : score * p.scale;
        if (p.bias != nullptr && exists && key < sequence.keys) {
          int64_t const from = offset(p.bias_stride, q, key);
          score += p.bias_type == BiasType::float32 ? read<float>(p.bias, from) : read<T>(p.bias, from);
        }
        if (slope != 0.f) score = fmaf(-slope, fabsf(float(beside - key)), score);
        if (!all_see && !visible.sees(key)) score = -INFINITY;
        if (p.mask != nullptr && exists && key < sequence.keys) {
          if (p.mask[offset(p.mask_stride, q, key)] == 0) score = -INFINITY;
        }
      }
    }
  }

  CUTE_DEVICE void leave_maxima() const {
    CUTE_UNROLL
    for (int below = 0; below < 2; ++below) {
      float largest = scores.largest(0, below);
      largest = QuadOfLanes::max(largest);
      if (threadIdx.x % 4 == 0) shared.rows[half][lane_row + 8 * below] = largest;
    }
  }

  /// Scores -> P in shared memory, relative to the rows' new maxima, and what was summed so far as well.
  CUTE_DEVICE void exponentiate(int begin) {
    CUTE_UNROLL
    for (int below = 0; below < 2; ++below) {
      int const row = lane_row + 8 * below;
      float const before = maximum[below], after = fmaxf(before, fmaxf(shared.rows[0][row], shared.rows[1][row]));
      float const reference = after == -INFINITY ? 0.f : after;  // no key was seen yet
      float const factor = exp2_approx((before - reference) * kLog2e);
      maximum[below] = after;
      sum[below] *= factor;
      CUTE_UNROLL
      for (int n = 0; n < Products::kScores; ++n) {
        float (&x)[2] = reinterpret_cast<float (&)[2]>(scores.x[0][n][2 * below]);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          x[i] = exp2_approx((x[i] - reference) * kLog2e);
          sum[below] += x[i];
        }
        if (p.dropout_threshold != 0) {
          uint32_t const both = kept(at(row), begin + lane_key + 8 * n);
          if ((both & 1) == 0) x[0] = 0.f;
          if (both >> 31 == 0) x[1] = 0.f;
        }
        Products::store(&shared.weights[row][lane_key + 8 * n], x[0], x[1]);
      }
      if (factor == 1.f) continue;
      CUTE_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        CUTE_UNROLL
        for (int n = 0; n < Products::kColumns; ++n) {
          output[i][n][2 * below] *= factor;
          output[i][n][2 * below + 1] *= factor;
        }
      }
    }
  }

  /// All bits of those of two neighbouring keys, the first of which is even, that are kept.
  CUTE_DEVICE uint32_t kept(QueryRow const& q, int key) const {
    PhiloxWords const made = dropout_numbers(*p.dropout_seed, tile.batch * p.num_heads + q.head, dropout_query(q.query),
                                             dropout_key(key), WideProduct{});
    int const word = dropout_word(q.query, key);
    uint32_t const low = word % 2 == 0 ? made.word[0] : made.word[1],
                   high = word % 2 == 0 ? made.word[2] : made.word[3];
    return kept_pair(p.kept, word < 2 ? low : high);
  }

  // ---- the walk

  CUTE_DEVICE void run() {
    int const last = smaller(at(warp_row + 15).query, sequence.queries - 1);
    view = CommonView(p, sequence, at(warp_row).query, last);
    find_queries();
    find_keys(0);
    find_keys(1);
    __syncthreads();
    int stage = 0;                            // of what is multiplied next
    int loaded = 0, load_step = 0, free = 0;  // what is asked for next
    auto const load_next = [&]() FMHA_INLINE {
      load(loaded, load_step, free);
      free = free + 1 == kWideStages ? 0 : free + 1;
      if (++load_step == steps) load_step = 0, ++loaded;
    };
    auto const next = [&]() FMHA_INLINE -> WideStep<C, T> const& {
      cute::cp_async_wait<kWideStages - 2>();
      __syncthreads();  // the step's operands have arrived; everybody is done with those before
      load_next();
      int const own = stage;
      stage = stage + 1 == kWideStages ? 0 : stage + 1;
      return shared.steps[own];
    };
    CUTE_NO_UNROLL
    for (int i = 1; i < kWideStages; ++i) load_next();
    CUTE_NO_UNROLL
    for (int number = 0; number < shared.walk.tiles; ++number) {
      int const begin = shared.begin[number % 3];
      bool const sees = view.some_see(begin, C.tile_n);
      scores.clear();
      CUTE_NO_UNROLL
      for (int step = 0; step < score_steps; ++step) {
        auto const& from = next();
        if (step == 0) find_keys(number + 2);
        if (sees) products.add_scores(from.scores, warp_row, half * kHalf, scores);
      }
      if (sees) modify(begin);
      if (sees) leave_maxima();
      CUTE_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        if (i * C.step_columns() >= p.head_dim_v) break;
        auto const& from = next();
        if (i == 0) {  // the other warp's maxima are there
          if (sees) exponentiate(begin);
          __syncthreads();
        }
        if (sees) {
          products.add_values(shared.weights, from.factor, warp_row, half * (C.step_columns() / 2), output[i]);
        }
      }
    }
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  /// O and LSE, or a part's.
  CUTE_DEVICE void write() {
    CUTE_UNROLL
    for (int below = 0; below < 2; ++below) {
      float const own = QuadOfLanes::sum(sum[below]);
      if (threadIdx.x % 4 == 0) shared.rows[half][lane_row + 8 * below] = own;
    }
    __syncthreads();
    CUTE_UNROLL
    for (int below = 0; below < 2; ++below) {
      int const row = lane_row + 8 * below;
      QueryRow const q = at(row);
      if (q.query >= sequence.rows_q) continue;
      bool const counts = q.query < sequence.queries;
      float const keys = counts ? shared.rows[0][row] + shared.rows[1][row] : 0.f;
      // A sink is one more key, of the first part.
      float const sink = p.sinks != nullptr && tile.split == 0 && counts ? p.sinks[q.head] : -INFINITY;
      MergedLse const all = MergedLse::with_sink(maximum[below], keys, sink);
      float const weight = keys == 0.f ? 0.f : MergedLse::weight(maximum[below], all.reference);
      float const factor = weight == 0.f ? 0.f : weight / all.sum * p.dropout_scale;
      if (factor == 0.f) clear(below);  // whatever V held
      int64_t const place = lse_row(p, sequence, q);
      bool const first = threadIdx.x % 4 == 0 && half == 0;
      if (p.splits == 1) {
        if (first && p.lse != nullptr) p.lse[place] = all.lse();
        write_row(output_row<T>(p, sequence, q), below, factor);
        continue;
      }
      int64_t const part = tile.split * p.lse_rows + place;
      if (first) {
        bool const is_nan = all.sum != all.sum;  // which no maximum shows
        p.partial_lse[part] = is_nan ? all.sum : all.empty() ? -INFINITY : all.reference;
        p.partial_low[part] = all.rest();
      }
      write_row(p.partial_o + part * p.head_dim_v, below, factor);
    }
  }

  CUTE_DEVICE void clear(int below) {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < Products::kColumns; ++n) output[i][n][2 * below] = output[i][n][2 * below + 1] = 0.f;
    }
  }

  template <class To>
  CUTE_DEVICE void write_row(To* o, int below, float factor) const {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const column = i * C.step_columns() + half * (C.step_columns() / 2);
      products.write(o + column, below, p.head_dim_v - column, factor, output[i]);
    }
  }
};

template <WideScoredConfig C>
using WideScoredMemory = WideScoredStorage<C, typename WideScalar<C.dtype>::type>;

template <WideScoredConfig C>
CUTE_DEVICE void wide_scored(FeatureParams const& p) {
  extern __shared__ __align__(16) char smem_of_steps[];
  auto& shared = *reinterpret_cast<WideScoredMemory<C>*>(smem_of_steps);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    FeatureTile const tile = tile_at(p, C.tile_m, blockIdx.x);
    Sequence const sequence = sequence_at(p, tile.batch);
    shared.tile = tile;
    shared.sequence = sequence;
    int const first = query_row(p, tile, tile.row_begin).query;
    int const end = query_row(p, tile, tile.row_begin + rows_of(p, tile, C.tile_m) - 1).query + 1;
    shared.walk = walk_of(p, sequence, tile, first, end, C.tile_n);
    shared.behind = visible_keys(p, sequence, first);
  }
  __syncthreads();
  WideScored<C, typename WideScalar<C.dtype>::type> block{p, shared};
  block.run();
  block.write();
}

template <WideScoredConfig C>
constexpr int wide_scored_smem_bytes() {
  static_assert(sizeof(WideScoredMemory<C>) <= 99 * 1024, "sm_89 and sm_120 have no more");
  return sizeof(WideScoredMemory<C>);
}

}  // namespace cutlass_fmha
