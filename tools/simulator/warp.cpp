#include <algorithm>

#include "block.h"

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
  copies_.clear();
  commits_ = {};
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

}  // namespace simulator
