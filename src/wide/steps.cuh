// What a thread block multiplies of operands that don't fit its shared memory: tile_m rows of X, and as many of Y at a
// time, some dimensions in each step. S = X Y^T, and sums of W Y, where W are weights made of S. For float32 up to head
// dim 512 as for 16 bits; shared by wide_scored.cuh and the family backward_wide.
#pragma once

#include "tf32x3.cuh"
#include "wide_heads.cuh"

namespace cutlass_fmha {

/// tanh of a product of Q and K that is scaled and divided by the softcap. Of float32 it is as exact as that; one
/// exponential is off by an ulp of 1.
template <class T>
CUTE_DEVICE float tanh_of_product(float product, float cap_scale) {
  if constexpr (sizeof(T) == 4) return tanhf(product * (cap_scale * (0.5f / kLog2e)));
  return tanh_of_exp2(product * cap_scale);
}

/// Padding as in whole_rows.cuh and wide_heads.cuh: of float32, 8 where lanes read two neighbours, 4 where four.
template <auto C, class T>
union WideStep {
  struct Scores {
    alignas(16) T x[C.tile_m][C.step_dims() + 8];
    alignas(16) T y[C.tile_n][C.step_dims() + 8];
  };
  struct Factor {
    alignas(16) T y[C.tile_n][C.step_columns() + (sizeof(T) == 4 ? 4 : 8)];
  };

  Scores scores;
  Factor factor;
};

/// `Stages` steps: one is multiplied while the others are on their way.
template <auto C, class T, int Stages>
struct WideSteps {
  static_assert(C.tile_m == C.tile_n && C.tile_m == 8 * C.warps && C.head_dim % C.step_columns() == 0);

  WideStep<C, T> steps[Stages];
  alignas(16) T weights[C.tile_m][C.tile_n + 8];
};

/// How a step's operands are multiplied: of 16 of the block's rows, by two warps.
template <auto C, class T>
struct WideProducts;

template <auto C>
struct WideProducts<C, float> {
  using Step = WideStep<C, float>;
  using Weights = float[C.tile_m][C.tile_n + 8];
  static constexpr int kScores = C.tile_n / 2 / 8, kColumns = C.step_columns() / 2 / 8;
  using Scores = LaneScores<1, kScores>;
  using Sums = AccumulatorTile[kColumns];
  static_assert(C.step_dims() == 32 && kColumns == 4);
  int const group = threadIdx.x / 4, quad = threadIdx.x % 4;

  /// Tensor cores cut off what they sum: not more than 32 dimensions, or 16 rows of Y, one after the other.
  CUTE_DEVICE void add_scores(typename Step::Scores const& step, int row, int column, Scores& scores) const {
    AccumulatorTile part[kScores] = {};
    AccumulatorTile* const rows[] = {part};
    CUTE_UNROLL
    for (int dim = 0; dim < C.step_dims(); dim += 8) {
      Tf32PairsOfA a[1];
      Tf32PairsOfB b[kScores];
      read_rows(step.x, row + group, dim + 2 * quad, a);
      read_rows(step.y, column + group, dim + 2 * quad, b);
      multiply(rows, a, b);
    }
    CUTE_UNROLL
    for (int i = 0; i < 4 * kScores; ++i) scores.x[0][i / 4][i % 4] += part[i / 4][i % 4];
  }

  CUTE_DEVICE void add_values(Weights const& weights, typename Step::Factor const& step, int row, int column,
                              Sums& sums) const {
    CUTE_NO_UNROLL
    for (int y = 0; y < C.tile_n; y += 16) {
      AccumulatorTile part[kColumns] = {};
      AccumulatorTile* const rows[] = {part};
      CUTE_UNROLL
      for (int i = y; i < y + 16; i += 8) {
        Tf32PairsOfA a[1];
        Tf32PairsOfB b[kColumns];
        read_rows(weights, row + group, i + 2 * quad, a);
        read_columns<C.step_columns() + 4>(&step.y[i + 2 * quad][column + 4 * group], b);
        multiply(rows, a, b);
      }
      CUTE_UNROLL
      for (int i = 0; i < 4 * kColumns; ++i) sums[i / 4][i % 4] += part[i / 4][i % 4];
    }
  }

  CUTE_DEVICE static void store(float* to, float a, float b) { *reinterpret_cast<Pair*>(to) = {a, b}; }

  /// Of a row, a lane has eight neighbouring columns.
  CUTE_DEVICE void write(float* row, int half, int columns, float factor, Sums const& sums) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const at = 8 * quad + 4 * i;
      Vector vector;
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) vector.x[j] = sums[j][2 * half + i] * factor;
      if (at < columns) *reinterpret_cast<Vector*>(row + at) = vector;
    }
  }
};

/// Of 16 bits.
template <auto C, class T>
struct WideProducts {
  using Step = WideStep<C, T>;
  using Weights = T[C.tile_m][C.tile_n + 8];
  static constexpr int kScores = C.tile_n / 2 / 8, kColumns = C.step_columns() / 2 / 8;
  using Scores = LaneScores<1, kScores>;
  using Sums = AccumulatorTile[kColumns];
  int const quad = threadIdx.x % 4;
  MatrixLane const a_at = MatrixLane::rows_first(threadIdx.x), b_at = MatrixLane::columns_first(threadIdx.x);

  CUTE_DEVICE void add_scores(typename Step::Scores const& step, int row, int column, Scores& scores) const {
    CUTE_UNROLL
    for (int dim = 0; dim < C.step_dims(); dim += 16) {
      uint32_t a[4];
      read_rows(step.x[row + a_at.row][dim + a_at.column], a);
      CUTE_UNROLL
      for (int n = 0; n < kScores; n += 2) {
        uint32_t b[4];
        read_rows(step.y[column + 8 * n + b_at.row][dim + b_at.column], b);
        multiply<T>(scores.x[0][n], a, b[0], b[1]);
        multiply<T>(scores.x[0][n + 1], a, b[2], b[3]);
      }
      repeat_pass<T, 1, kScores, kScores>(scores.x[0]);
    }
  }

  CUTE_DEVICE void add_values(Weights const& weights, typename Step::Factor const& step, int row, int column,
                              Sums& sums) const {
    CUTE_UNROLL
    for (int y = 0; y < C.tile_n; y += 16) {
      uint32_t a[4];
      read_rows(weights[row + a_at.row][y + a_at.column], a);
      CUTE_UNROLL
      for (int n = 0; n < kColumns; n += 2) {
        uint32_t b[4];
        read_columns(step.y[y + a_at.row][column + 8 * n + a_at.column], b);
        multiply<T>(sums[n], a, b[0], b[1]);
        multiply<T>(sums[n + 1], a, b[2], b[3]);
      }
      repeat_pass<T, 1, kColumns, kColumns>(sums);
    }
  }

  CUTE_DEVICE static void store(T* to, float a, float b) { *reinterpret_cast<uint32_t*>(to) = pack<T>(a, b); }
  CUTE_DEVICE static void store(float* to, float a, float b) { *reinterpret_cast<Pair*>(to) = {a, b}; }

  template <class To>
  CUTE_DEVICE void write(To* row, int half, int columns, float factor, Sums const& sums) const {
    CUTE_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      int const at = 8 * n + 2 * quad;
      if (at < columns) store(row + at, sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
    }
  }
};

}  // namespace cutlass_fmha
