// The rate of mma.sync alone, which a kernel's share is of (tools/emulate.py): operands that never change, bits that toggle,
// eight warps on each SM.
#include <cuda_runtime.h>

#include <cstdint>

constexpr int kWarps = 8, kAccumulators = 32;

__global__ void __launch_bounds__(32 * kWarps, 1) mma_alone(int rounds, float* never_written) {
  float c[kAccumulators][4] = {};
  uint32_t x[12], random = threadIdx.x * 2654435761u ^ blockIdx.x * 40503u;
  for (uint32_t& word : x) word = ((random = random * 1664525u + 1013904223u) & 0x807f807fu) | 0x3f003f00u;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      uint32_t const* const a = x + i % 2 * 4;
      uint32_t const* const b = x + 8 + i / 2 % 2 * 2;
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  float sum = 0.f;
  for (auto const& each : c) sum += each[0] + each[1] + each[2] + each[3];
  if (sum == 123.456f) *never_written = sum;
}

/// Returns its floating-point operations, or -1 where CUDA refuses.
extern "C" __attribute__((visibility("default"))) double launch_mma_alone(int rounds, int blocks, void* stream) {
  mma_alone<<<blocks, 32 * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(rounds, nullptr);
  return cudaGetLastError() == cudaSuccess ? 2.0 * 16 * 8 * 16 * kAccumulators * kWarps * rounds * blocks : -1.0;
}
