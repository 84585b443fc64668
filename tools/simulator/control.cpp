// Branches, ends, and instructions that change nothing that can be seen.
#include "opcodes.h"

namespace simulator {
namespace {

void branch(Warp& w, Instruction const& i) { w.branch(i.target, i.join); }
void exit(Warp& w, Instruction const&) { w.exit(); }
void trap(Warp& w, Instruction const&) { w.fail("the kernel stops itself"); }

}  // namespace

void add_control(Opcodes& ops) {
  ops.add({"bra", "bra.uni"}, branch, {});
  ops.add({"ret", "ret.uni", "exit"}, exit, {});
  ops.add({"trap"}, trap, {});
  // Blocks run one after the other, and what is ahead in the stream is complete.
  ops.add({"griddepcontrol.wait", "griddepcontrol.launch_dependents"}, do_nothing, {});
}

}  // namespace simulator
