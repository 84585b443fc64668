// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>

namespace cutlass_fmha {

/// `sentence` is a function: a launch makes dozens of checks, and must not pay for texts that nobody reads.
template <class Sentence>
void require(bool condition, Sentence const& sentence) {
  if (!condition) throw std::invalid_argument(sentence());
}

/// A build without CUDA has no rows, and says so where it is asked for one.
[[noreturn]] inline void no_cuda() {
  throw std::runtime_error(
      "cutlass_fmha was built without CUDA (CUTLASS_FMHA_CUDA=OFF): it has no kernels; rebuild it with CUDA");
}

/// GeneralParams and run_general.
void bind_general(pybind11::module_& module);

}  // namespace cutlass_fmha
