// float32 on tensor cores: a number is the sum of two TF32 numbers, high + low, and of the four products of two such
// sums the least, low * low, is left out ("3xTF32", CUTLASS's example 28).
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "lane_scores.cuh"

namespace cutlass_fmha {

/// `high` is cut off and `low` rounded, so that x - high - low is 2^-21 x at most. The tensor core ignores the last 13
/// bits of a factor.
struct Tf32Pair {
  uint32_t high, low;

  CUTE_DEVICE static Tf32Pair of(float x) {
    uint32_t const high = __float_as_uint(x) & 0xffffe000u;
    return {high, __float_as_uint(x - __uint_as_float(high)) + 0x1000u};
  }
};

/// Floats that lie side by side in memory.
struct alignas(8) Pair {
  float x[2];
};
struct alignas(16) Vector {
  float x[4];
};

/// A lane's part of mma.m16n8k8's operands. A's columns and B's rows are lane % 4 and + 4, which mean whatever A and B
/// agree upon.
struct Tf32PairsOfA {
  Tf32Pair x[4];  ///< row, column: (0, 0), (8, 0), (0, 4), (8, 4)
};
struct Tf32PairsOfB {
  Tf32Pair x[2];  ///< row, column: (0, 0), (4, 0)
};

/// accumulator[m][n] += A[m] B[n], of `Part`: 0 for high * low, 1 for low * high, 2 for high * high.
template <int Part, int M, int N>
CUTE_DEVICE void multiply_part(AccumulatorTile* const (&accumulator)[M], Tf32PairsOfA const (&a)[M],
                               Tf32PairsOfB const (&b)[N]) {
  constexpr uint32_t Tf32Pair::* kOfA = Part == 1 ? &Tf32Pair::low : &Tf32Pair::high;
  constexpr uint32_t Tf32Pair::* kOfB = Part == 0 ? &Tf32Pair::low : &Tf32Pair::high;
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) {
    CUTE_UNROLL
    for (int m = 0; m < M; ++m) {
      AccumulatorTile& c = accumulator[m][n];
      cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], a[m].x[0].*kOfA, a[m].x[1].*kOfA,
                                               a[m].x[2].*kOfA, a[m].x[3].*kOfA, b[n].x[0].*kOfB, b[n].x[1].*kOfB, c[0],
                                               c[1], c[2], c[3]);
    }
  }
}

/// A of M mma from a tile: its rows row + 16 m, and 8 more, this lane's. Columns `column` and + 1 of eight are A's
/// columns lane % 4 and + 4.
template <int M, int Rows, int Columns>
CUTE_DEVICE void read_rows(float const (&tile)[Rows][Columns], int row, int column, Tf32PairsOfA (&a)[M]) {
  CUTE_UNROLL
  for (int m = 0; m < M; ++m) {
    Pair const x[2] = {*reinterpret_cast<Pair const*>(&tile[row + 16 * m][column]),
                       *reinterpret_cast<Pair const*>(&tile[row + 16 * m + 8][column])};
    a[m] = {Tf32Pair::of(x[0].x[0]), Tf32Pair::of(x[1].x[0]), Tf32Pair::of(x[0].x[1]), Tf32Pair::of(x[1].x[1])};
  }
}

/// B of N mma whose columns are rows 8 n + row of a tile; B's rows as A's columns above.
template <int N, int Rows, int Columns>
CUTE_DEVICE void read_rows(float const (&tile)[Rows][Columns], int row, int column, Tf32PairsOfB (&b)[N]) {
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) {
    Pair const x = *reinterpret_cast<Pair const*>(&tile[8 * n + row][column]);
    b[n] = {Tf32Pair::of(x.x[0]), Tf32Pair::of(x.x[1])};
  }
}

/// B of four mma from four neighbouring columns of two neighbouring rows, the first of which begins at `even`: column n
/// is that of mma n.
template <int Columns>
CUTE_DEVICE void read_columns(float const* even, Tf32PairsOfB (&b)[4]) {
  Vector const x[2] = {*reinterpret_cast<Vector const*>(even), *reinterpret_cast<Vector const*>(even + Columns)};
  CUTE_UNROLL
  for (int n = 0; n < 4; ++n) b[n] = {Tf32Pair::of(x[0].x[n]), Tf32Pair::of(x[1].x[n])};
}

/// accumulator[m][n] += A[m] B[n], the small products first.
template <int M, int N>
CUTE_DEVICE void multiply(AccumulatorTile* const (&accumulator)[M], Tf32PairsOfA const (&a)[M],
                          Tf32PairsOfB const (&b)[N]) {
  multiply_part<0>(accumulator, a, b);
  multiply_part<1>(accumulator, a, b);
  multiply_part<2>(accumulator, a, b);
}

}  // namespace cutlass_fmha
