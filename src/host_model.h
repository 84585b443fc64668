// The kernels' arithmetic (softmax recurrence, mask ranges, scheduling, shared-memory layout) run on the host, so that
// tests can check it without a GPU: the submodule _C.host.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_fmha {

void bind_host_model(pybind11::module_& module);

}  // namespace cutlass_fmha
