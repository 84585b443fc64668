// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "require.h"

namespace cutlass_fmha {

struct AttentionParams;

/// A build without CUDA has no rows, and says so where it is asked for one.
[[noreturn]] inline void no_cuda() {
  throw std::runtime_error(
      "cutlass_fmha was built without CUDA (CUTLASS_FMHA_CUDA=OFF): it has no kernels; rebuild it with CUDA");
}

/// AttentionParams.
void bind_attention_params(pybind11::module_& module);

/// Writes the address that Python's AttentionParams call so. Throws std::invalid_argument for another name.
using SetAddress = std::function<void(AttentionParams&, uintptr_t)>;
SetAddress set_address(std::string const& name);

/// BackwardParams.
void bind_backward_params(pybind11::module_& module);

/// The parameters of the kernels beside attention.
void bind_helper_params(pybind11::module_& module);
void bind_beside_params(pybind11::module_& module);

/// array_metadata().
void bind_arrays(pybind11::module_& module);

/// xla_handlers() and the launches that they repeat.
void bind_xla(pybind11::module_& module);

/// RopeParams and RopeBackwardParams.
void bind_rope_params(pybind11::module_& module);

}  // namespace cutlass_fmha
