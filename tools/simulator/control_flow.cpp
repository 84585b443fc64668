// Where lanes that part at a branch meet again: at the branch's immediate post-dominator, the first statement that all
// paths to the end lead through. There the compiler has them meet.
#include <algorithm>
#include <utility>

#include "kernel.h"

namespace simulator {
namespace {

bool is_branch(Statement const& s) { return s.target >= 0; }
bool is_exit(Statement const& s) { return s.opcode == "ret" || s.opcode == "exit"; }

/// Basic blocks, by number, in the order of the text. One more at the end stands for the end of the kernel.
struct Graph {
  std::vector<int> begin;  ///< first statement of each block
  std::vector<std::vector<int>> successors, predecessors;

  explicit Graph(std::vector<Statement> const& statements);
  int end() const { return static_cast<int>(begin.size()) - 1; }
};

Graph::Graph(std::vector<Statement> const& statements) {
  int const count = static_cast<int>(statements.size());
  std::vector<bool> leads(statements.size() + 1, false);
  leads.front() = leads.back() = true;
  for (size_t i = 0; i < statements.size(); ++i) {
    if (is_branch(statements[i])) leads[static_cast<size_t>(statements[i].target)] = true;
    if (is_branch(statements[i]) || is_exit(statements[i])) leads[i + 1] = true;
  }
  std::vector<int> block_of(statements.size() + 1);
  for (int i = 0; i <= count; ++i) {
    if (leads[static_cast<size_t>(i)]) begin.push_back(i);
    block_of[static_cast<size_t>(i)] = end();
  }
  successors.resize(begin.size()), predecessors.resize(begin.size());
  auto const connect = [&](int from, int to) {
    successors[static_cast<size_t>(from)].push_back(to);
    predecessors[static_cast<size_t>(to)].push_back(from);
  };
  for (int block = 0; block < end(); ++block) {
    Statement const& last = statements[static_cast<size_t>(begin[static_cast<size_t>(block) + 1]) - 1];
    if (is_branch(last)) connect(block, block_of[static_cast<size_t>(last.target)]);
    if (is_exit(last)) connect(block, end());
    if (!(is_branch(last) || is_exit(last)) || last.guard >= 0) connect(block, block + 1);
  }
}

/// Blocks from which the end can be reached, each after a path to it: postorder of the reversed graph.
std::vector<int> postorder(Graph const& graph) {
  std::vector<int> order, path{graph.end()};
  std::vector<size_t> tried(graph.begin.size(), 0);
  std::vector<bool> seen(graph.begin.size(), false);
  seen[static_cast<size_t>(graph.end())] = true;
  while (!path.empty()) {
    auto const block = static_cast<size_t>(path.back());
    if (tried[block] == graph.predecessors[block].size()) {
      order.push_back(path.back());
      path.pop_back();
    } else if (int const next = graph.predecessors[block][tried[block]++]; !seen[static_cast<size_t>(next)]) {
      seen[static_cast<size_t>(next)] = true;
      path.push_back(next);
    }
  }
  return order;
}

/// The immediate post-dominator of each block, -1 where the end can't be reached. Cooper, Harvey and Kennedy: "A
/// simple, fast dominance algorithm".
std::vector<int> post_dominators(Graph const& graph) {
  std::vector<int> const order = postorder(graph);
  std::vector<int> position(graph.begin.size(), -1), result(graph.begin.size(), -1);
  for (size_t i = 0; i < order.size(); ++i) position[static_cast<size_t>(order[i])] = static_cast<int>(i);
  auto const at = [&](int block) { return position[static_cast<size_t>(block)]; };
  result[static_cast<size_t>(graph.end())] = graph.end();
  for (bool changed = true; changed;) {
    changed = false;
    for (auto block = order.rbegin() + 1; block != order.rend(); ++block) {
      int found = -1;
      for (int other : graph.successors[static_cast<size_t>(*block)]) {
        if (result[static_cast<size_t>(other)] < 0) continue;
        if (found < 0) found = other;
        while (found != other) {
          int& lower = at(found) < at(other) ? found : other;
          lower = result[static_cast<size_t>(lower)];
        }
      }
      changed |= std::exchange(result[static_cast<size_t>(*block)], found) != found;
    }
  }
  return result;
}

}  // namespace

std::vector<uint32_t> find_joins(std::vector<Statement> const& statements) {
  Graph const graph(statements);
  std::vector<int> const dominators = post_dominators(graph);
  std::vector<uint32_t> joins(statements.size(), kNowhere);
  for (int block = 0; block < graph.end(); ++block) {
    auto const last = static_cast<size_t>(graph.begin[static_cast<size_t>(block) + 1]) - 1;
    if (!is_branch(statements[last])) continue;
    int const meets = dominators[static_cast<size_t>(block)];
    joins[last] = static_cast<uint32_t>(graph.begin[static_cast<size_t>(meets < 0 ? graph.end() : meets)]);
  }
  return joins;
}

}  // namespace simulator
