// In emulation builds (core/mma_passes.cuh), CUTLASS's example 41 repeats its passes of 16-bit operands, too. To be
// included before the example.
#pragma once

#include <cutlass/gemm/warp/mma_tensor_op.h>

#include "../core/mma_passes.cuh"

#if CUTLASS_FMHA_MMA_PASSES > 1

namespace cutlass::gemm::warp {

struct OfOnePass {};

template <class Shape, class Element, class LayoutA, class LayoutB, class LayoutC, class Policy, int Parts,
          bool RowMajor>
  requires(sizeof(Element) == 2)
class MmaTensorOp<Shape, Element, LayoutA, Element, LayoutB, float, LayoutC, Policy, Parts, RowMajor, bool>
    : public MmaTensorOp<Shape, Element, LayoutA, Element, LayoutB, float, LayoutC, Policy, Parts, RowMajor,
                         OfOnePass> {
  using Once =
      MmaTensorOp<Shape, Element, LayoutA, Element, LayoutB, float, LayoutC, Policy, Parts, RowMajor, OfOnePass>;
  static_assert(Once::InstructionShape::kM == 16 && Once::InstructionShape::kN == 8);

 public:
  CUTLASS_DEVICE void operator()(typename Once::FragmentC& d, typename Once::TransformedFragmentA const& a,
                                 typename Once::TransformedFragmentB const& b,
                                 typename Once::FragmentC const& c) const {
    using namespace cute;
    using Tiles = typename Once::MmaIterations;
    constexpr bool kHalf = std::is_same_v<Element, half_t>;
    using Atom = MMA_Atom<std::conditional_t<kHalf, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>;
    Once::operator()(d, a, b, c);
    auto sums = make_tensor(d.data(), cute::Shape<cute::Shape<_2, _2>, Int<Tiles::kRow>, Int<Tiles::kColumn>>{});
    cutlass_fmha::repeat_mma_passes<Atom, 1, 16 / Once::InstructionShape::kK>(sums);
  }
};

}  // namespace cutlass::gemm::warp

#endif
