// The scored rows' arithmetic (lengths, masks by ranges, which thread block walks which keys, dropout) on the host,
// for tests: more of the submodule _C.host.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_fmha {

void bind_feature_host_model(pybind11::module_& host);

}  // namespace cutlass_fmha
