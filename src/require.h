// How what a caller said is refused.
#pragma once

#include <stdexcept>

namespace cutlass_fmha {

/// `sentence` is a function: a launch makes dozens of checks, and must not pay for texts that nobody reads.
template <class Sentence>
void require(bool condition, Sentence const& sentence) {
  if (!condition) throw std::invalid_argument(sentence());
}

}  // namespace cutlass_fmha
