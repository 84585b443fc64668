// The Python side of fallback rows.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_fmha {

/// FallbackTemplate, fallback_templates and run_fallback. After bind_general: a launch reads GeneralParams.
void bind_fallback(pybind11::module_& module);

}  // namespace cutlass_fmha
