// What the main loops and epilogues share: types, and where a lane's elements of an accumulator lie.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "../config.h"
#include "online_softmax.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

namespace cutlass_fmha {

/// What a warp multiplies: A operands of `Rows` rows.
template <DType kType, int Rows>
struct MmaTypes {
  static constexpr bool kHalf = kType == DType::float16;
  using Element = cute::conditional_t<kHalf, cutlass::half_t, cutlass::bfloat16_t>;
  using Word = Bits<bytes_of(kType)>;  ///< an Element where nothing is computed with it
  using Mma = cute::TiledMMA<cute::MMA_Atom<cute::conditional_t<kHalf, cute::SM80_16x8x16_F32F16F16F32_TN,
                                                                cute::SM80_16x8x16_F32BF16BF16F32_TN>>,
                             cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>>;  // one warp: each has its rows
  static constexpr int kRows = Rows;
  static constexpr int kRowSteps = Rows / 16;  // mma tiles along a warp's rows
  template <int Columns>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::Int<Rows>, cute::Int<Columns>>{}));
};

template <ForwardConfig C>
struct ForwardTypes : MmaTypes<C.dtype, C.rows_per_warp()> {
  using Base = MmaTypes<C.dtype, C.rows_per_warp()>;
  using typename Base::Element;
  using P = Panels<C.head_dim, C.element_bytes()>;
  using OutputPanels = Panels<C.head_dim_v(), C.element_bytes()>;

  using Base::kRowSteps;
  static constexpr int kDimSteps = C.head_dim / 16;  // 16-wide steps along the head dimension
  static constexpr int kValueSteps = C.head_dim_v() / 16;
  static constexpr int kKeySteps = C.tile_n / 16;  // 16-wide steps along a block of keys

  using Softmax = OnlineSoftmax<2 * kRowSteps, Element>;
  using ScoresFragment = typename Base::template Accumulator<C.tile_n>;
  using OutputFragment = typename Base::template Accumulator<C.head_dim_v()>;
};

/// Where a lane's rows lie within the warp's tile of an mma accumulator: rows r and r + 8 of each 16.
CUTE_DEVICE int accumulator_row(int row, int lane) { return lane / 4 + row % 2 * 8 + row / 2 * 16; }

/// The softmax's row maxima, in shared memory: one lane of the four that share a row writes, all read.
struct RowMaxima {
  float* rows;  ///< of this warp

  CUTE_DEVICE float get(int row) const {
    __syncwarp();
    return rows[accumulator_row(row, lane_id())];
  }
  CUTE_DEVICE void set(int row, float maximum) const {
    __syncwarp();
    int const lane = lane_id();
    if (lane % 4 == 0) rows[accumulator_row(row, lane)] = maximum;
  }
};

/// ((2 columns, 2 row halves), row steps, column steps) of an mma accumulator -> (row, column).
template <class Layout>
CUTE_HOST_DEVICE constexpr auto row_column(Layout const& layout) {
  using namespace cute;
  return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)), make_layout(get<0, 0>(layout), get<2>(layout)));
}

/// (row, column) view of an accumulator.
template <class Accumulator>
CUTE_HOST_DEVICE auto by_row(Accumulator& accumulator) {
  return cute::make_tensor(accumulator.data(), row_column(accumulator.layout()));
}

/// (row, pair of columns) view of P, which is the A operand ((pair, row half, column half), row step, key step).
template <class T, class Probabilities>
CUTE_HOST_DEVICE auto pairs_by_row(Probabilities& probabilities) {
  using namespace cute;
  return make_tensor(recast<uint32_t>(probabilities).data(),
                     Layout<Shape<Shape<_2, Int<T::kRowSteps>>, Shape<_2, Int<T::kKeySteps>>>,
                            Stride<Stride<_1, _4>, Stride<_2, Int<4 * T::kRowSteps>>>>{});
}

/// (row, column) view of where this lane's scores lie within the warp's tile of them.
template <ForwardConfig C>
CUTE_DEVICE auto score_coordinates() {
  using namespace cute;
  using T = ForwardTypes<C>;
  auto coordinates =
      typename T::Mma{}.get_slice(lane_id()).partition_C(make_identity_tensor(Shape<Int<T::kRows>, Int<C.tile_n>>{}));
  return by_row(coordinates);
}

}  // namespace cutlass_fmha
