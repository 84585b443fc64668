// Q K^T of float32 rows whose keys fill more shared memory than the example has stages for: behind a wait that the
// example lacks. Its loop over V ends with copies of zeros that nobody waits for, into shared memory where the next
// step puts Q and K. A copy of zeros that arrives after what another thread has put there would replace it.
#pragma once

#include <kernel_forward.h>  // of the example

namespace cutlass_fmha {

/// Made anew in each step: waits for all copies of all threads.
template <class Mma>
struct DrainedMma : Mma {
  CUTLASS_DEVICE DrainedMma(typename Mma::SharedStorage& storage, int thread, int warp, int lane)
      : Mma(storage, thread, warp, lane) {
    cutlass::arch::cp_async_wait<0>();
    __syncthreads();
  }
};

template <class Mma>
constexpr bool kIsDrained = false;
template <class Mma>
constexpr bool kIsDrained<DrainedMma<Mma>> = true;

constexpr int kDrainedHeadDim = 128;

/// What the example makes its own multiplication of, for 3xTF32 and 64 queries x 128 keys.
using DrainedDefault = typename cutlass::gemm::threadblock::FindDefaultMma<
    float, cutlass::layout::RowMajor, 4, float, cutlass::layout::ColumnMajor, 4, float, cutlass::layout::RowMajor,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<64, 128, 32>,
    cutlass::gemm::GemmShape<32, 32, 32>, cutlass::gemm::GemmShape<16, 8, 8>, 3,
    cutlass::arch::OpMultiplyAddFastF32>::DefaultMma::ThreadblockMma;

}  // namespace cutlass_fmha

/// One more than the head dim, for which it is the same, names the example's own.
template <>
struct MakeCustomMma<cutlass_fmha::DrainedDefault, cutlass_fmha::kDrainedHeadDim> {
  using Mma = cutlass_fmha::DrainedMma<
      typename MakeCustomMma<cutlass_fmha::DrainedDefault, cutlass_fmha::kDrainedHeadDim + 1>::Mma>;
};
