// What the wide rows' own main loops share: tiles on their way to shared memory, and what becomes of a lane's scores
// and of its part of O.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "../core/online_softmax.cuh"
#include "config.h"
#include "tile.h"

namespace cutlass_fmha {

template <DType E>
struct WideScalar;
template <>
struct WideScalar<DType::float32> {
  using type = float;
};
template <>
struct WideScalar<DType::float16> {
  using type = cutlass::half_t;
};
template <>
struct WideScalar<DType::bfloat16> {
  using type = cutlass::bfloat16_t;
};

/// A lane's part of what mma.m16n8 sums: row, column (0, 0), (0, 1), (8, 0), (8, 1) from (lane / 4, 2 (lane % 4)) on.
using AccumulatorTile = float[4];

/// Asks for rows [begin, end) of a tensor, into a tile of `Dim` columns and some padding. What the tile has more rows,
/// and its columns from `head_dim` on, become zeros.
template <int Dim, int Threads, class T, int Rows, int Columns>
CUTE_DEVICE void copy_rows(T (&tile)[Rows][Columns], void const* tensor, int64_t offset, int64_t stride, int begin,
                           int end, int head_dim) {
  using Bytes = cute::uint128_t;
  constexpr int kElements = sizeof(Bytes) / sizeof(T), kVectors = Dim / kElements, kStep = Threads / kVectors;
  static_assert(Threads % kVectors == 0 && Rows % kStep == 0);
  unsigned const thread = threadIdx.y * 32 + threadIdx.x;
  int const row = thread / kVectors;
  unsigned const column = thread % kVectors * kElements;
  T const* source = static_cast<T const*>(tensor) + offset + (begin + row) * stride + column;
  if (column >= static_cast<unsigned>(head_dim)) end = 0;
  CUTE_UNROLL
  for (int i = 0; i < Rows; i += kStep) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Bytes>::copy(*reinterpret_cast<Bytes const*>(source),
                                                       *reinterpret_cast<Bytes*>(&tile[row + i][column]),
                                                       begin + row + i < end);
    source += kStep * stride;
  }
}

// Of one of the main loops, with its shared memory.
template <WideConfig C, class Storage>
CUTE_DEVICE void copy_queries(FeatureParams const& p, Storage& shared) {
  WideTile const& tile = shared.tile;
  RowPlace const rows = query_rows(p, tile, p.q_stride);
  copy_rows<C.head_dim, C.threads()>(shared.q, p.q, rows[tile.first], rows.step, 0, tile.rows, p.head_dim);
}

template <WideConfig C, class Storage>
CUTE_DEVICE void copy_keys(FeatureParams const& p, Storage& shared, int begin) {
  copy_rows<C.head_dim, C.threads()>(shared.k, p.k, shared.first_key, p.k_stride.seqlen, begin, shared.tile.keys,
                                     p.head_dim);
}

template <WideConfig C, class Storage>
CUTE_DEVICE void copy_values(FeatureParams const& p, Storage& shared, int begin) {
  copy_rows<C.head_dim, C.threads()>(shared.v, p.v, shared.first_value, p.v_stride.seqlen, begin, shared.tile.keys,
                                     p.head_dim_v);
}

/// The last key that a row of the tile sees.
CUTE_DEVICE int last_key(WideTile const& tile, int row) {
  return tile.diagonal == kNoDiagonal ? tile.keys - 1 : smaller(tile.keys - 1, tile.first + row + tile.diagonal);
}

/// The last key that `rows` from `first` on see; -1 where the tile has none of them.
CUTE_DEVICE int last_key(WideTile const& tile, int first, int rows) {
  int const count = smaller(rows, tile.rows - first);
  return count > 0 ? last_key(tile, first + count - 1) : -1;
}

/// M x N mma tiles of scores: Q K^T, then in log2 units, then probabilities.
template <int M, int N>
struct LaneScores {
  AccumulatorTile x[M][N];

  CUTE_DEVICE void clear() {
    for_each(0, 0, [](float& score, int, int) { score = 0.f; });
  }

  /// Calls f(score, row, key); `row` and `key` are those of the lane's first score.
  template <class Function>
  CUTE_DEVICE void for_each(int row, int key, Function&& f) {
    CUTE_UNROLL
    for (int m = 0; m < M; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < N; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) f(x[m][n][i], row + 16 * m + i / 2 * 8, key + 8 * n + i % 2);
      }
    }
  }

  /// Scale, bias and masks. All of the warp's rows see the keys up to `seen_by_all`.
  template <class Element>
  CUTE_DEVICE void finish(FeatureParams const& p, WideTile const& tile, int row, int key, int seen_by_all) {
    float const scale = p.scale * kLog2e;
    for_each(row, key, [&](float& score, int, int) { score *= scale; });
    if (p.bias != nullptr) {
      RowPlace const rows = bias_rows(p, tile);
      Element const* const bias = static_cast<Element const*>(p.bias) + rows[tile.first];
      for_each(row, key, [&](float& score, int row, int key) {
        if (row < tile.rows && key < tile.keys) {
          score = fmaf(static_cast<float>(bias[row * rows.step + key]), kLog2e, score);
        }
      });
    }
    if (key + 8 * N - 1 <= seen_by_all) return;
    for_each(row, key, [&](float& score, int row, int key) {
      if (key > last_key(tile, row)) score = -INFINITY;
    });
  }

  /// The largest score of a lane's row, of 16 m + 8 half.
  CUTE_DEVICE float largest(int m, int half) const {
    float largest = -INFINITY;
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(x[m][n][2 * half], x[m][n][2 * half + 1]));
    return largest;
  }

  /// Turns that row's scores into probabilities relative to `maximum`, and returns their sum.
  CUTE_DEVICE float exponentiate(int m, int half, float maximum) {
    float const reference = maximum == -INFINITY ? 0.f : maximum;  // no key was seen yet
    float sum = 0.f;
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) {
      CUTE_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        x[m][n][i] = exp2_approx(x[m][n][i] - reference);
        sum += x[m][n][i];
      }
    }
    return sum;
  }
};

/// What was summed relative to the maximum `before`, times this, is relative to `after`.
CUTE_DEVICE float rescaling(float before, float after) {
  return exp2_approx(before - (after == -INFINITY ? 0.f : after));
}

/// A lane's part of O times what `rescaling` says, for the rows of each 16 m and 16 m + 8.
template <int M, int N>
CUTE_DEVICE void rescale(AccumulatorTile (&output)[M][N], float const (&factor)[M][2]) {
  CUTE_UNROLL
  for (int m = 0; m < M; ++m) {
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) output[m][n][i] *= factor[m][i / 2];
    }
  }
}

/// The natural LSE of a row whose probabilities sum to `sum`; -inf where a mask or keys of -inf hid everything.
CUTE_DEVICE float natural_lse(float maximum, float sum) {
  constexpr float kLn2 = 0.6931471805599453f;
  return sum != 0.f ? maximum * kLn2 + logf(sum) : -INFINITY;
}

}  // namespace cutlass_fmha
