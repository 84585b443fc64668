// The same as steps.cuh for 16 bits, by larger tiles: 64 rows of X and 128 of Y. Four warps share 32 rows of X, so that
// what is read from shared memory serves twice as many multiplications, and a step has twice as many of them between
// its barriers. Rows of Y that weights belong to come 64 at a time, whose weights stay in registers for all columns.
#pragma once

#include "../core/product.cuh"
#include "steps.cuh"

namespace cutlass_fmha {

/// What is multiplied in a step: of 32 of the block's rows, by four warps.
template <auto C, class T>
struct LargeProducts : WidePairs<T> {
  using Types = MmaTypes<C.dtype, C.rows_per_warp()>;
  static constexpr int kRowSteps = Types::kRowSteps, kFactorRows = 64;
  static constexpr int kFactorParts = C.tile_n / kFactorRows, kFactorSteps = kFactorRows / 16;
  static constexpr int kScores = C.tile_n / C.sharing() / 8, kColumns = C.step_columns() / C.sharing() / 8;
  using XTile = LdmatrixTile<C.step_dims(), C.tile_m, C.element_bytes()>;
  using YTile = LdmatrixTile<C.step_dims(), C.tile_n, C.element_bytes()>;
  using FactorTile = LdmatrixTile<C.step_columns(), kFactorRows, C.element_bytes()>;
  using WeightTile = LdmatrixTile<C.tile_n, C.tile_m, C.element_bytes()>;
  static constexpr int kX = C.tile_m * C.step_dims() * C.element_bytes();
  static constexpr int kY = C.tile_n * C.step_dims() * C.element_bytes();
  static constexpr int kFactor = kFactorRows * C.step_columns() * C.element_bytes();

  template <class Tile, int Rows>
  CUTE_DEVICE static T* element(char* tile, int row, int column) {
    return reinterpret_cast<T*>(tile + Tile::P::template byte_offset<Rows>(row, column));
  }
  struct Step {
    alignas(16) char bytes[kX + kY < kFactor ? kFactor : kX + kY];

    static constexpr int kPitch = XTile::P::kWidth, kFactorPitch = FactorTile::P::kWidth;  ///< from row to row
    CUTE_DEVICE T* x_at(int row, int column) { return element<XTile, C.tile_m>(bytes, row, column); }
    CUTE_DEVICE T* y_at(int row, int column) { return element<YTile, C.tile_n>(bytes + kX, row, column); }
    CUTE_DEVICE T* factor_at(int row, int column) { return element<FactorTile, kFactorRows>(bytes, row, column); }
  };
  struct Weights {
    alignas(16) char bytes[C.tile_m * C.tile_n * C.element_bytes()];
  };
  using Scores = LaneScores<kRowSteps, kScores>;
  using Sums = AccumulatorTile[kColumns];
  static_assert(C.head_dim % C.step_columns() == 0 && C.tile_n % kFactorRows == 0);
  static_assert(kScores % 2 == 0 && kColumns % 2 == 0);

  uint32_t const x_lane = XTile::lane_offset(MatrixLane::rows_first(threadIdx.x));
  uint32_t const y_lane = YTile::lane_offset(MatrixLane::columns_first(threadIdx.x));
  OperandA<Types, kFactorSteps> kept;

  /// n -> where the lane's pair of the n-th eight columns goes. `row`, `column`: its own, of the first of them.
  CUTE_DEVICE static auto weight_row(Weights& weights, int row, int column) {
    int const lane = lane_id();  // anew: no register is left to keep addresses in
    uint32_t const first = WeightTile::lane_offset((row & ~7) + lane / 4, (column & ~7) + lane % 4 * 2);
    return [&weights, first](int n) FMHA_INLINE { return reinterpret_cast<T*>(weights.bytes + (first ^ 16 * n)); };
  }

  /// As the products of mma take them.
  template <int N>
  CUTE_DEVICE static auto accumulators(AccumulatorTile (&tiles)[kRowSteps][N]) {
    using namespace cute;
    return make_tensor(&tiles[0][0][0],
                       Layout<Shape<Shape<_2, _2>, Int<kRowSteps>, Int<N>>, Stride<Stride<_1, _2>, Int<4 * N>, _4>>{});
  }

  /// `row`, `column`: the warp's first ones.
  CUTE_DEVICE void add_scores(Step const& step, int row, int column, Scores& scores) const {
    auto sums = accumulators(scores.x);
    add_product<Types, C.step_dims() / 16, kScores / 2>(
        [&](int i, auto&& x) FMHA_INLINE {
          CUTE_UNROLL
          for (int m = 0; m < kRowSteps; ++m)
            load_piece<XTile>(step.bytes, row * XTile::P::kRowBytes, x_lane, m, i, x(cute::_, m));
        },
        [&](int i, int n, auto&& y)
            FMHA_INLINE { load_piece<YTile>(step.bytes, kX + column * YTile::P::kRowBytes, y_lane, n, i, y); },
        sums);
  }

  /// The warp's weights of rows [y, y + kFactorRows) of Y.
  CUTE_DEVICE void keep_weights(Weights const& weights, int row, int y) {
    uint32_t const lane = WeightTile::lane_offset(MatrixLane::rows_first(threadIdx.x));
    CUTE_UNROLL
    for (int i = 0; i < kFactorSteps; ++i) {
      CUTE_UNROLL
      for (int m = 0; m < kRowSteps; ++m) {
        load_piece<WeightTile>(weights.bytes, row * WeightTile::P::kRowBytes, lane, m, y / 16 + i, kept(cute::_, m, i));
      }
    }
  }

  /// Of those.
  CUTE_DEVICE void add_values(Step const& step, int column, Sums (&sums)[kRowSteps]) const {
    MatrixLane const at = MatrixLane::rows_first(threadIdx.x);
    uint32_t const lane = FactorTile::lane_offset(at.row, at.column + column);
    auto all = accumulators(sums);
    add_product<Types, kFactorSteps, kColumns / 2>(
        [&](int i, auto&& weights) FMHA_INLINE { cute::copy(kept(cute::_, cute::_, i), weights); },
        [&](int i, int n, auto&& factor)
            FMHA_INLINE { load_piece<FactorTile, true>(step.bytes, 0, lane, i, n, factor); },
        all);
  }
};

/// `Stages` steps: one is multiplied while the others are on their way.
template <auto C, class T, int Stages>
struct LargeSteps {
  typename LargeProducts<C, T>::Step steps[Stages];
  typename LargeProducts<C, T>::Weights weights;
  CommonView views[C.warps];            ///< of what the warps' rows see
  float maxima[C.sharing()][C.tile_m];  ///< so far, for each of the warps that share rows
};

}  // namespace cutlass_fmha
