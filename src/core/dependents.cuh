// The device's two instructions of launches that overlap: dependent_launch.cuh says what for, and why they are sound.
#pragma once

namespace cutlass_fmha {

/// Lets the next launch in the stream start, once all blocks of the grid have called this or ended. Best called by the
/// middle of a block's keys, and at the latest before its end: earlier, the launch of those blocks keeps the SM from
/// asking for its first keys; later, they aren't ready when they may go on, or gather on the SMs that are free first.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Returns when everything ahead in the stream is complete and its writes are visible.
///
/// What stands before the wait costs no time, for the block waits anyway. But the compiler puts it off until its
/// results are needed, unless they are settled(), and the wait stands behind a branch whose condition it doesn't know.
__device__ __forceinline__ void wait_for_kernels_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Brings what is at an address to L2, before the wait too: nothing is stale there (dependent_launch.cuh).
__device__ __forceinline__ void prefetch_to_l2(void const* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

}  // namespace cutlass_fmha
