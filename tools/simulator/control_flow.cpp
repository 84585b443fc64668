// Where lanes that part at a branch meet again: at the branch's immediate post-dominator, the first statement that all
// paths to the end lead through. There the compiler has them meet.
#include <algorithm>
#include <utility>

#include "kernel.h"

namespace simulator {

/// By Cooper, Harvey and Kennedy: "A simple, fast dominance algorithm", of the statements, and one more that is the
/// end.
std::vector<uint32_t> find_joins(std::vector<Statement> const& statements) {
  auto const end = static_cast<uint32_t>(statements.size());
  std::vector<std::vector<uint32_t>> successors(end + 1), predecessors(end + 1);
  for (uint32_t i = 0; i < end; ++i) {
    Statement const& s = statements[i];
    bool const leaves = s.opcode == "ret" || s.target >= 0;
    if (leaves) successors[i].push_back(s.target < 0 ? end : static_cast<uint32_t>(s.target));
    if (!leaves || s.guard >= 0) successors[i].push_back(i + 1);
    for (uint32_t to : successors[i]) predecessors[to].push_back(i);
  }
  // Those from which the end can be reached, each after a path to it: postorder of the reversed graph.
  std::vector<uint32_t> order, path{end}, position(end + 1);
  std::vector<bool> seen(end + 1, false);
  while (!path.empty()) {
    uint32_t const here = path.back();
    seen[here] = true;
    std::vector<uint32_t>& before = predecessors[here];
    while (!before.empty() && seen[before.back()]) before.pop_back();
    if (!before.empty()) {
      path.push_back(before.back());
      continue;
    }
    position[here] = static_cast<uint32_t>(order.size());
    order.push_back(here);
    path.pop_back();
  }
  std::vector<uint32_t> joins(end + 1, kNowhere);
  joins[end] = end;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto here = order.rbegin() + 1; here != order.rend(); ++here) {
      uint32_t found = kNowhere;
      for (uint32_t other : successors[*here]) {
        if (joins[other] == kNowhere) continue;
        if (found == kNowhere) found = other;
        while (found != other) {
          uint32_t& lower = position[found] < position[other] ? found : other;
          lower = joins[lower];
        }
      }
      changed |= std::exchange(joins[*here], found) != found;
    }
  }
  joins.pop_back();
  for (uint32_t i = 0; i < end; ++i) joins[i] = statements[i].target < 0 ? kNowhere : std::min(joins[i], end);
  return joins;
}

}  // namespace simulator
