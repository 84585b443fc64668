// What the lanes of a warp tell each other: shuffles, votes, elections; branches, ends, and instructions that change
// nothing that can be seen.
#include "opcodes.h"

namespace simulator {
namespace {

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
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = value;
  w.write(place, result);
}
void vote_ballot(Warp& w, Instruction const& i) {
  require_members(w, i.operand[2]);
  fill(w, i.operand[0], w.predicate(i.operand[1]) & w.active);
}

void branch(Warp& w, Instruction const& i) { w.branch(i.target, i.join); }
void exit(Warp& w, Instruction const&) { w.exit(); }

/// Any lane may be elected; it is the lowest here.
void elect(Warp& w, Instruction const& i) {
  require_members(w, i.operand[2]);
  int const leader = first_lane(w.active);
  fill(w, i.operand[0], static_cast<uint32_t>(leader));
  w.set_predicate(i.operand[1], Mask(1) << leader);
}

}  // namespace

void add_exchange(Opcodes& ops) {
  Slot const value = in<uint32_t>(), result = out<uint32_t>();
  std::vector<Slot> const shuffled{result, kPairedPredicateOut, value, value, value, value};
  ops.add({"shfl.sync.bfly.b32"}, shuffle, shuffled, kButterfly);
  ops.add({"shfl.sync.idx.b32"}, shuffle, shuffled, kIndex);

  ops.add({"vote.sync.any.pred"}, vote_any, {kPredicateOut, kPredicateIn, value});
  ops.add({"vote.sync.ballot.b32"}, vote_ballot, {result, kPredicateIn, value});
  ops.add({"elect.sync"}, elect, {result, kPairedPredicateOut, value});
  ops.add({"bra", "bra.uni"}, branch, {});
  ops.add({"ret"}, exit, {});
  // Blocks run one after the other, and what is ahead in the stream is complete.
  ops.add({"griddepcontrol.wait", "griddepcontrol.launch_dependents"}, do_nothing, {});
}

}  // namespace simulator
