// The Python side of the kernels beside attention.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_fmha {

/// support_kernels, combine, merge_states, append_kv and rotary.
void bind_support(pybind11::module_& module);

}  // namespace cutlass_fmha
