// 32 threads that run together: their registers, and where each of them is. A thread block of them: its shared memory,
// its barriers, what is copied for it, and whose turn it is.
#pragma once

#include <cuda.h>

#include <array>
#include <bit>
#include <deque>
#include <memory>

#include "kernel.h"

namespace simulator {

// One value for each thread of a warp. Loops over lanes are plain loops: the compiler makes vector instructions of
// them.

constexpr int kLanes = 32;

/// A set of lanes, and what a predicate register of a warp holds.
using Mask = uint32_t;
constexpr Mask kAllLanes = ~Mask(0);

template <class T>
struct alignas(64) Lanes {
  T lane[kLanes];

  T& operator[](int i) { return lane[i]; }
  T const& operator[](int i) const { return lane[i]; }
};

template <class F>
Mask mask_of(F const& holds) {
  Mask result = 0;
  for (int i = 0; i < kLanes; ++i) result |= static_cast<Mask>(static_cast<bool>(holds(i))) << i;
  return result;
}

/// The mask is not empty.
inline int first_lane(Mask mask) { return std::countr_zero(mask) & (kLanes - 1); }

/// Calls f(lane) for each lane of a mask, lowest first.
template <class F>
void for_lanes(Mask mask, F const& f) {
  if (mask == kAllLanes) {
    for (int i = 0; i < kLanes; ++i) f(i);
    return;
  }
  for (; mask != 0; mask &= mask - 1) f(first_lane(mask));
}

std::string text_of_lanes(Mask lanes);

class Block;

/// What a strand waits for before it can go on.
struct Wait {
  enum class Kind {
    nothing,
    barrier,   ///< until barrier `number` has been completed after its completion number `value`
    mbarrier,  ///< until the phase of parity `value` of the mbarrier at shared address `number` is over
    lanes,     ///< until all lanes that bar.warp.sync names have come
    polling,   ///< asked for the phase of an mbarrier, as above, and will ask again
  };
  Kind kind = Kind::nothing;
  uint32_t number = 0, value = 0;
};

/// Lanes of a warp that are at the same instruction. A warp is one strand but for the time that a branch parts it.
struct Strand {
  Mask lanes = 0;
  uint32_t pc = 0;
  int join = -1;  ///< number of the join that it goes to; -1: it has not parted from others
  Wait wait = {};
};

/// A place where lanes that parted meet.
struct Join {
  uint32_t pc = 0;
  Mask expected = 0, arrived = 0;
  int outer = -1;  ///< the join that they go to afterwards
};

/// A warp's cp.async: copies that are still to be made, and arrivals at mbarriers when all copies before are. Each lane
/// has commit groups of its own.
struct AsyncCopy {
  Mask lanes = 0;      ///< whose copy is still to be made
  uint32_t bytes = 0;  ///< 0: an arrival at the mbarrier `destination`
  Lanes<uint32_t> destination{}, group{};
  Lanes<uint32_t> read{};  ///< bytes to read; the others of `bytes` become 0
  Lanes<uint64_t> source{};
};

class Warp {
 public:
  Warp(Block& block, int number);

  /// Puts the warp at the beginning of the kernel, in a new block.
  void start();

  /// Runs strands[strand] until it waits or ends, or for `budget` instructions.
  void run(size_t strand, int64_t budget);
  /// The lanes that have not ended.
  Mask live() const { return live_; }

  // ---- registers ---------------------------------------------------------------------------------------------------

  template <class T>
  Lanes<T>& at(uint32_t offset) {
    return *reinterpret_cast<Lanes<T>*>(reinterpret_cast<char*>(registers_.data()) + offset);
  }
  /// What the first active lane has, of operands that all lanes have the same of.
  uint32_t uniform(uint32_t offset) { return at<uint32_t>(offset)[first_lane(active)]; }
  /// Writes the active lanes of a register.
  template <class T>
  void write(uint32_t offset, Lanes<T> const& value) {
    Lanes<T>& to = at<T>(offset);
    if (active == kAllLanes) {
      to = value;
    } else {
      for (int i = 0; i < kLanes; ++i) to[i] = active >> i & 1 ? value[i] : to[i];
    }
  }
  /// A lane of a register of 16, 32 or 64 bits.
  uint64_t get(uint32_t offset, int bits, int lane) {
    if (bits == 16) return at<uint16_t>(offset)[lane];
    return bits == 32 ? at<uint32_t>(offset)[lane] : at<uint64_t>(offset)[lane];
  }
  void put(uint32_t offset, int bits, int lane, uint64_t value) {
    if (bits == 16) at<uint16_t>(offset)[lane] = static_cast<uint16_t>(value);
    if (bits == 32) at<uint32_t>(offset)[lane] = static_cast<uint32_t>(value);
    if (bits == 64) at<uint64_t>(offset)[lane] = value;
  }
  Mask predicate(uint32_t number) const {
    return predicates_[number & ~kNegated] ^ (number & kNegated ? kAllLanes : 0);
  }
  void set_predicate(uint32_t number, Mask value) {
    predicates_[number] = (predicates_[number] & ~active) | (value & active);
  }

  // ---- for instructions --------------------------------------------------------------------------------------------

  [[noreturn]] void fail(std::string const& what) const;
  /// For instructions that `members` of the warp execute together.
  void require(Mask members) const;
  /// The active lanes go to `target`, the other ones of the strand on; they meet again at `join`.
  void branch(uint32_t target, uint32_t join);
  /// The active lanes end.
  void exit();
  /// The strand stops behind this instruction, or before it, which then runs again.
  void wait(Wait const& wait, bool repeat = false);
  /// bar.warp.sync.
  void sync_lanes(Mask members);

  // ---- asynchronous copies, memory.cpp -------------------------------------------------------------------------

  void make(AsyncCopy& copy, Mask lanes);
  /// Makes the copies before the first arrival in the queue, and the arrival. False when there is none.
  bool deliver_arrival();

  std::deque<AsyncCopy> copies;
  Lanes<uint32_t> commits{}, bulk_commits{};  ///< groups that each lane has committed: of cp.async, and of TMA

  Block& block;
  int const number;
  Mask active = 0;  ///< the lanes that execute the current instruction
  std::vector<Strand> strands;
  std::vector<Join> joins;

 private:
  bool meet();
  void part(Mask lanes, uint32_t pc);
  int new_join(uint32_t pc);

  std::vector<Lanes<uint64_t>> registers_;
  std::vector<Mask> predicates_;
  Mask live_ = 0;
  Mask synchronized_ = 0;  ///< lanes that wait in bar.warp.sync
  Strand strand_;          ///< the one that runs; it is not in strands
  bool stopped_ = false;
};

/// Shared addresses begin here: what CUDA reserves of each block's shared memory lies before.
constexpr uint32_t kSharedBase = 1024;
/// Generic addresses of shared memory are in a window of so many bytes: more than any GPU's, a power of two.
constexpr size_t kSharedWindow = size_t(1) << 18;

/// The description of a tensor that the copy unit reads, in the 128 bytes of a CUtensorMap. Dimensions from the
/// innermost one, whose elements are contiguous.
struct TensorMap {
  uint64_t mark;  ///< kTensorMapMark
  uint64_t address;
  uint64_t strides[4], extents[4];  ///< strides in bytes
  uint16_t box[4];
  uint16_t swizzle;  ///< bytes of the span in which it swizzles: 0, 32, 64 or 128
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint64_t kTensorMapMark = 0x70614d726f736e54;  // "TnsorMap"

/// The driver's cuTensorMapEncodeTiled for four dimensions of 16-bit floats: checks what its documentation asks for.
decltype(cuTensorMapEncodeTiled) encode_tiled;

/// A copy of the TMA unit that has been asked for and may happen at any time.
struct BulkCopy {
  TensorMap map;
  bool load = true;  ///< to shared memory
  int32_t origin[4] = {};
  uint32_t shared = 0, mbarrier = 0;
  Warp const* warp = nullptr;
  int lane = 0;        ///< of a store: who asked,
  uint32_t group = 0;  ///< and in which of its groups
};

class Block {
 public:
  explicit Block(Launch const& launch);

  /// Runs the block of this number in the grid to its end. Raises Error.
  void run(uint64_t number);
  std::string text() const;  ///< "(1, 0, 0)"

  Launch const& launch;
  Size3 index;

  /// A number below `below`, from the block's seed.
  uint32_t random(uint32_t below);

  // ---- shared memory -----------------------------------------------------------------------------------------------

  /// The memory behind a shared address. Fails for `warp` when it is not aligned to `bytes` or outside the block's.
  std::byte* shared(Warp const& warp, uint32_t address, uint32_t bytes);
  /// What a generic address of shared memory is relative to.
  uint64_t shared_window() const { return reinterpret_cast<uint64_t>(shared_.get()); }
  /// Fills shared memory that nobody may read before a copy ends, or before it is written, with NaN.
  void poison(uint32_t address, uint32_t bytes);

  // ---- barriers, exchange.cpp --------------------------------------------------------------------------------------

  /// bar.sync and bar.arrive by a whole warp; `threads` is how many the barrier expects.
  void arrive_at_barrier(Warp& warp, uint32_t number, uint32_t threads, bool waits);
  /// Arrivals of `count` threads, or bytes of a copy, at the mbarrier at a shared address. `dropped`: so many arrivals
  /// less are expected from the next phase on.
  void arrive_at_mbarrier(Warp const& warp, uint32_t address, int64_t arrivals, int64_t expected_bytes,
                          int64_t dropped = 0);
  bool phase_is_over(Warp const& warp, uint32_t address, uint32_t parity);

  // ---- TMA, memory.cpp ------------------------------------------------------------------------------------------

  void ask_for(Warp const& warp, BulkCopy const& copy);
  /// Makes the stores that the active lanes asked for, but for their last `groups` groups.
  void wait_for_bulk_groups(Warp const& warp, uint32_t groups);

 private:
  struct Barrier {
    uint32_t expected = 0, arrived = 0, completions = 0;
  };

  bool ready(Warp const& warp, Wait const& wait);
  void step();
  bool deliver();
  [[noreturn]] void report_deadlock();
  void make(BulkCopy const& copy);

  uint64_t random_state_ = 0;
  std::unique_ptr<std::byte[], void (*)(void*)> shared_;  ///< a shared address is an offset in it
  uint32_t shared_end_;
  std::vector<Warp> warps_;
  std::array<Barrier, 16> barriers_{};
  std::vector<BulkCopy> bulk_copies_;
  int vain_turns_ = 0;
};

}  // namespace simulator
