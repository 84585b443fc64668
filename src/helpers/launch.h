// Launching the kernels beside attention: of each, what its parameters may not say, and how large its grid is.
#pragma once

#include <string>

#include "../device_guard.h"
#include "../features/params.h"
#include "../require.h"
#include "../table.h"
#include "params.h"

namespace cutlass_fmha {

/// The combination that a launch of a scored row with params.splits > 1 needs after it.
CombineParams make_combine(FeatureParams const& params);

/// What the rows of which family take these parameters.
constexpr Family family_of(CombineParams const&) { return Family::combine; }
constexpr Family family_of(MergeParams const&) { return Family::merge; }
constexpr Family family_of(RotaryParams const&) { return Family::rotary; }
constexpr Family family_of(AppendParams const&) { return Family::append; }

/// Throws std::invalid_argument for a row of another family, and for what check() of the parameters refuses.
template <class Params>
void check(Row const& row, Params const& p) {
  require(row.family() == family_of(p), [&] {
    return std::string(row.name) + " is of family " + name_of(row.family()) + ", and these are parameters of family " +
           name_of(family_of(p));
  });
  check(p);
}

/// Sets what a kernel asks of its grid. `early`: blocks that a GPU has places for at most; others never wait for the
/// kernel ahead.
template <class Params>
void set_places(Params& p, unsigned blocks, int threads, int device) {
  constexpr int kThreadsOfSm = 2048;
  int const sms = gpu_of(device).sms;
  p.early = sms * (kThreadsOfSm / threads);
  p.alone = blocks <= unsigned(sms);
}

/// Launch a kernel on `device`, which is current, and its stream `stream`. Nothing is allocated or synchronised. Throw
/// std::invalid_argument for more rows than a grid takes, and std::runtime_error.
void launch(Row const& row, CombineParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, TailParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, MergeParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, RotaryParams const& params, int device, cudaStream_t stream);
void launch(Row const& row, AppendParams const& params, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
