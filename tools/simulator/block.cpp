#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace simulator {
namespace {

constexpr uint32_t kNan = 0x7fda7fda;  // in fp32, and both halves in fp16 and bf16
// A strand runs 1 to 2^10 instructions before it is another one's turn: orders that are a few instructions apart, and
// such as when a warp is far ahead of another.
constexpr uint32_t kLongestTurn = 11;
// Turns that ended with an mbarrier's phase not being over, since anybody last arrived anywhere: nobody will.
constexpr int kMostVainTurns = 100000;

}  // namespace

Block::Block(Launch const& launch)
    : launch(launch), shared_(static_cast<std::byte*>(std::aligned_alloc(kSharedWindow, kSharedWindow)), std::free) {
  uint64_t const end = uint64_t(launch.kernel.dynamic_shared) + launch.dynamic_shared;
  if (end > kSharedWindow) throw Error(launch.kernel.name + ": more shared memory than the simulator has");
  shared_end_ = static_cast<uint32_t>(end);
  int const warps = (launch.threads() + kLanes - 1) / kLanes;
  warps_.reserve(static_cast<size_t>(warps));
  for (int i = 0; i < warps; ++i) warps_.emplace_back(*this, i);
}

std::string Block::text() const {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

uint32_t Block::random(uint32_t below) {
  // splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators")
  uint64_t z = random_state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(((z ^ z >> 31) >> 32) * below >> 32);
}

std::byte* Block::shared(Warp const& warp, uint32_t address, uint32_t bytes) {
  if (address % bytes != 0) warp.fail("shared address " + std::to_string(address) + " is not aligned");
  if (address < kSharedBase || address + bytes > shared_end_) {
    warp.fail("shared address " + std::to_string(address) + " is outside of the block's, " +
              std::to_string(kSharedBase) + " to " + std::to_string(shared_end_));
  }
  return shared_.get() + address;
}

void Block::poison(uint32_t address, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 4) std::memcpy(shared_.get() + address + i, &kNan, std::min(bytes - i, 4u));
}

void Block::run(uint64_t number) {
  index.x = static_cast<uint32_t>(number % launch.grid.x);
  index.y = static_cast<uint32_t>(number / launch.grid.x % launch.grid.y);
  index.z = static_cast<uint32_t>(number / launch.grid.x / launch.grid.y);
  random_state_ = launch.seed * 0x2545f4914f6cdd1dull + number;
  poison(kSharedBase, shared_end_ - kSharedBase);
  barriers_ = {};
  bulk_copies_.clear();
  bulk_groups_.assign(warps_.size(), {});
  vain_turns_ = 0;
  for (Warp& warp : warps_) warp.start();
  while (std::ranges::any_of(warps_, &Warp::live)) step();
  if (bulk_copies_.empty()) return;  // which would use memory that is another block's
  char const* const what = bulk_copies_.back().load ? " to its shared memory" : " has read its shared memory";
  throw Error(launch.kernel.name + ": block " + text() + " ends before a copy by TMA" + what);
}

bool Block::ready(Warp const& warp, Wait const& wait) {
  if (wait.kind == Wait::Kind::barrier) return barriers_[wait.number].completions != wait.value;
  if (wait.kind == Wait::Kind::mbarrier) return phase_is_over(warp, wait.number, wait.value);
  return wait.kind != Wait::Kind::lanes;  // which the last lane wakes
}

/// Lets one strand that can go on have a turn, or something that is under way arrive.
void Block::step() {
  std::vector<std::pair<Warp*, size_t>> choices;  // and which of its strands
  bool idle = true;
  for (Warp& warp : warps_) {
    for (size_t i = 0; i < warp.strands.size(); ++i) {
      if (!ready(warp, warp.strands[i].wait)) continue;
      choices.emplace_back(&warp, i);
      idle &= warp.strands[i].wait.kind == Wait::Kind::polling;
    }
  }
  bool const delivered = (idle || random(2) == 0) && deliver();
  if (choices.empty() && !delivered) report_deadlock();
  if (choices.empty()) return;
  if (idle && ++vain_turns_ > kMostVainTurns) report_deadlock();
  auto const [warp, strand] = choices[random(static_cast<uint32_t>(choices.size()))];
  warp->run(strand, int64_t(1) << random(kLongestTurn));
}

/// Has something asynchronous happen, if anything is under way.
bool Block::deliver() {
  auto const warps = static_cast<uint32_t>(warps_.size());
  uint32_t const all = warps + static_cast<uint32_t>(bulk_copies_.size()), first = random(all);
  for (uint32_t i = first; i < first + all; ++i) {
    uint32_t const choice = i % all;
    if (choice < warps) {
      if (warps_[choice].deliver_arrival()) return true;
      continue;
    }
    BulkCopy const copy = bulk_copies_[choice - warps];
    bulk_copies_.erase(bulk_copies_.begin() + (choice - warps));
    make(copy);
    return true;
  }
  return false;
}

void Block::report_deadlock() {
  std::string text = launch.kernel.name + ", block " + this->text() + ": deadlock;";
  for (Warp const& warp : warps_) {
    for (Strand const& strand : warp.strands) {
      text += " warp " + std::to_string(warp.number) + " lanes " + text_of_lanes(strand.lanes) + " wait at PTX line " +
              std::to_string(launch.kernel.code[strand.pc == 0 ? 0 : strand.pc - 1].line);
      auto const [kind, number, value] = strand.wait;
      if (kind == Wait::Kind::barrier) {
        text += " for barrier " + std::to_string(number) + ", where " + std::to_string(barriers_[number].arrived) +
                " of " + std::to_string(barriers_[number].expected) + " threads are;";
      } else if (kind == Wait::Kind::lanes) {
        text += " for the lanes " + text_of_lanes(number) + ";";
      } else {
        text += " for parity " + std::to_string(value) + " of the mbarrier at " + std::to_string(number) + ";";
      }
    }
  }
  throw Error(text);
}

}  // namespace simulator
