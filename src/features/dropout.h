// Which probabilities dropout keeps: a function of the seed and of where the score stands, and of nothing else, so that
// every kernel, the CPU backend and a backward agree, however the work is tiled. Philox4x32 with 7 rounds, the fewest
// that its authors found without a flaw (Salmon et al. 2011).
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace cutlass_fmha {

struct PhiloxWords {
  uint32_t word[4];
};

struct Product64 {
  FMHA_HOST_DEVICE uint64_t operator()(uint32_t a, uint32_t b) const { return uint64_t{a} * b; }
};
/// The same, of which the compiler can't make a product of two 64-bit numbers with sums for halves that are 0.
struct WideProduct {
  FMHA_HOST_DEVICE uint64_t operator()(uint32_t a, uint32_t b) const {
#ifdef __CUDA_ARCH__
    uint64_t y;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
    return y;
#else
    return uint64_t{a} * b;
#endif
  }
};

template <class Multiply = Product64>
FMHA_HOST_DEVICE inline PhiloxWords philox(uint64_t seed, PhiloxWords counter, Multiply multiply = {}) {
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  uint32_t (&c)[4] = counter.word;
  for (int round = 0; round < 7; ++round) {
    uint64_t const product0 = multiply(c[0], 0xD2511F53u), product1 = multiply(c[2], 0xCD9E8D57u);
    c[0] = uint32_t(product1 >> 32) ^ c[1] ^ key0;
    c[1] = uint32_t(product1);
    c[2] = uint32_t(product0 >> 32) ^ c[3] ^ key1;
    c[3] = uint32_t(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// A counter gives the numbers of 2 x 4 probabilities: of queries i and i + 8 and of keys j, j + 1, j + 8 and j + 9,
// where i % 16 < 8 and j % 16 is 0, 2, 4 or 6. That is what a lane has of 16 x 16 scores, queries being rows.

/// Which counter. Those of queries i + 16 and of keys j + 16 are 8 and 4 further.
FMHA_HOST_DEVICE inline uint32_t dropout_query(int query) { return uint32_t(query) / 16 * 8 + uint32_t(query) % 8; }
FMHA_HOST_DEVICE inline uint32_t dropout_key(int key) { return uint32_t(key) / 16 * 4 + uint32_t(key) % 8 / 2; }
/// Which of its words is of a query and of two neighbouring keys, the even one in the low half.
FMHA_HOST_DEVICE inline int dropout_word(int query, int key) { return query / 8 % 2 * 2 + key / 8 % 2; }

template <class Multiply = Product64>
FMHA_HOST_DEVICE inline PhiloxWords dropout_numbers(uint64_t seed, int sequence_head, uint32_t query, uint32_t key,
                                                    Multiply multiply = {}) {
  return philox(seed, {{query, key, uint32_t(sequence_head), 0u}}, multiply);
}

/// The numbers that drop are the greatest `threshold` of 65536, read as fp16: two are compared at once. Where that
/// would take what is no number, the greatest of the others are those that are kept. 0 and -0 are equal, so that 31745
/// of them can't drop.
struct KeptNumbers {
  uint32_t greatest;  ///< twice: up to this, numbers are kept,
  uint32_t inverted;  ///< or, where all bits are set, above it alone

  static constexpr uint32_t kInfinity = 0x7c00, kNegativeZero = 0x8000;

  static FMHA_HOST_DEVICE KeptNumbers of(uint32_t threshold) {
    uint32_t const positive = kInfinity + 1, ordered = kInfinity + positive;  // from 0 on; and to less than infinity
    uint32_t const twice = 0x10001u;
    if (threshold > ordered) return {(kInfinity - (0x10000u - threshold)) * twice, ~0u};
    if (threshold > positive) return {(kNegativeZero + threshold - positive) * twice, 0};
    return {(threshold < positive ? kInfinity - threshold : 0) * twice, 0};
  }
};

}  // namespace cutlass_fmha
