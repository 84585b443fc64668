// A wide row for all that a call may say. A thread block owns tile_m query rows, perhaps of several heads that share a
// key head, and walks the keys that they see. Operands pass through shared memory in steps, some dimensions at a time
// (steps.cuh, large_steps.cuh), since neither float32 nor head dims above 256 leave room for whole tiles on sm_89 and
// sm_120. Two warps share 16 query rows, or four 32: each has its part of a tile's keys when scores are computed, and
// of O's columns when they are used. Between the two, row maxima and P go through shared memory.
//
// Scores are in natural units, and what is subtracted from them is their maximum itself.
#pragma once

#include "../core/merge.cuh"
#include "../features/place.cuh"
#include "config.h"
#include "large_steps.cuh"
#include "steps.cuh"

namespace cutlass_fmha {

/// Steps in shared memory: two are on their way.
constexpr int kWideStages = 3;

template <WideScoredConfig C, class T>
using WideScoredProducts = cute::conditional_t<C.sharing() == 2, WideProducts<C, T>, LargeProducts<C, T>>;
template <WideScoredConfig C, class T>
using WideScoredSteps =
    cute::conditional_t<C.sharing() == 2, WideSteps<C, T, kWideStages>, LargeSteps<C, T, kWideStages>>;

template <WideScoredConfig C, class T>
struct WideScoredStorage : WideScoredSteps<C, T> {
  static constexpr int64_t kNowhere = -1;

  int64_t queries[C.tile_m];  ///< where rows of Q stand; kNowhere: there is none
  int64_t keys[3][C.tile_n];  ///< rows of K, of the tile that is multiplied and the two after it
  int64_t values[3][C.tile_n];
  int begin[3];                       ///< the first key of these
  float rows[C.sharing()][C.tile_m];  ///< of each warp's keys: maxima, and in the end sums
  FeatureTile tile;
  Sequence sequence;
  KeyWalk walk;
};

template <WideScoredConfig C, class T>
struct WideScored {
  using Products = WideScoredProducts<C, T>;
  using Storage = WideScoredStorage<C, T>;
  using Step = typename Products::Step;
  static constexpr int kSteps = C.head_dim / C.step_columns(), kKeys = C.tile_n / C.sharing();
  static constexpr int kRows = C.rows_per_warp(), kRowSteps = kRows / 16, kFactorParts = Products::kFactorParts;
  /// Registers are short: what is easily found is found anew, and some things are in shared memory.
  static constexpr bool kShort = C.sharing() > 2;

  FeatureParams const& p;
  Storage& shared;
  FeatureTile const& tile = shared.tile;
  Sequence const& sequence = shared.sequence;
  Products products{};
  int const thread = threadIdx.y * 32 + threadIdx.x;
  int const warp_row = static_cast<int>(threadIdx.y) / C.sharing() * kRows;
  int const member = static_cast<int>(threadIdx.y) % C.sharing();  ///< of those that share rows
  int const lane_row = warp_row + static_cast<int>(threadIdx.x) / 4, kept_key = member * kKeys + threadIdx.x % 4 * 2;
  int const score_steps = ceil_div(p.head_dim, C.step_dims());
  int const steps = score_steps + kFactorParts * column_steps();
  CommonView view{};
  typename Products::Scores scores;
  typename Products::Sums output[kSteps][kRowSteps] = {};
  float maximum[kRowSteps][2], sum[kRowSteps][2] = {};

  CUTE_DEVICE QueryRow at(int row) const { return query_row(p, tile, tile.row_begin + row); }
  CUTE_DEVICE int column_steps() const { return ceil_div(p.head_dim_v, C.step_columns()); }
  CUTE_DEVICE int row(int m, int below) const { return lane_row + 16 * m + 8 * below; }
  CUTE_DEVICE int lane_key() const { return !kShort ? kept_key : member * kKeys + lane_id() % 4 * 2; }
  CUTE_DEVICE auto copying_thread() const {
    if constexpr (!kShort) {
      return thread;
    } else {
      return threadIdx.y * 32 + unsigned(lane_id());
    }
  }
  /// A row's maximum so far.
  CUTE_DEVICE float maximum_of(int m, int below) const {
    if constexpr (!kShort) {
      return maximum[m][below];
    } else {
      return shared.maxima[member][row(m, below)];
    }
  }
  CUTE_DEVICE void set_maximum(int m, int below, float x) {
    if constexpr (!kShort) {
      maximum[m][below] = x;
    } else if (threadIdx.x % 4 == 0) {
      shared.maxima[member][row(m, below)] = x;
    }
  }
  /// What the warp's rows see.
  CUTE_DEVICE CommonView& seen() {
    if constexpr (!kShort) {
      return view;
    } else {
      return shared.views[threadIdx.y];
    }
  }

  /// Calls f(m, below) for each of this lane's rows.
  template <class Function>
  CUTE_DEVICE static void for_each_row(Function&& f) {
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int below = 0; below < 2; ++below) f(m, below);
    }
  }
  /// Calls f(sum) for what this lane has of a row of O.
  template <class Function>
  CUTE_DEVICE void for_each_sum(int m, int below, Function&& f) {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < Products::kColumns; ++n) {
        f(output[i][m][n][2 * below]);
        f(output[i][m][n][2 * below + 1]);
      }
    }
  }
  /// What `combine` makes of the numbers that the warps which share a row have left of it.
  template <class Combine>
  CUTE_DEVICE float combined(int row, Combine&& combine) const {
    float x = shared.rows[0][row];
    CUTE_UNROLL
    for (int i = 1; i < C.sharing(); ++i) x = combine(x, shared.rows[i][row]);
    return x;
  }

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
    bool const exists = key < sequence.keys;
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

  /// Columns [column, column + Columns) of rows that stand at `places`, zeros where there are none. to(row, column)
  /// tells where they go; eight rows on it is as many times `Pitch` further.
  template <int Rows, int Columns, int Pitch, class To>
  CUTE_DEVICE void copy(To const& to, void const* tensor, int64_t const* places, int column, int dims) const {
    using Bytes = cute::uint128_t;
    constexpr int kElements = sizeof(Bytes) / sizeof(T), kVectors = Columns / kElements, kStep = C.threads() / kVectors;
    static_assert(Rows % kStep == 0 && kStep % 8 == 0);
    auto const thread = copying_thread();
    int const first = thread / kVectors, own = thread % kVectors * kElements;
    T* const begin = to(first, own);
    CUTE_UNROLL
    for (int row = first; row < first + Rows; row += kStep) {
      int64_t const place = places[row];
      bool const there = place != Storage::kNowhere && column + own < dims;
      T const* const from = static_cast<T const*>(tensor) + (there ? place + column + own : 0);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Bytes>::copy(
          *reinterpret_cast<Bytes const*>(from),
          *reinterpret_cast<Bytes*>(kFactorParts == 1 ? to(row, own) : begin + (row - first) * Pitch), there);
    }
  }

  CUTE_DEVICE void load(int number, int step, int stage) const {
    if (number < shared.walk.tiles) {
      Step& to = shared.steps[stage];
      int64_t const *keys = shared.keys[number % 3], *values = shared.values[number % 3];
      if (step < score_steps) {
        int const dim = step * C.step_dims();
        copy<C.tile_m, C.step_dims(), Step::kPitch>([&](int row, int column)
                                                        FMHA_INLINE { return to.x_at(row, column); },
                                                    p.q, shared.queries, dim, p.head_dim);
        copy<C.tile_n, C.step_dims(), Step::kPitch>(
            [&](int row, int column) FMHA_INLINE { return to.y_at(row, column); }, p.k, keys, dim, p.head_dim);
      } else {
        static_assert(kFactorParts <= 2);
        constexpr int kRowsOfPart = C.tile_n / kFactorParts;
        int const part = kFactorParts == 2 && step - score_steps >= column_steps();
        copy<kRowsOfPart, C.step_columns(), Step::kFactorPitch>(
            [&](int row, int column) FMHA_INLINE { return to.factor_at(row, column); }, p.v,
            values + part * kRowsOfPart, (step - score_steps - part * column_steps()) * C.step_columns(), p.head_dim_v);
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
    return tile.batch * stride.batch + q.head * stride.head + q.query * stride.query + key * stride.key;
  }
  CUTE_DEVICE float capped(float product) const {
    // Of float32, as exact as that; one exponential is off by an ulp of 1.
    if constexpr (sizeof(T) == 4) return p.softcap * tanhf(product * (p.cap_scale * (0.5f / kLog2e)));
    return p.softcap * tanh_of_exp2(product * p.cap_scale);
  }

  /// q k -> score, -inf where the query doesn't see the key.
  CUTE_DEVICE void modify(int begin) {
    bool const all_see = seen().all_see(begin, C.tile_n);
    for_each_row([&](int m, int below) FMHA_INLINE {
      if (kShort) __syncwarp();  // what is found of a row is not found before what is made of the one ahead
      QueryRow const q = at(row(m, below));
      bool const exists = q.query < sequence.queries;
      VisibleKeys const visible = visible_keys(p, sequence, q.query);
      float const slope = p.alibi_slopes != nullptr ? alibi_slope(p, tile, q.head) : 0.f;
      int const beside = q.query + sequence.offset;
      CUTE_UNROLL
      for (int i = 0; i < 2 * Products::kScores; ++i) {
        float& score = scores.x[m][i / 2][2 * below + i % 2];
        int const key = begin + lane_key() + i / 2 * 8 + i % 2;
        score = p.softcap != 0.f ? capped(score) : score * p.scale;
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
    });
  }

  CUTE_DEVICE void leave_maxima() const {
    for_each_row([&](int m, int below) FMHA_INLINE {
      float largest = scores.largest(m, below);
      largest = QuadOfLanes::max(largest);
      if (threadIdx.x % 4 == 0) shared.rows[member][row(m, below)] = largest;
    });
  }

  /// Scores -> P in shared memory, relative to the rows' new maxima, and what was summed so far as well.
  CUTE_DEVICE void exponentiate(int begin) {
    for_each_row([&](int m, int below) FMHA_INLINE {
      int const row = this->row(m, below);
      float const before = maximum_of(m, below);
      float const after = fmaxf(before, combined(row, [](float a, float b) FMHA_INLINE { return fmaxf(a, b); }));
      float const reference = after == -INFINITY ? 0.f : after;  // no key was seen yet
      float const factor = exp2_approx((before - reference) * kLog2e);
      set_maximum(m, below, after);
      sum[m][below] *= factor;
      auto const to = Products::weight_row(shared.weights, row, lane_key());
      CUTE_UNROLL
      for (int n = 0; n < Products::kScores; ++n) {
        float (&x)[2] = reinterpret_cast<float (&)[2]>(scores.x[m][n][2 * below]);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          x[i] = exp2_approx((x[i] - reference) * kLog2e);
          sum[m][below] += x[i];
        }
        if (p.dropout_threshold != 0) drop(x, at(row), begin + lane_key() + 8 * n);
        Products::store(to(n), x[0], x[1]);
      }
      if (factor == 1.f) return;
      for_each_sum(m, below, [&](float& sum) FMHA_INLINE { sum *= factor; });
    });
  }

  /// Of two neighbouring keys, the first of which is even.
  CUTE_DEVICE void drop(float (&x)[2], QueryRow const& q, int key) const {
    PhiloxWords const numbers =
        dropout_numbers(*p.dropout_seed, tile.batch * p.num_heads + q.head, q.query, key / 8, WideProduct{});
    int const lane = threadIdx.x % 4;
    uint32_t const word =
        lane < 2 ? (lane == 0 ? numbers.word[0] : numbers.word[1]) : (lane == 2 ? numbers.word[2] : numbers.word[3]);
    if ((word & 0xffffu) < p.dropout_threshold) x[0] = 0.f;
    if (word >> 16 < p.dropout_threshold) x[1] = 0.f;
  }

  // ---- the walk

  CUTE_DEVICE void add_scores(Step const& from) {
    if constexpr (kFactorParts == 1) {
      products.add_scores(from.scores, warp_row, member * kKeys, scores);
    } else {
      products.add_scores(from, warp_row, member * kKeys, scores);
    }
  }
  CUTE_DEVICE void add_values(Step const& from, int part, int i) {
    int const column = member * (C.step_columns() / C.sharing());
    if constexpr (kFactorParts == 1) {
      products.add_values(shared.weights, from.factor, warp_row, column, output[i][0]);
    } else {
      if (i == 0) products.keep_weights(shared.weights, warp_row, part * (C.tile_n / kFactorParts));
      products.add_values(from, column, output[i]);
    }
  }

  CUTE_DEVICE void run() {
    for_each_row([&](int m, int below) FMHA_INLINE { set_maximum(m, below, -INFINITY); });
    int const last = smaller(at(warp_row + kRows - 1).query, sequence.queries - 1);
    if (!kShort || threadIdx.x == 0) seen() = CommonView(p, sequence, at(warp_row).query, last);
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
    auto const next = [&]() FMHA_INLINE -> Step const& {
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
      int const kept_begin = shared.begin[number % 3];
      auto const begin = [&] { return !kShort ? kept_begin : shared.walk.key_begin(p, number, C.tile_n); };
      bool const sees = seen().some_see(kept_begin, C.tile_n);
      scores.clear();
      CUTE_NO_UNROLL
      for (int step = 0; step < score_steps; ++step) {
        auto const& from = next();
        if (step == 0) find_keys(number + 2);
        if (sees) add_scores(from);
      }
      if (sees) modify(begin());
      if (sees) leave_maxima();
      CUTE_NO_UNROLL
      for (int part = 0; part < kFactorParts; ++part) {
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          if (i * C.step_columns() >= p.head_dim_v) break;
          auto const& from = next();
          if (i == 0 && part == 0) {  // the other warps' maxima are there
            if (sees) exponentiate(begin());
            __syncthreads();
          }
          if (sees) add_values(from, part, i);
        }
      }
    }
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  /// O and LSE, or a part's.
  CUTE_DEVICE void write() {
    for_each_row([&](int m, int below) FMHA_INLINE {
      float const own = QuadOfLanes::sum(sum[m][below]);
      if (threadIdx.x % 4 == 0) shared.rows[member][row(m, below)] = own;
    });
    __syncthreads();
    for_each_row([&](int m, int below) FMHA_INLINE {
      int const row = this->row(m, below);
      QueryRow const q = at(row);
      if (q.query >= sequence.rows_q) return;
      bool const counts = q.query < sequence.queries;
      float const keys = counts ? combined(row, [](float a, float b) FMHA_INLINE { return a + b; }) : 0.f;
      // A sink is one more key, of the first part.
      float const sink = p.sinks != nullptr && tile.split == 0 && counts ? p.sinks[q.head] : -INFINITY;
      float const maximum = maximum_of(m, below);
      MergedLse const all = MergedLse::with_sink(maximum, keys, sink);
      float const weight = keys == 0.f ? 0.f : MergedLse::weight(maximum, all.reference);
      float const factor = weight == 0.f ? 0.f : weight / all.sum * p.dropout_scale;
      if (factor == 0.f) for_each_sum(m, below, [](float& sum) FMHA_INLINE { sum = 0.f; });  // whatever V held
      int64_t const place = lse_row(p, sequence, q);
      bool const first = threadIdx.x % 4 == 0 && member == 0;
      if (p.splits == 1) {
        if (first && p.lse != nullptr) p.lse[place] = all.lse();
        write_row(output_row<T>(p, sequence, q), m, below, factor);
        return;
      }
      int64_t const part = tile.split * p.lse_rows + place;
      if (first) {
        bool const is_nan = all.sum != all.sum;  // which no maximum shows
        p.partial_lse[part] = is_nan ? all.sum : all.empty() ? -INFINITY : all.reference;
        p.partial_low[part] = all.rest();
      }
      write_row(p.partial_o + part * p.head_dim_v, m, below, factor);
    });
  }

  template <class To>
  CUTE_DEVICE void write_row(To* o, int m, int below, float factor) const {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const column = i * C.step_columns() + member * (C.step_columns() / C.sharing());
      products.write(o + column, below, p.head_dim_v - column, factor, output[i][m]);
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
