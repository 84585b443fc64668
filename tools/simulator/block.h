// A thread block: its shared memory, its barriers, what is copied for it, and whose turn it is.
#pragma once

#include <cuda.h>

#include <array>
#include <memory>

#include "warp.h"

namespace simulator {

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
  int warp = 0, lane = 0;  ///< of a store: who asked,
  uint32_t group = 0;      ///< and in which of its groups
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

  // ---- barriers, barriers.cpp --------------------------------------------------------------------------------------

  /// bar.sync and bar.arrive by a whole warp; `threads` is how many the barrier expects.
  void arrive_at_barrier(Warp& warp, uint32_t number, uint32_t threads, bool waits);
  /// Arrivals of `count` threads, or bytes of a copy, at the mbarrier at a shared address. `dropped`: so many arrivals
  /// less are expected from the next phase on.
  void arrive_at_mbarrier(Warp const& warp, uint32_t address, int64_t arrivals, int64_t expected_bytes,
                          int64_t dropped = 0);
  bool phase_is_over(Warp const& warp, uint32_t address, uint32_t parity);

  // ---- TMA, bulk_copy.cpp ------------------------------------------------------------------------------------------

  void ask_for(Warp const& warp, BulkCopy const& copy);
  void commit_bulk_group(Warp const& warp);
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

  std::unique_ptr<std::byte[], void (*)(void*)> shared_;  ///< a shared address is an offset in it
  uint32_t shared_end_ = 0;
  std::vector<Warp> warps_;
  std::array<Barrier, 16> barriers_{};
  std::vector<BulkCopy> bulk_copies_;
  std::vector<Lanes<uint32_t>> bulk_groups_;  ///< that each lane of each warp has committed
  uint64_t random_state_ = 0;
  int vain_turns_ = 0;
};

}  // namespace simulator
