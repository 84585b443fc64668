// Launching the kernels beside attention. Each is compiled for every architecture of the build; `arch` is the one whose
// rows the device takes. Nothing is allocated or synchronised; std::invalid_argument and std::runtime_error are thrown.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "../config.h"
#include "../general/params.h"
#include "params.h"

namespace cutlass_fmha {

/// Every kernel of this build that computes no attention.
std::vector<SupportKernel> const& support_kernels();

/// The combination that a launch of a general row with params.splits > 1 needs after it.
CombineParams make_combine(GeneralParams const& params);
inline Element element_of(DType dtype) { return dtype == DType::float16 ? Element::float16 : Element::bfloat16; }

void launch_combine(CombineParams const& params, Element element, int arch, int device, cudaStream_t stream);
void launch_merge_tail(TailParams const& params, Element element, int arch, int device, cudaStream_t stream);
void launch_merge(MergeParams const& params, Element element, int arch, int device, cudaStream_t stream);
void launch_append(AppendParams const& params, Element element, int arch, int device, cudaStream_t stream);
void launch_rotary(RotaryParams const& params, Element element, int arch, int device, cudaStream_t stream);

}  // namespace cutlass_fmha
