// cp.async: threads' own asynchronous copies to shared memory. A copy happens as late as it may, since a program that
// is right doesn't notice; until then its destination is NaN.
#include <algorithm>
#include <cstring>

#include "block.h"
#include "opcodes.h"

namespace simulator {

void Warp::copy_later(AsyncCopy copy) {
  copy.lanes = active;
  copy.group = commits_;
  copies_.push_back(copy);
}

void Warp::commit_copies() {
  for_lanes(active, [&](int lane) { ++commits_[lane]; });
}

void Warp::make(AsyncCopy& copy, Mask lanes) {
  for_lanes(copy.lanes & lanes, [&](int lane) {
    std::byte* const to = block.shared(*this, copy.destination[lane], copy.bytes);
    uint32_t const bytes = copy.read[lane];
    std::memcpy(to, reinterpret_cast<void const*>(copy.source[lane]), bytes);
    std::memset(to + bytes, 0, copy.bytes - bytes);
  });
  copy.lanes &= ~lanes;
}

void Warp::wait_for_copies(int64_t groups) {
  for (AsyncCopy& copy : copies_) {
    if (copy.bytes == 0) continue;
    Mask const over =
        mask_of([&](int lane) { return groups < 0 || int64_t(copy.group[lane]) + groups < int64_t(commits_[lane]); });
    make(copy, active & over);
  }
  while (!copies_.empty() && copies_.front().lanes == 0) copies_.pop_front();
}

bool Warp::deliver_arrival() {
  auto const arrival = std::ranges::find(copies_, 0u, &AsyncCopy::bytes);
  if (arrival == copies_.end()) return false;
  for (auto copy = copies_.begin(); copy != arrival; ++copy) make(*copy, arrival->lanes);
  for_lanes(arrival->lanes, [&](int lane) { block.arrive_at_mbarrier(*this, arrival->destination[lane], 1, 0); });
  arrival->lanes = 0;
  std::erase_if(copies_, [](AsyncCopy const& c) { return c.lanes == 0; });
  return true;
}

namespace {

/// Operands: the bytes to copy, and how many of them to read, which may be left out.
void copy(Warp& w, Instruction const& i) {
  AsyncCopy copy;
  copy.bytes = w.uniform(i.operand[0]);
  if (copy.bytes != 16 && (i.number == 16 || (copy.bytes != 4 && copy.bytes != 8))) w.fail("a copy of this size");
  for_lanes(w.active, [&](int lane) {
    uint32_t const to = copy.destination[lane] = shared_address_of(w, i.address[0], lane);
    copy.source[lane] = address_of(w, i.address[1], lane);
    copy.read[lane] = i.count >= 4 ? std::min(w.at<uint32_t>(i.operand[1])[lane], copy.bytes) : copy.bytes;
    if (copy.source[lane] % copy.bytes != 0) w.fail("source address is not aligned");
    w.block.shared(w, to, copy.bytes);
    w.block.poison(to, copy.bytes);
  });
  w.copy_later(copy);
}

void commit_group(Warp& w, Instruction const&) { w.commit_copies(); }
void wait_group(Warp& w, Instruction const& i) { w.wait_for_copies(w.uniform(i.operand[0])); }
void wait_all(Warp& w, Instruction const&) { w.wait_for_copies(-1); }

void arrive_noinc(Warp& w, Instruction const& i) {
  AsyncCopy arrival;
  for_lanes(w.active, [&](int lane) { arrival.destination[lane] = shared_address_of(w, i.address[0], lane); });
  w.copy_later(arrival);
}

}  // namespace

void add_async_copies(Opcodes& ops) {
  Slot const value = in<uint32_t>();
  std::vector<Slot> const slots{kAddress, kAddress, value, value.or_nothing()};
  ops.add(spell({{"cp.async.cg.shared.global"}, {"", ".L2::128B"}}), copy, slots, 16);
  ops.add(spell({{"cp.async.ca.shared.global"}, {"", ".L2::128B"}}), copy, slots, 4);
  ops.add({"cp.async.commit_group"}, commit_group, {});
  ops.add({"cp.async.wait_group"}, wait_group, {value});
  ops.add({"cp.async.wait_all"}, wait_all, {});
  ops.add({"cp.async.mbarrier.arrive.noinc.shared.b64"}, arrive_noinc, {kAddress});
}

}  // namespace simulator
