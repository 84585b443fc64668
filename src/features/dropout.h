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

/// The random numbers of eight neighbouring keys, 8 * eighth and on: word n has those of keys 2n (its low half) and
/// 2n + 1 (its high half) of them.
template <class Multiply = Product64>
FMHA_HOST_DEVICE inline PhiloxWords dropout_numbers(uint64_t seed, int sequence_head, int query, int eighth,
                                                    Multiply multiply = {}) {
  return philox(seed, {{uint32_t(query), uint32_t(eighth), uint32_t(sequence_head), 0u}}, multiply);
}

/// Two packed 16-bit probabilities, without those that their numbers drop.
FMHA_HOST_DEVICE inline uint32_t drop(uint32_t pair, uint32_t numbers, uint32_t threshold) {
  uint32_t const low = (numbers & 0xffffu) < threshold ? 0u : 0x0000ffffu;
  uint32_t const high = (numbers >> 16) < threshold ? 0u : 0xffff0000u;
  return pair & (low | high);
}

/// Which numbers of such a word are kept: the highest bits of its halves say so, the others nothing.
struct KeptHalves {
  uint32_t subtracted, both;  ///< both: of numbers from 2^15 on it takes more to be kept

  FMHA_HOST_DEVICE explicit KeptHalves(uint32_t threshold)
      : subtracted((threshold & 0x7fffu) * 0x10001u), both(threshold & 0x8000u ? 0u : 0xffffffffu) {}

  FMHA_HOST_DEVICE uint32_t operator()(uint32_t numbers) const {
    // The difference of the lower 15 bits, which borrows from a bit of its own.
    uint32_t const difference = (numbers | 0x80008000u) - subtracted;
    return (numbers & difference) | ((numbers | difference) & both);
  }
};

}  // namespace cutlass_fmha
