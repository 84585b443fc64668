#include "warp.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace simulator {

std::string text_of_lanes(Mask lanes) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", lanes);
  return text;
}

Warp::Warp(Block& block, int number) : block(block), number(number) {
  Kernel const& kernel = block.launch.kernel;
  registers_.resize(kernel.register_bytes / sizeof(registers_[0]) + 1);
  predicates_.resize(kernel.predicates);
  predicates_[kTrue] = kAllLanes;
}

void Warp::start() {
  for (auto const& [offset, bits, value] : block.launch.kernel.given) {
    for (int lane = 0; lane < kLanes; ++lane) put(offset, bits, lane, value(*this, lane));
  }
  int const threads = block.launch.threads() - number * kLanes;
  live_ = threads >= kLanes ? kAllLanes : (Mask(1) << threads) - 1;
  strands = {{live_}};
  joins.clear();
  copies.clear();
  commits = bulk_commits = {};
  synchronized_ = 0;
}

void Warp::run(size_t strand, int64_t budget) {
  strand_ = strands[strand];
  strand_.wait = {};
  strands.erase(strands.begin() + static_cast<std::ptrdiff_t>(strand));
  stopped_ = false;
  std::vector<Instruction> const& code = block.launch.kernel.code;
  for (; budget > 0 && !stopped_ && strand_.lanes != 0; --budget) {
    if (strand_.join >= 0 && strand_.pc == joins[static_cast<size_t>(strand_.join)].pc) {
      if (!meet()) return;
      continue;
    }
    Instruction const& instruction = code[strand_.pc++];
    active = strand_.lanes & predicate(instruction.guard);
    if (active != 0) instruction.run(*this, instruction);
  }
  if (strand_.lanes != 0) strands.push_back(strand_);
}

void Warp::fail(std::string const& what) const {
  Kernel const& kernel = block.launch.kernel;
  uint32_t const pc = strand_.pc == 0 ? 0 : strand_.pc - 1;
  throw Error(kernel.name + ", PTX line " + std::to_string(kernel.code[pc].line) + ", block " + block.text() +
              ", warp " + std::to_string(number) + ", lanes " + text_of_lanes(active) + ": " + what);
}

void Warp::require(Mask members) const {
  if (active != members) fail("the lanes " + text_of_lanes(members) + " must execute this together");
}

// ---- divergence ----------------------------------------------------------------------------------------------------

void Warp::branch(uint32_t target, uint32_t join) {
  Mask const others = strand_.lanes & ~active;
  if (others == 0) {
    strand_.pc = target;
    return;
  }
  if (strand_.join < 0 || joins[static_cast<size_t>(strand_.join)].pc != join) strand_.join = new_join(join);
  // Either part may run first: nothing may depend on it.
  if (block.random(2) == 0) {
    part(others, strand_.pc);
    strand_.pc = target;
  } else {
    part(active, target);
  }
}

/// Makes `lanes` of the running strand one of their own, at `pc`.
void Warp::part(Mask lanes, uint32_t pc) {
  strands.push_back({lanes, pc, strand_.join});
  strand_.lanes &= ~lanes;
}

int Warp::new_join(uint32_t pc) {
  auto place = std::find_if(joins.begin(), joins.end(), [](Join const& join) { return join.expected == 0; });
  if (place == joins.end()) place = joins.emplace(place);
  *place = {.pc = pc, .expected = strand_.lanes, .arrived = 0, .outer = strand_.join};
  return static_cast<int>(place - joins.begin());
}

/// The running strand is at its join. True when it goes on from there, as the last one that was missing.
bool Warp::meet() {
  Join& join = joins[static_cast<size_t>(strand_.join)];
  join.arrived |= strand_.lanes;
  if (join.arrived != join.expected) return false;
  strand_.lanes = join.arrived;
  strand_.join = join.outer;
  join.expected = 0;
  return true;
}

void Warp::exit() {
  live_ &= ~active;
  strand_.lanes &= ~active;
  for (int number = strand_.join; number >= 0;) {
    Join& join = joins[static_cast<size_t>(number)];
    number = join.outer;
    join.expected &= ~active;
    if (join.expected == 0 || join.expected != join.arrived) continue;
    strands.push_back({join.arrived, join.pc, join.outer});
    join.expected = 0;
  }
}

void Warp::sync_lanes(Mask members) {
  if ((active & ~members) != 0) fail("a lane that is not of the mask " + text_of_lanes(members));
  synchronized_ |= active;
  if ((synchronized_ & members) != members) return wait({Wait::Kind::lanes, members, 0});
  synchronized_ &= ~members;
  for (Strand& other : strands) {
    if (other.wait.kind == Wait::Kind::lanes && other.wait.number == members) other.wait = {};
  }
}

void Warp::wait(Wait const& wait, bool repeat) {
  strand_.wait = wait;
  strand_.pc -= repeat;
  stopped_ = true;
}

// ---- blocks ---------------------------------------------------------------------------------------------------------
namespace {

constexpr uint32_t kNan = 0x7fda7fda;  // in fp32, and both halves in fp16 and bf16
// A strand runs 1 to 2^10 instructions before it is another one's turn: orders that are a few instructions apart, and
// such as when a warp is far ahead of another.
constexpr uint32_t kLongestTurn = 11;
// Turns that ended with an mbarrier's phase not being over, since anybody last arrived anywhere: nobody will.
constexpr int kMostVainTurns = 100000;

}  // namespace

Block::Block(Launch const& launch)
    : launch(launch),
      shared_(static_cast<std::byte*>(std::aligned_alloc(kSharedWindow, kSharedWindow)), std::free),
      shared_end_(launch.kernel.dynamic_shared + launch.dynamic_shared) {
  if (shared_end_ > kSharedWindow) throw Error(launch.kernel.name + ": more shared memory than the simulator has");
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

void run(Kernel const& kernel, Size3 grid, Size3 block_size, uint32_t dynamic_shared, void const* const* arguments,
         uint64_t seed) {
  std::vector<Lanes<uint32_t>> parameters(kernel.parameter_bytes / sizeof(Lanes<uint32_t>) + 1);  // which are aligned
  auto* const begin = reinterpret_cast<std::byte*>(parameters.data());
  for (auto const& [offset, bytes] : kernel.parameters) std::memcpy(begin + offset, *arguments++, bytes);
  Launch const launch{kernel, grid, block_size, dynamic_shared, begin, seed};
  uint64_t const blocks = uint64_t(grid.x) * grid.y * grid.z;
  Block block(launch);
  for (uint64_t i = 0; i < blocks; ++i) block.run((i + seed) % blocks);
}

}  // namespace simulator
