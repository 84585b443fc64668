// The compile-time description of a row that computes gradients.
#pragma once

#include "../config.h"

namespace cutlass_fmha {

/// How a row of the backward is made. tile_m: queries per step of the main loop; tile_n: keys of a thread block.
struct BackwardOptions {
  int chunk;   ///< queries whose scores a warp holds at a time; of groups, one of the second
  int groups;  ///< of warps that divide the products of the same keys: 1: nothing is divided; 2: S, P, dV and dQ are
               ///< the first's, dP, dS and dK the second's; 3: dQ is the third's
  Features features = Features::ranges;  ///< `scores`: and dQ in a fixed order
  Copy copy = Copy::cp_async_16;         ///< of Q and dO; tma: of tiles all of whose rows are the sequence's
  bool writes_scores = false;            ///< dS goes to memory, of which a row of QueryProductConfig makes dQ
  bool rounded_pairs = false;            ///< of bfloat16, dS is a product of rounded pairs: P and dP - D
  bool whole_dq = false;                 ///< of three groups, dQ is made of whole tiles of dS, of which two have room
  int tail = 0;                          ///< a sequence's last keys, if no more than these, have a walk of their own
                                         ///< in the kernel: a third of a tile takes less than half of its time there
};

struct BackwardConfig : TileConfig, BackwardOptions {
  constexpr Family family() const { return Family::backward; }
  constexpr bool scored() const { return features == Features::scores; }
  constexpr int head_dim_v() const { return head_dim; }
  constexpr int alignment() const { return 16; }
  constexpr int group_warps() const { return warps / groups; }
  /// Each warp of a group owns this many consecutive keys.
  constexpr int keys_per_warp() const { return tile_n / group_warps(); }
  /// Queries that come at once, and are handed over at once, between groups and to dQ.
  constexpr int unit() const { return groups > 1 ? tile_m / 2 : tile_m; }
  /// Warps of a group that divide the columns of the gradient of their keys. A warp of few keys has those of its
  /// neighbour as well, whose P or dS it finds in shared memory: each B fragment feeds twice as many mma.
  constexpr int key_sharers() const {
    bool const whole_panels = head_dim % 128 == 0;  // of half of the columns
    return groups > 1 && keys_per_warp() == 16 && whole_panels && !scored() ? 2 : 1;
  }

  /// Of the walk of the tail.
  constexpr BackwardConfig of_tail() const {
    BackwardConfig found = *this;
    found.tile_n = tail, found.tail = 0;
    return found;
  }

  /// Queries that dQ is made of at once.
  constexpr int dq_rows() const { return whole_dq ? tile_m : unit(); }
  // Their dQ is cut into rectangles, one per warp of a group: 32 queries high, so that a B fragment feeds
  // two mma, where the columns can be divided then.
  constexpr int query_warps() const {
    int along = dq_rows() >= 32 ? dq_rows() / 32 : 1;
    while (head_dim / 16 % (group_warps() / along) != 0) along *= 2;
    return along;
  }
};

/// How a row is made that multiplies dS by K. tile_m: queries of a thread block; tile_n: keys per step.
struct QueryProductConfig : TileConfig {
  int stages;  ///< steps in shared memory

  constexpr Family family() const { return Family::query_product; }
  constexpr int alignment() const { return 16; }
  /// Each warp has 32 queries, and the columns are divided where there are more warps than that.
  constexpr int query_warps() const { return tile_m / 32; }
  constexpr int columns() const { return head_dim / (warps / query_warps()); }
};

}  // namespace cutlass_fmha
