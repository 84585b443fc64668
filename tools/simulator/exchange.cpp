// What threads tell each other: shuffles, votes, elections; barriers and mbarriers. Branches, ends, and instructions
// that change nothing that can be seen.
#include <cstring>

#include "opcodes.h"

namespace simulator {
namespace {

// ---- the lanes of a warp -------------------------------------------------------------------------------------------

/// The lanes that a .sync instruction names, which must all be here.
void require_members(Warp& w, uint32_t place) { w.require(w.uniform(place) & w.live()); }

enum Direction : uint32_t { kButterfly, kIndex };

/// As PTX's reference describes it: c holds a mask that divides the warp into segments, and a bound.
void shuffle(Warp& w, Instruction const& i) {
  require_members(w, i.operand[5]);
  Lanes<uint32_t> const a = w.at<uint32_t>(i.operand[2]);
  Lanes<uint32_t> result{};
  Mask inside = 0;
  for_lanes(w.active, [&](int lane) {
    int const b = w.at<int32_t>(i.operand[3])[lane] & 31, c = w.at<int32_t>(i.operand[4])[lane];
    int const bound = c & 31, segment = c >> 8 & 31, first = lane & segment;
    int from = i.number == kButterfly ? lane ^ b : first | (b & ~segment);
    bool const valid = from <= (first | (bound & ~segment));
    if (!valid) from = lane;
    if (!(w.active >> from & 1)) w.fail("lane " + std::to_string(lane) + " shuffles from one that is not here");
    result[lane] = a[from];
    inside |= Mask(valid) << lane;
  });
  w.write(i.operand[0], result);
  w.set_predicate(i.operand[1], inside);
}

void vote_any(Warp& w, Instruction const& i) {
  require_members(w, i.operand[2]);
  w.set_predicate(i.operand[0], w.predicate(i.operand[1]) & w.active ? kAllLanes : 0);
}

void fill(Warp& w, uint32_t place, uint32_t value) {
  Lanes<uint32_t> result;
  std::ranges::fill(result.lane, value);
  w.write(place, result);
}

void vote_ballot(Warp& w, Instruction const& i) {
  require_members(w, i.operand[2]);
  fill(w, i.operand[0], w.predicate(i.operand[1]) & w.active);
}

/// Any lane may be elected; it is the lowest here.
void elect(Warp& w, Instruction const& i) {
  require_members(w, i.operand[2]);
  int const leader = first_lane(w.active);
  fill(w, i.operand[0], static_cast<uint32_t>(leader));
  w.set_predicate(i.operand[1], Mask(1) << leader);
}

// ---- barriers ------------------------------------------------------------------------------------------------------

/// What the 64 bits of an mbarrier hold. PTX leaves that open; its ranges are those of the fields.
struct Mbarrier {
  uint64_t expected : 20;  ///< arrivals that a phase needs
  uint64_t pending : 20;   ///< arrivals that are missing
  int64_t bytes : 21;      ///< that copies still have to bring
  uint64_t parity : 1;     ///< of the phase that is not over
  uint64_t mark : 2;       ///< kMark in an initialised mbarrier; not in the NaN of fresh shared memory
};

constexpr int64_t kMost = (1 << 20) - 1;  // arrivals, and bytes
constexpr uint64_t kMark = 2;

Mbarrier read(Warp const& warp, uint32_t address) {
  Mbarrier m;
  std::memcpy(&m, warp.block.shared(warp, address, sizeof(m)), sizeof(m));
  if (m.mark != kMark) warp.fail("no mbarrier at shared address " + std::to_string(address));
  return m;
}

void write(Warp const& warp, uint32_t address, Mbarrier const& m) {
  std::memcpy(warp.block.shared(warp, address, sizeof(m)), &m, sizeof(m));
}

}  // namespace

void Block::arrive_at_barrier(Warp& warp, uint32_t number, uint32_t threads, bool waits) {
  if (number >= barriers_.size()) warp.fail("there is no barrier " + std::to_string(number));
  if (threads % kLanes != 0 || threads == 0) warp.fail("a barrier of " + std::to_string(threads) + " threads");
  Barrier& barrier = barriers_[number];
  if (barrier.arrived > 0 && barrier.expected != threads) {
    warp.fail("barrier " + std::to_string(number) + " is for " + std::to_string(barrier.expected) +
              " threads by others and for " + std::to_string(threads) + " here");
  }
  vain_turns_ = 0;
  barrier.expected = threads;
  barrier.arrived += kLanes;
  if (waits) warp.wait({Wait::Kind::barrier, number, barrier.completions});
  if (barrier.arrived >= threads) {
    barrier.arrived = 0;
    ++barrier.completions;
  }
}

void Block::arrive_at_mbarrier(Warp const& warp, uint32_t address, int64_t arrivals, int64_t expected_bytes,
                               int64_t dropped) {
  vain_turns_ = 0;
  Mbarrier m = read(warp, address);
  if (arrivals > int64_t(m.pending)) {
    warp.fail("more arrivals than the phase of the mbarrier at " + std::to_string(address) + " expects");
  }
  if (std::abs(m.bytes + expected_bytes) > kMost) warp.fail("too many bytes for an mbarrier");
  m.bytes += expected_bytes;
  m.pending -= arrivals;
  m.expected -= dropped;
  if (m.pending == 0 && m.bytes == 0) {
    m.parity ^= 1;
    m.pending = m.expected;
  }
  write(warp, address, m);
}

bool Block::phase_is_over(Warp const& warp, uint32_t address, uint32_t parity) {
  return read(warp, address).parity != (parity & 1);
}

namespace {

template <bool waits>
void bar(Warp& w, Instruction const& i) {
  w.require(w.live());
  int const all = (w.block.launch.threads() + kLanes - 1) / kLanes * kLanes;
  uint32_t const threads = i.count == 2 ? w.uniform(i.operand[1]) : static_cast<uint32_t>(all);
  w.block.arrive_at_barrier(w, w.uniform(i.operand[0]), threads, waits);
}

void mbarrier_init(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    uint32_t const count = w.at<uint32_t>(i.operand[0])[lane];
    if (count == 0 || count > kMost) w.fail("an mbarrier of " + std::to_string(count) + " arrivals");
    write(w, shared_address_of(w, i.address[0], lane), {count, count, 0, 0, kMark});
  });
}

enum Arrival : uint32_t { kStays, kDrops, kExpectsBytes };

/// The state that an arrival results in is good for mbarrier.test_wait with a state only, which is not simulated.
void mbarrier_arrive(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    int64_t const number = i.count == 3 ? w.at<uint32_t>(i.operand[1])[lane] : 1;
    bool const bytes = i.number == kExpectsBytes;
    w.block.arrive_at_mbarrier(w, shared_address_of(w, i.address[0], lane), bytes ? 1 : number, bytes ? number : 0,
                               i.number == kDrops ? number : 0);
  });
}

/// A test answers at once. A try may wait, and may also give up at any time: now and then it does.
template <bool tries>
void mbarrier_wait(Warp& w, Instruction const& i) {
  Mask over = 0;
  Wait wait;
  for_lanes(w.active, [&](int lane) {
    uint32_t const address = shared_address_of(w, i.address[0], lane), parity = w.at<uint32_t>(i.operand[1])[lane];
    if (w.block.phase_is_over(w, address, parity)) {
      over |= Mask(1) << lane;
    } else {
      wait = {Wait::Kind::polling, address, parity};
    }
  });
  if (tries && over == 0 && w.block.random(8) > 0) {
    wait.kind = Wait::Kind::mbarrier;
    return w.wait(wait, true);
  }
  w.set_predicate(i.operand[0], over);
  if (over != w.active) w.wait(wait);
}

}  // namespace

void add_exchange(Opcodes& ops) {
  Slot const value = in<uint32_t>(), result = out<uint32_t>(), state = out<uint64_t>();
  std::vector<Slot> const shuffled{result, kPairedPredicateOut, value, value, value, value};
  ops.add({"shfl.sync.bfly.b32"}, shuffle, shuffled, kButterfly);
  ops.add({"shfl.sync.idx.b32"}, shuffle, shuffled, kIndex);
  ops.add({"vote.sync.any.pred"}, vote_any, {kPredicateOut, kPredicateIn, value});
  ops.add({"vote.sync.ballot.b32"}, vote_ballot, {result, kPredicateIn, value});
  ops.add({"elect.sync"}, elect, {result, kPairedPredicateOut, value});
  ops.add({"bra", "bra.uni"}, [](Warp& w, Instruction const& i) { w.branch(i.target, i.join); }, {});
  ops.add({"ret"}, [](Warp& w, Instruction const&) { w.exit(); }, {});

  // These wait for threads and not for warps, but the kernels call them by whole warps.
  ops.add({"bar.sync"}, bar<true>, {value, value.or_nothing()});
  ops.add({"bar.arrive"}, bar<false>, {value, value});
  ops.add({"bar.warp.sync"}, [](Warp& w, Instruction const& i) { w.sync_lanes(w.uniform(i.operand[0])); }, {value});
  ops.add({"mbarrier.init.shared.b64"}, mbarrier_init, {kAddress, value});
  std::vector<Slot> const arrival{state, kAddress, value.or_nothing()}, phase{kPredicateOut, kAddress, value};
  ops.add({"mbarrier.arrive.shared.b64"}, mbarrier_arrive, arrival, kStays);
  ops.add({"mbarrier.arrive_drop.shared.b64"}, mbarrier_arrive, arrival, kDrops);
  ops.add({"mbarrier.arrive.expect_tx.shared.b64"}, mbarrier_arrive, arrival, kExpectsBytes);
  ops.add({"mbarrier.test_wait.parity.shared.b64"}, mbarrier_wait<false>, phase);
  ops.add({"mbarrier.try_wait.parity.shared.b64"}, mbarrier_wait<true>, phase);

  // Registers have no number here.
  ops.add({"setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32"},
          [](Warp& w, Instruction const&) { w.require(w.live()); }, {value});

  // What is written is seen at once here, so that there is nothing to fence; blocks run one after the other, and what
  // is ahead in the stream is complete.
  ops.add({"fence.proxy.async.shared", "fence.mbarrier_init.cluster", "membar.gl", "griddepcontrol.wait",
           "griddepcontrol.launch_dependents"},
          [](Warp&, Instruction const&) {}, {});
}

}  // namespace simulator
