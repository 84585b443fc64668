// A wide row of our own, for 16-bit types and head dims above 256, for which a warp's registers can't hold whole
// rows of O. Warps stand in groups of four that share query rows: each has a quarter of a step's keys when scores are
// computed and a quarter of O's columns when they are used. Between the two, row maxima and P go through shared memory.
//
// K and V have one tile each in shared memory: one is on its way while the other is multiplied.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "../core/mma_passes.cuh"
#include "../core/tile.cuh"
#include "config.h"
#include "lane_scores.cuh"
#include "tile.h"

namespace cutlass_fmha {

constexpr int kGroupWarps = 4;

/// 16 bytes of padding let the 8 rows that ldmatrix reads at a time lie in different banks.
template <WideConfig C, class T>
struct WideHeadsStorage {
  alignas(16) T q[C.tile_m][C.head_dim + 8];
  alignas(16) T k[C.tile_n][C.head_dim + 8];
  alignas(16) T v[C.tile_n][C.head_dim + 8];
  alignas(16) T probabilities[C.tile_m][C.tile_n + 8];
  float rows[kGroupWarps][C.tile_m];  ///< of each warp's keys: maxima, and in the end sums
  WideTile tile;
  int64_t first_key, first_value;  ///< where they stand in K and V
};

/// Four 8 x 8 matrices; each lane gives the address of a row of one.
template <class Copy, class T>
CUTE_DEVICE void read_matrices(T const& row, uint32_t (&x)[4]) {
  Copy::copy(reinterpret_cast<cute::uint128_t const&>(row), x[0], x[1], x[2], x[3]);
}

/// Of A, and of B whose columns are rows of the tile, for which a lane is MatrixLane::columns_first().
template <class T>
CUTE_DEVICE void read_rows(T const& row, uint32_t (&x)[4]) {
  read_matrices<cute::SM75_U32x4_LDSM_N>(row, x);
}

/// Of B whose columns are the tile's.
template <class T>
CUTE_DEVICE void read_columns(T const& row, uint32_t (&x)[4]) {
  read_matrices<cute::SM75_U16x8_LDSM_T>(row, x);
}

/// c += A B, of 16 bits.
template <class T>
CUTE_DEVICE void multiply(AccumulatorTile& c, uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr bool kHalf = std::is_same_v<T, cutlass::half_t>;
  using Mma = std::conditional_t<kHalf, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

/// In emulation builds (core/mma_passes.cuh), after a pass over `Rows` times `Columns` tiles; a row is `Step` tiles
/// long.
template <class T, int Rows, int Columns, int Step>
CUTE_DEVICE void repeat_pass(AccumulatorTile* first) {
#if CUTLASS_FMHA_MMA_PASSES > 1
  using namespace cute;
  constexpr bool kHalf = std::is_same_v<T, cutlass::half_t>;
  using Atom = MMA_Atom<std::conditional_t<kHalf, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>;
  auto sums = make_tensor(&first[0][0], Shape<Shape<_2, _2>, Int<Rows>, Int<Columns>>{},
                          Stride<Stride<_1, _2>, Int<4 * Step>, _4>{});
  repeat_mma_passes<Atom>(sums);
#endif
}

template <WideConfig C, class T>
struct WideHeads {
  static constexpr int kRows = C.tile_m * kGroupWarps / C.warps;  ///< of a warp
  static constexpr int kKeys = C.tile_n / kGroupWarps;
  static constexpr int kColumns = C.head_dim / kGroupWarps;
  static constexpr int kRowSteps = kRows / 16, kKeySteps = kKeys / 8, kColumnSteps = kColumns / 8;
  static_assert(C.warps % kGroupWarps == 0 && kRows % 16 == 0 && kKeys % 16 == 0 && kColumns % 16 == 0 &&
                C.head_dim % 64 == 0);

  FeatureParams const& p;
  WideHeadsStorage<C, T>& shared;
  WideTile const& tile = shared.tile;
  int const lane = threadIdx.x, group = threadIdx.x / 4, quad = threadIdx.x % 4;
  int const member = threadIdx.y % kGroupWarps;  ///< of its group: which keys and columns are this warp's
  int const warp_row = static_cast<int>(threadIdx.y) / kGroupWarps * kRows;  ///< its first row in the tile

  LaneScores<kRowSteps, kKeySteps> scores;
  AccumulatorTile output[kRowSteps][kColumnSteps] = {};
  float maximum[kRowSteps][2], sum[kRowSteps][2] = {};

  /// Scores of this warp's rows and keys. Two sums of each, so that a multiplication need not wait for the last one.
  CUTE_DEVICE void multiply_keys() {
    LaneScores<kRowSteps, kKeySteps> other;
    scores.clear();
    other.clear();
    CUTE_NO_UNROLL
    for (int dim = 0; dim < p.head_dim; dim += 64) {
      CUTE_UNROLL
      for (int step = 0; step < 64; step += 32) {
        multiply_keys(dim + step, scores);
        multiply_keys(dim + step + 16, other);
      }
    }
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4 * kKeySteps; ++i) scores.x[m][i / 4][i % 4] += other.x[m][i / 4][i % 4];
    }
  }

  /// 16 dimensions of those.
  CUTE_DEVICE void multiply_keys(int dim, LaneScores<kRowSteps, kKeySteps>& sums) const {
    MatrixLane const q_at = MatrixLane::rows_first(lane), k_at = MatrixLane::columns_first(lane);
    uint32_t a[kRowSteps][4];
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      read_rows(shared.q[warp_row + 16 * m + q_at.row][dim + q_at.column], a[m]);
    }
    CUTE_UNROLL
    for (int n = 0; n < kKeySteps; n += 2) {
      uint32_t b[4];
      read_rows(shared.k[member * kKeys + 8 * n + k_at.row][dim + k_at.column], b);
      CUTE_UNROLL
      for (int m = 0; m < kRowSteps; ++m) {
        multiply<T>(sums.x[m][n], a[m], b[0], b[1]);
        multiply<T>(sums.x[m][n + 1], a[m], b[2], b[3]);
      }
    }
    repeat_pass<T, kRowSteps, kKeySteps, kKeySteps>(sums.x[0]);
  }

  /// The first of 16 columns of O: those of the group's warps take turns, so that smaller head dims are shared, too.
  CUTE_DEVICE int column(int n) const { return (n / 2 * kGroupWarps + member) * 16; }

  /// output += P V: all keys of the step, this warp's columns.
  CUTE_DEVICE void multiply_values() {
    constexpr int kSteps = C.tile_n / 16;
    MatrixLane const at = MatrixLane::rows_first(lane);
    uint32_t a[kRowSteps][kSteps][4];
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int key = 0; key < kSteps; ++key) {
        read_rows(shared.probabilities[warp_row + 16 * m + at.row][16 * key + at.column], a[m][key]);
      }
    }
    T const* v = &shared.v[at.row][at.column];
    CUTE_UNROLL
    for (int n = 0; n < kColumnSteps; n += 2) {
      if (column(n) >= p.head_dim_v) break;
      CUTE_UNROLL
      for (int key = 0; key < kSteps; ++key) {
        uint32_t b[4];
        read_columns(v[16 * key * (C.head_dim + 8) + column(n)], b);
        CUTE_UNROLL
        for (int m = 0; m < kRowSteps; ++m) {
          multiply<T>(output[m][n], a[m][key], b[0], b[1]);
          multiply<T>(output[m][n + 1], a[m][key], b[2], b[3]);
        }
        repeat_pass<T, kRowSteps, 2, kColumnSteps>(&output[0][n]);
      }
    }
  }

  CUTE_DEVICE int row(int m, int half) const { return warp_row + group + 16 * m + 8 * half; }

  /// Calls f(m, half) for each of this lane's rows.
  template <class Function>
  CUTE_DEVICE void for_each_row(Function&& f) const {
    CUTE_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) f(m, half);
    }
  }

  /// What `combine` makes of a row's numbers of all warps in the group, once all have left theirs.
  template <class Combine>
  CUTE_DEVICE float combined(int row, Combine&& combine) const {
    float x = shared.rows[0][row];
    CUTE_UNROLL
    for (int i = 1; i < kGroupWarps; ++i) x = combine(x, shared.rows[i][row]);
    return x;
  }

  CUTE_DEVICE void leave_maxima() const {
    for_each_row([&](int m, int half) {
      float const largest = QuadOfLanes::max(scores.largest(m, half));
      if (quad == 0) shared.rows[member][row(m, half)] = largest;
    });
  }

  /// Scores to probabilities in shared memory, relative to the group's new maxima, and what was summed so far as well.
  CUTE_DEVICE void exponentiate() {
    float factor[kRowSteps][2];
    bool raised = false;
    for_each_row([&](int m, int half) {
      float const before = maximum[m][half];
      float const after = fmaxf(before, combined(row(m, half), [](float a, float b) { return fmaxf(a, b); }));
      maximum[m][half] = after;
      raised |= before != after;
      factor[m][half] = rescaling(before, after);
      sum[m][half] = sum[m][half] * factor[m][half] + scores.exponentiate(m, half, after);
      CUTE_UNROLL
      for (int n = 0; n < kKeySteps; ++n) {
        AccumulatorTile const& x = scores.x[m][n];
        *reinterpret_cast<uint32_t*>(&shared.probabilities[row(m, half)][member * kKeys + 8 * n + 2 * quad]) =
            pack<T>(x[2 * half], x[2 * half + 1]);
      }
    });
    if (QuadOfLanes::any(raised)) rescale(output, factor);
  }

  CUTE_DEVICE void run() {
    for_each_row([&](int m, int half) { maximum[m][half] = -INFINITY; });
    int const last = last_key(tile, warp_row, kRows);  // that this group needs
    copy_queries<C>(p, shared);
    copy_keys<C>(p, shared, 0);
    cute::cp_async_fence();
    CUTE_NO_UNROLL
    for (int begin = 0; begin < tile.keys; begin += C.tile_n) {
      cute::cp_async_wait<0>();
      __syncthreads();  // K has arrived, and everybody is done with V and P
      copy_values<C>(p, shared, begin);
      cute::cp_async_fence();
      bool const sees = begin <= last;
      if (sees) {
        multiply_keys();
        scores.template finish<T>(p, tile, warp_row + group, begin + member * kKeys + 2 * quad,
                                  last_key(tile, warp_row));
        leave_maxima();
      }
      // For a group's own warps a barrier of theirs would do. Beside copies that are on their way, racecheck takes it
      // for a hole in the others, and it is no faster.
      __syncthreads();
      if (sees) exponentiate();
      cute::cp_async_wait<0>();
      __syncthreads();  // V and P have arrived, and everybody is done with K and the maxima
      if (begin + C.tile_n < tile.keys) copy_keys<C>(p, shared, begin + C.tile_n);
      cute::cp_async_fence();
      if (sees) multiply_values();
    }
  }

  /// O and LSE.
  CUTE_DEVICE void write() {
    for_each_row([&](int m, int half) {
      float const own = QuadOfLanes::sum(sum[m][half]);
      if (quad == 0) shared.rows[member][row(m, half)] = own;
    });
    __syncthreads();
    RowPlace const rows = query_rows(p, tile, p.o_stride), places = lse_rows(p, tile);
    for_each_row([&](int m, int half) {
      if (row(m, half) >= tile.rows) return;
      float const total = combined(row(m, half), [](float a, float b) { return a + b; });
      if (p.lse != nullptr && quad == 0 && member == 0) {
        p.lse[places[tile.first + row(m, half)]] = natural_lse(maximum[m][half], total);
      }
      float const inverse = 1.f / total;
      T* const o = static_cast<T*>(p.o) + rows[tile.first + row(m, half)];
      CUTE_UNROLL
      for (int n = 0; n < kColumnSteps; ++n) {
        int const dim = column(n) + n % 2 * 8 + 2 * quad;
        AccumulatorTile const& x = output[m][n];
        uint32_t const pair = total != 0.f ? pack<T>(x[2 * half] * inverse, x[2 * half + 1] * inverse) : 0u;
        if (dim < p.head_dim_v) *reinterpret_cast<uint32_t*>(o + dim) = pair;
      }
    });
  }
};

}  // namespace cutlass_fmha
