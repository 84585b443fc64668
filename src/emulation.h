// Builds that make an sm_90 GPU resemble one that is not at hand (CUTLASS_FMHA_EMULATION, docs/emulation.md). The mma's
// part is core/mma_passes.cuh; this is what follows for launches. Host code, no CUDA needed.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

namespace cutlass_fmha {

/// What an SM shares among its thread blocks (CUDA Programming Guide, technical specifications).
struct SmLimits {
  int smem_bytes, warps, blocks;
};

constexpr SmLimits kSm89And120Limits{100 * 1024, 48, 24};
constexpr SmLimits kSm90Limits{228 * 1024, 64, 32};
constexpr int kReservedSmemBytes = 1024;         // that CUDA keeps of an SM's shared memory for each block
constexpr int kSmemGranularityBytes = 128;       // shared memory is given out in multiples of it
constexpr int kMaxSmemBytesOnSm90 = 227 * 1024;  // that one block may ask for

/// Dynamic shared memory with which an sm_90 holds as many blocks per SM as sm_89 and sm_120 would of blocks with
/// `smem_bytes` and `warps`: as few bytes as keep one more block out. Registers, the third limit, are alike on all.
/// Throws std::invalid_argument for a block that sm_89 and sm_120 can't hold at all.
constexpr int emulated_smem_bytes(int smem_bytes, int warps) {
  SmLimits const target = kSm89And120Limits;
  int const blocks =
      std::min({target.smem_bytes / (smem_bytes + kReservedSmemBytes), target.warps / warps, target.blocks});
  if (blocks < 1) {
    throw std::invalid_argument("a block of " + std::to_string(warps) + " warps with " + std::to_string(smem_bytes) +
                                " bytes of shared memory fits no SM of sm_89 or sm_120");
  }
  int const share = kSm90Limits.smem_bytes / (blocks + 1);  // of one block more
  int const too_large = (share / kSmemGranularityBytes + 1) * kSmemGranularityBytes;
  return std::max(smem_bytes, std::min(too_large - kReservedSmemBytes, kMaxSmemBytesOnSm90));
}

}  // namespace cutlass_fmha
