// Synchronisation inside a thread block: tiles that travel through shared memory, and turns that pairs of warps take.
#pragma once

#include <type_traits>

#include "registers.cuh"

namespace cutlass_fmha {

// Barriers as sm_80 has them, by number or shared-memory address: CUTLASS's own compile to a trap below sm_90.

CUTE_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUTE_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUTE_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// And from the next phase on, one arrival less is expected.
CUTE_DEVICE void mbarrier_arrive_and_drop(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive_drop.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

CUTE_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

/// Once `word` is there.
CUTE_DEVICE void mbarrier_arrive_after(uint32_t word, uint32_t barrier) {
  asm volatile(
      "{ .reg .pred always; .reg .b64 state;\n"
      "setp.eq.u32 always, %1, 0;\n"
      "@always mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier),
      "r"(word & unknown_zeros.x)
      : "memory");
}

/// As so many threads. From sm_90 on.
CUTE_DEVICE void mbarrier_arrive(uint32_t barrier, int count) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(count)
               : "memory");
}

/// Arrives once all cp.async that this thread has issued so far have landed.
CUTE_DEVICE void mbarrier_arrive_after_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Waits for this thread's committed groups only; cute::cp_async_wait<0> is cp.async.wait_all, which waits for all.
CUTE_DEVICE void wait_for_committed_cp_async() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

CUTE_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    // try_wait suspends the warp for a while; sm_89 only has the test.
    asm volatile(
        "{ .reg .pred p;\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

/// A ring of `Stages` tiles in shared memory, filled by `producers` threads and emptied by `consumers` threads. Tile t
/// of the walk lies in stage t % Stages. Every consumer waits for and releases every tile, needed or not: otherwise a
/// warp could run ahead by a whole turn of the ring, and a parity can't tell two turns apart. Each thread releases what
/// it read itself: one lane for its warp is no faster on sm_90, and racecheck can't follow the __syncwarp that it
/// takes.
///
/// Numbers of tiles are divided as `Number`. Without a sign that takes four instructions less, and every phase asks
/// several times; yet where warps don't take turns, ptxas makes a slower loop of it.
///
/// `By`: who writes tiles, at times at least.
template <int Stages, Copy By = Copy::cp_async_16, class Number = uint32_t>
struct TilePipeline {
  static constexpr int kBytes = 2 * Stages * int(sizeof(uint64_t));

  /// A tile of the walk, in place of its number: where a division is too much.
  struct Position {
    int stage = 0;
    uint32_t turn = 0;  ///< of the ring, modulo 2

    CUTE_DEVICE Position next() const {
      return stage + 1 == Stages ? Position{0, turn ^ 1} : Position{stage + 1, turn};
    }
    CUTE_DEVICE Position before() const {
      return stage == 0 ? Position{Stages - 1, turn ^ 1} : Position{stage - 1, turn};
    }
  };

  uint32_t barriers;  ///< full[Stages], then empty[Stages]

  /// Where a tile lies.
  CUTE_HOST_DEVICE static Number stage(int tile) { return Number(tile) % Stages; }
  CUTE_HOST_DEVICE static Number stage(Position tile) { return tile.stage; }

  /// `first`: producers of tile 0.
  CUTE_DEVICE void init(int producers, int consumers, int first) const {
    CUTE_UNROLL
    for (int stage = 0; stage < Stages; ++stage) {
      mbarrier_init(barriers + 8 * stage, stage == 0 ? first : producers);
      mbarrier_init(barriers + 8 * (Stages + stage), consumers);
    }
  }
  CUTE_DEVICE void init(int producers, int consumers) const { init(producers, consumers, producers); }

  // A `Tile` is its number or its Position.

  CUTE_DEVICE void producer_acquire(int tile) const {
    if (tile >= Stages) mbarrier_wait(empty(tile), (Number(tile) / Stages - 1) & 1);
  }
  /// Of the tile that comes after `tile` in its stage.
  CUTE_DEVICE void producer_acquire_after(Position tile) const { mbarrier_wait(empty(tile), tile.turn); }
  template <class Tile>
  CUTE_DEVICE void producer_commit_cp_async(Tile tile) const {
    mbarrier_arrive_after_cp_async(full(tile));
  }
  template <class Tile>
  CUTE_DEVICE void producer_commit(Tile tile) const {
    mbarrier_arrive(full(tile));
  }
  /// For so many of the producers.
  template <class Tile>
  CUTE_DEVICE void producer_commit(Tile tile, int producers) const {
    mbarrier_arrive(full(tile), producers);
  }
  /// By one of those that fill only this tile of its stage.
  template <class Tile>
  CUTE_DEVICE void producer_commit_once(Tile tile) const {
    mbarrier_arrive_and_drop(full(tile));
  }
  template <class Tile>
  CUTE_DEVICE void consumer_wait(Tile tile) const {
    mbarrier_wait(full(tile), turn(tile));
  }
  /// Of a tile that this thread hasn't read.
  template <class Tile>
  CUTE_DEVICE void consumer_release(Tile tile) const {
    mbarrier_arrive(empty(tile));
  }
  /// Of one that it has read, of which `product` is made (see made_of()). An arrival is not kept back by what is still
  /// being read: it overtakes ldmatrix where other blocks keep the SM's shared memory busy, and the copy unit writes
  /// there. So it waits for what was made of all that was read; tests/test_tma.py finds one that doesn't.
  template <class Tile>
  CUTE_DEVICE void consumer_release(Tile tile, uint32_t product) const {
    if constexpr (By == Copy::tma) {
      mbarrier_arrive_after(product, empty(tile));
    } else {
      mbarrier_arrive(empty(tile));
    }
  }

  /// The same by a proxy fence, where ptxas spills what waits for a product. It takes 1 to 5 % of a kernel's time.
  CUTE_DEVICE void consumer_release_fenced(int tile) const {
    if constexpr (By == Copy::tma) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    mbarrier_arrive(empty(tile));
  }

  /// Of a tile's full barrier, in bytes from `barriers` on.
  template <class Tile>
  CUTE_HOST_DEVICE static int full_offset(Tile tile) {
    return 8 * stage(tile);
  }

 private:
  CUTE_DEVICE static Number turn(int tile) { return Number(tile) / Stages & 1; }
  CUTE_DEVICE static Number turn(Position tile) { return tile.turn; }
  template <class Tile>
  CUTE_DEVICE uint32_t full(Tile tile) const {
    return barriers + 8 * stage(tile);
  }
  template <class Tile>
  CUTE_DEVICE uint32_t empty(Tile tile) const {
    return barriers + 8 * (Stages + stage(tile));
  }
};

/// Of K or V in rows whose warps walk all keys.
template <ForwardConfig C>
using KvPipeline = TilePipeline<C.stages, C.copy, std::conditional_t<C.ping_pong, uint32_t, int>>;

/// Warps w and w + Warps / 2 share a sub-core. They take turns in issuing mma, so that one computes its softmax while
/// the tensor cores work for the other; left alone they fall into step and both wait.
template <int Warps, bool Enabled>
struct Turns {
  static_assert(!Enabled || Warps == 2 || Warps == 4 || Warps == 8,
                "warp ^ Warps / 2 is the partner; 16 barriers in all");

  CUTE_DEVICE static void take(int warp) {
    if constexpr (Enabled) named_barrier_sync(1 + warp, 64);
  }
  CUTE_DEVICE static void pass(int warp) {
    if constexpr (Enabled) named_barrier_arrive(1 + (warp ^ (Warps / 2)), 64);
  }
  CUTE_DEVICE static void take() {
    if constexpr (Enabled) named_barrier_sync(1 + thread_id() / 32, 64);
  }
  CUTE_DEVICE static void pass() {
    if constexpr (Enabled) named_barrier_arrive(1 + (thread_id() / 32 ^ (Warps / 2)), 64);
  }
};

}  // namespace cutlass_fmha
