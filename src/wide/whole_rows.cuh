// A wide row of our own, for float32 on tensor cores: a warp holds whole rows of scores and of O in registers, as
// in FlashAttention-2 (Dao 2023), so that rows need no exchange between warps and P is never written to shared memory.
//
// K and V have one tile each in shared memory: one is on its way while the other is multiplied. A lane reads two or
// four neighbouring floats at a time. That permutes what the mma's columns and rows mean: Q and K agree on the order of
// dimensions, P and V on that of keys, and O's columns are put in order when they are written.
#pragma once

#include "config.h"
#include "lane_scores.cuh"
#include "tf32x3.cuh"
#include "tile.h"

namespace cutlass_fmha {

/// A row's padding lets the lanes that read at a time, 16 of Q or K and 8 of V, find each bank once.
template <WideConfig C>
struct WholeRowsStorage {
  alignas(16) float q[C.tile_m][C.head_dim + 8];
  alignas(16) float k[C.tile_n][C.head_dim + 8];
  alignas(16) float v[C.tile_n][C.head_dim + 4];
  WideTile tile;
  int64_t first_key, first_value;  ///< where they stand in K and V
};

template <WideConfig C>
struct WholeRows {
  static constexpr int kRows = C.tile_m / C.warps;  ///< of a warp
  static constexpr int kRowSteps = kRows / 16;
  static constexpr int kKeySteps = C.tile_n / 8;
  static constexpr int kDimSteps = C.head_dim / 8;
  static_assert(kRows % 16 == 0 && C.tile_n % 16 == 0 && C.head_dim % 32 == 0);

  FeatureParams const& p;
  WholeRowsStorage<C>& shared;
  WideTile const& tile = shared.tile;
  int const group = threadIdx.x / 4, quad = threadIdx.x % 4;
  int const first_row = threadIdx.y * kRows + group;  ///< of this lane, in the tile

  LaneScores<kRowSteps, kKeySteps> scores;
  AccumulatorTile output[kRowSteps][kDimSteps] = {};
  float maximum[kRowSteps][2], sum[kRowSteps][2] = {};

  /// scores = Q K^T, in sums of 32 dimensions. Tensor cores cut off what they sum: dozens of products, one after the
  /// other, would be off by more than float32 is.
  CUTE_DEVICE void multiply_keys() {
    scores.clear();
    CUTE_NO_UNROLL
    for (int begin = 0; begin < p.head_dim; begin += 32) {
      AccumulatorTile part[kRowSteps][kKeySteps] = {};
      AccumulatorTile* rows[kRowSteps];
      CUTE_UNROLL
      for (int m = 0; m < kRowSteps; ++m) rows[m] = part[m];
      CUTE_UNROLL
      for (int step = 0; step < 32; step += 8) multiply_keys(begin + step + 2 * quad, rows);
      CUTE_UNROLL
      for (int m = 0; m < kRowSteps; ++m) add<kKeySteps>(scores.x[m], part[m]);
    }
  }

  /// 8 dimensions of those. This lane's two of them are A's columns and B's rows quad and + 4.
  CUTE_DEVICE void multiply_keys(int dim, AccumulatorTile* const (&part)[kRowSteps]) const {
    Tf32PairsOfA a[kRowSteps];
    read_rows(shared.q, first_row, dim, a);
    Tf32PairsOfB b[kKeySteps];
    read_rows(shared.k, group, dim, b);
    multiply(part, a, b);
  }

  template <int N>
  CUTE_DEVICE static void add(AccumulatorTile* sum, AccumulatorTile const* part) {
    CUTE_UNROLL
    for (int i = 0; i < 4 * N; ++i) sum[i / 4][i % 4] += part[i / 4][i % 4];
  }

  /// output += P V, in sums of 16 keys, 32 dimensions at a time.
  CUTE_DEVICE void multiply_values() {
    CUTE_UNROLL
    for (int n = 0; n < kKeySteps; n += 2) {
      Tf32PairsOfA a[2][kRowSteps];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int m = 0; m < kRowSteps; ++m) {
          float const* const s = scores.x[m][n + i];  // its columns 2 quad and + 1 are A's columns quad and + 4
          a[i][m] = {Tf32Pair::of(s[0]), Tf32Pair::of(s[2]), Tf32Pair::of(s[1]), Tf32Pair::of(s[3])};
        }
      }
      CUTE_UNROLL
      for (int d = 0; d < kDimSteps; d += 4) {
        AccumulatorTile part[kRowSteps][4] = {};
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) multiply_values(n + i, d, a[i], part);
        CUTE_UNROLL
        for (int m = 0; m < kRowSteps; ++m) add<4>(output[m] + d, part[m]);
      }
    }
  }

  /// 8 keys of those.
  CUTE_DEVICE void multiply_values(int n, int d, Tf32PairsOfA const (&a)[kRowSteps],
                                   AccumulatorTile (&part)[kRowSteps][4]) {
    Tf32PairsOfB b[4];
    read_columns<C.head_dim + 4>(&shared.v[8 * n + 2 * quad][8 * d + 4 * group], b);
    AccumulatorTile* rows[kRowSteps];
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) rows[m] = part[m];
    multiply(rows, a, b);
  }

  /// Scores to probabilities, relative to new maxima, and what was summed so far as well.
  CUTE_DEVICE void exponentiate() {
    float factor[kRowSteps][2];
    bool raised = false;
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float const before = maximum[m][half];
        float const after = QuadOfLanes::max(fmaxf(before, scores.largest(m, half)));
        maximum[m][half] = after;
        raised |= before != after;
        factor[m][half] = rescaling(before, after);
        sum[m][half] = sum[m][half] * factor[m][half] + scores.exponentiate(m, half, after);
      }
    }
    if (QuadOfLanes::any(raised)) rescale(output, factor);
  }

  CUTE_DEVICE void run() {
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;
    int const first = threadIdx.y * kRows;
    int const last = last_key(tile, first, kRows);  // that this warp needs
    copy_queries<C>(p, shared);
    copy_keys<C>(p, shared, 0);
    cute::cp_async_fence();
    CUTE_NO_UNROLL
    for (int begin = 0; begin < tile.keys; begin += C.tile_n) {
      cute::cp_async_wait<0>();
      __syncthreads();  // K has arrived, and everybody is done with V
      copy_values<C>(p, shared, begin);
      cute::cp_async_fence();
      if (begin <= last) {
        multiply_keys();
        scores.template finish<float>(p, tile, first_row, begin + 2 * quad, last_key(tile, first));
        exponentiate();
      }
      cute::cp_async_wait<0>();
      __syncthreads();  // V has arrived, and everybody is done with K
      if (begin + C.tile_n < tile.keys) copy_keys<C>(p, shared, begin + C.tile_n);
      cute::cp_async_fence();
      if (begin <= last) multiply_values();
    }
  }

  /// O and LSE. Of a row, a lane has 8 neighbouring columns of each 32.
  CUTE_DEVICE void write() {
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) sum[m][half] = QuadOfLanes::sum(sum[m][half]);
    }
    RowPlace const rows = query_rows(p, tile, p.o_stride), places = lse_rows(p, tile);
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float const total = sum[m][half];
        int const row = first_row + 16 * m + 8 * half;
        if (row >= tile.rows) continue;
        if (p.lse != nullptr && quad == 0) p.lse[places[tile.first + row]] = natural_lse(maximum[m][half], total);
        float const inverse = 1.f / total;
        float* const o = static_cast<float*>(p.o) + rows[tile.first + row];
        CUTE_UNROLL
        for (int i = 0; i < C.head_dim / 4; i += 8) {
          CUTE_UNROLL
          for (int column = 0; column < 2; ++column) {
            int const dim = 4 * i + 8 * quad + 4 * column;
            Vector vector;
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j)
              vector.x[j] = total != 0.f ? output[m][i / 2 + j][2 * half + column] * inverse : 0.f;
            if (dim < p.head_dim_v) *reinterpret_cast<Vector*>(o + dim) = vector;
          }
        }
      }
    }
  }
};

}  // namespace cutlass_fmha
