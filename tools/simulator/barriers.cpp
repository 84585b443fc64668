// bar.sync and bar.arrive, mbarriers, and the instructions that use them.
#include <cstring>

#include "block.h"
#include "opcodes.h"

namespace simulator {
namespace {

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

enum : uint32_t { kArrives, kWaits };

void bar(Warp& w, Instruction const& i) {
  w.require(w.live());
  int const all = (w.block.launch.threads() + kLanes - 1) / kLanes * kLanes;
  uint32_t const threads = i.count == 2 ? w.uniform(i.operand[1]) : static_cast<uint32_t>(all);
  w.block.arrive_at_barrier(w, w.uniform(i.operand[0]), threads, i.number == kWaits);
}

void bar_warp_sync(Warp& w, Instruction const& i) { w.sync_lanes(w.uniform(i.operand[0])); }

void mbarrier_init(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    uint32_t const count = w.at<uint32_t>(i.operand[0])[lane];
    if (count == 0 || count > kMost) w.fail("an mbarrier of " + std::to_string(count) + " arrivals");
    write(w, shared_address_of(w, i.address[0], lane), {count, count, 0, 0, kMark});
  });
}

/// The state that an arrival results in is good for mbarrier.test_wait with a state only, which is not simulated.
template <bool drops>
void mbarrier_arrive(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    int64_t const arrivals = i.count == 3 ? w.at<uint32_t>(i.operand[1])[lane] : 1;
    w.block.arrive_at_mbarrier(w, shared_address_of(w, i.address[0], lane), arrivals, 0, drops ? arrivals : 0);
  });
}

void mbarrier_arrive_expect_tx(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    w.block.arrive_at_mbarrier(w, shared_address_of(w, i.address[0], lane), 1, w.at<uint32_t>(i.operand[1])[lane]);
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

void add_barriers(Opcodes& opcodes) {
  Slot const state = out<uint64_t>(), value = in<uint32_t>();
  // These wait for threads and not for warps, but the kernels call them by whole warps.
  opcodes.add({"bar.sync"}, bar, {value, value.or_nothing()}, kWaits);
  opcodes.add({"bar.arrive"}, bar, {value, value}, kArrives);
  opcodes.add({"bar.warp.sync"}, bar_warp_sync, {value});

  opcodes.add({"mbarrier.init.shared.b64"}, mbarrier_init, {kAddress, value});
  std::vector<Slot> const arrival{state, kAddress, value.or_nothing()}, phase{kPredicateOut, kAddress, value};
  opcodes.add({"mbarrier.arrive.shared.b64"}, mbarrier_arrive<false>, arrival);
  opcodes.add({"mbarrier.arrive_drop.shared.b64"}, mbarrier_arrive<true>, arrival);
  opcodes.add({"mbarrier.arrive.expect_tx.shared::cta.b64"}, mbarrier_arrive_expect_tx, {state, kAddress, value});
  opcodes.add({"mbarrier.test_wait.parity.shared.b64"}, mbarrier_wait<false>, phase);
  opcodes.add({"mbarrier.try_wait.parity.shared.b64"}, mbarrier_wait<true>, phase);

  // What is written is seen at once here, so that there is nothing to fence.
  opcodes.add({"fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster", "membar.gl"}, do_nothing, {});
}

}  // namespace simulator
