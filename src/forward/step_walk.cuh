// A warp's walk over the keys of its rows, step by step, from the last keys to the first: there are no turns, as there
// are in tile_walk.cuh. Where query rows are too few to fill a GPU, the time from launch to result is a chain of
// latencies, and what counts is that the chain is short and starts early: the warps of a group share their query rows
// and divide the keys, and each walks its part alone, without a barrier of the thread block before the parts meet
// (few_query_epilogue.cuh). Scored rows for many queries go this way, too, the warps of a block in step.
//
// `Keys` says where Q, K and V come from, and is told how far the walk is, so that it brings what comes next as soon as
// there is room. It numbers steps as it likes:
//   Held                          operands that stay in registers from step to step
//   kFirstApart                   whether no row has seen a key before the first step, which has code of its own then:
//                                 the others begin with a trial (online_softmax.cuh)
//   start(held)                   the first step, or a negative number for none; Q is there from now on
//   more(step), next(step, held)  whether another one follows; goes on to it
//   sees(step)                    asked before all else of a step, where the first is not apart: whether some row sees
//                                 a key of it
//   multiply(step, held, scores), after_scores<First>(step, held)
//                                 S = Q K^T, once K is there; nobody reads K any more
//   key_begin(step)               the first of its keys
//   before_softmax(key_begin, scores), after_softmax(key_begin, probabilities)
//                                 masks, and whatever else becomes of them
//   before_values<First>(step, held), add_values(step, held, probabilities, output), after_values(step)
//                                 O += P V, once V is there; nobody reads V any more
//   maxima()                      of this warp's rows, for the softmax
#pragma once

#include "../core/mask.cuh"
#include "../core/product.cuh"

namespace cutlass_fmha {

/// before_softmax() where there is a diagonal at most: `row_begin` is the warp's first query row.
template <ForwardConfig C, class Scores>
CUTE_DEVICE void hide_unseen(ForwardParams const& p, int row_begin, int key_begin, Scores& scores) {
  if (key_begin + C.tile_n > visible_keys(p, row_begin))
    apply_mask(p, by_row(scores), score_coordinates<C>(), row_begin, key_begin);
}

/// The state of a warp's rows before they have seen a key, which is what those without a step end with.
template <ForwardConfig C>
CUTE_DEVICE void start_without_keys(RowMaxima const& maxima, typename ForwardTypes<C>::Softmax& softmax) {
  CUTE_UNROLL
  for (int row = 0; row < 2 * ForwardTypes<C>::kRowSteps; ++row) softmax.start(row, -INFINITY, false, maxima);
}

/// Leaves the unnormalised O in `output`, which is zero at first, and its l in `softmax`.
template <ForwardConfig C, class Keys>
CUTE_DEVICE void walk_steps(Keys& keys, typename ForwardTypes<C>::OutputFragment& output,
                            typename ForwardTypes<C>::Softmax& softmax) {
  using T = ForwardTypes<C>;
  typename Keys::Held held;
  auto const take = [&]<bool First>(std::bool_constant<First>, int step) FMHA_INLINE {
    typename T::ScoresFragment scores;
    typename WarpProduct<C>::Probabilities probabilities;
    keys.multiply(step, held, scores);
    keys.template after_scores<First>(step, held);
    int const key_begin = keys.key_begin(step);
    keys.before_softmax(key_begin, scores);
    softmax.template step<First>(by_row(scores), pairs_by_row<T>(probabilities), by_row(output), keys.maxima());
    keys.after_softmax(key_begin, probabilities);
    keys.template before_values<First>(step, held);
    keys.add_values(step, held, probabilities, output);
    keys.after_values(step);
  };
  int step = keys.start(held);
  if constexpr (Keys::kFirstApart) {
    take(std::true_type{}, step);
    CUTE_NO_UNROLL
    while (keys.more(step)) {
      keys.next(step, held);
      take(std::false_type{}, step);
    }
  } else {
    if (step < 0) return;
    CUTE_NO_UNROLL
    while (true) {
      if (keys.sees(step)) take(std::false_type{}, step);
      if (!keys.more(step)) break;
      keys.next(step, held);
    }
  }
}

}  // namespace cutlass_fmha
