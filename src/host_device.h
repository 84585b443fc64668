// What lets the integer arithmetic of the kernels run, and be tested, on the host too.
#pragma once

#ifdef __CUDACC__
#define FMHA_HOST_DEVICE __host__ __device__
#else
#define FMHA_HOST_DEVICE
#endif

namespace cutlass_fmha {

FMHA_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace cutlass_fmha
