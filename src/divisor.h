// Division of block numbers by what is known before the launch: every load of a kernel waits for it, and a GPU divides
// integers in some twenty dependent instructions. The same on host and device.
#pragma once

#include <bit>
#include <cstdint>

#include "host_device.h"

namespace cutlass_fmha {

/// n / d becomes 2n * multiplier / 2^(32 + shift), with shift = ceil(log2 d) and multiplier = ceil(2^(31 + shift) / d),
/// which lies in [2^31, 2^32). Exact for 0 <= n < 2^31: the multiplier is too large by less than 1, hence the quotient
/// by less than n / 2^(31 + shift) <= n / (2^31 d) < 1 / d, the least distance to the next integer (Granlund and
/// Montgomery 1994).
struct Divisor {
  uint32_t multiplier = 1u << 31;  ///< of 1
  uint32_t shift = 0;

  Divisor() = default;
  /// divisor: 1 .. 2^31 - 1
  explicit Divisor(int divisor) : shift(uint32_t(std::bit_width(uint32_t(divisor) - 1u))) {
    multiplier = uint32_t(((uint64_t{1} << (31 + shift)) + uint32_t(divisor) - 1) / uint32_t(divisor));
  }

  /// n / divisor, for 0 <= n < 2^31
  FMHA_HOST_DEVICE int quotient(int n) const {
#ifdef __CUDA_ARCH__
    return int(__umulhi(2u * uint32_t(n), multiplier) >> shift);
#else
    return int((uint64_t{2u * uint32_t(n)} * multiplier >> 32) >> shift);
#endif
  }
};

}  // namespace cutlass_fmha
