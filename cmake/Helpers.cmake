# The kernels beside attention (src/helpers, src/beside): one generated .cu and one object library per architecture of the build.

# Kind, its parameters, and the element types that it is compiled for.
set(FMHA_HELPER_KERNELS
  "combine CombineParams f16 bf16 f32"
  "merge_tail TailParams f16 bf16"
  "pack_mask PackMaskParams f16 bf16"
  "merge MergeParams f16 bf16 f32"
  "append AppendParams f16 bf16 f32"
  "rotary RotaryParams f16 bf16 f32"
  "rope RopeParams f16 bf16 f32"
  "rope_backward RopeBackwardParams f16 bf16 f32"
  "rope_weights RopeBackwardParams f16 bf16 f32"
  "rms_norm RmsNormParams f16 bf16 f32"
  "rms_norm_backward RmsNormBackwardParams f16 bf16 f32"
  "rms_norm_weights RmsNormBackwardParams f16 bf16 f32"
  "gated GatedParams f16 bf16 f32"
  "gated_backward GatedBackwardParams f16 bf16 f32"
  "backward_before BackwardParams f16 bf16 f32"
  "backward_after BackwardParams f16 bf16 f32"
  "backward_lists BackwardParams f16 bf16")
# Threads of a block, and blocks that registers must leave room for on an SM, where nvcc is told: memory is busy while
# enough bytes are on their way.
set(FMHA_BLOCK_rope 128 6)
set(FMHA_BLOCK_rope_backward 128 4)        # qk_norm_rope.BLOCKS_OF_SM
set(FMHA_BLOCK_120_rope_backward 128 3)    # it spills with less
set(FMHA_BLOCK_rms_norm 512 2)             # RmsNormParams::kMaxThreads
set(FMHA_BLOCK_rms_norm_backward 512 1)    # RmsNormBackwardParams::kThreads
set(FMHA_BLOCK_backward_lists 128 8)       # without it sm_80's and sm_120's spill a register or two
set(FMHA_BLOCK_gated 256)
set(FMHA_BLOCK_gated_backward 256)
# Vectors of 16 bytes that a thread of such kernels asks for ahead, in dynamic shared memory (beside/rows.cuh): those of
# three rows; for more of them a launch takes longer to get going.
set(FMHA_AHEAD_rms_norm_backward 10)
set(FMHA_AHEAD_90_rms_norm_backward 12)
# Kernels that wait by themselves for what is ahead in their stream (core/dependents.cuh), from sm_90 on.
set(FMHA_DEPENDENT combine rope rope_backward rope_weights rms_norm rms_norm_backward rms_norm_weights gated gated_backward
    backward_before backward_lists backward_after)
set(FMHA_ELEMENT_f16 "__half float16")
set(FMHA_ELEMENT_bf16 "__nv_bfloat16 bfloat16")
set(FMHA_ELEMENT_f32 "float float32")

# Writes an architecture's .cu, from src/unit.cu.in, and adds its kernels to the table. A kernel's symbol names its
# architecture: one binary holds all of them.
function(fmha_write_helper_unit arch)
  set(UNIT_HEADERS
    "#include \"beside/rope.cuh\"\n#include \"beside/rope_backward.cuh\"\n#include \"helpers/rotary.cuh\"\n#include \"helpers/combine.cuh\"\n#include \"helpers/merge_tail.cuh\"\n#include \"features/pack_mask.cuh\"\n#include \"backward/rows.cuh\"\n#include \"beside/rms_norm.cuh\"\n#include \"beside/rms_norm_backward.cuh\"\n#include \"beside/gated.cuh\"")
  set(UNIT_KERNELS "")
  foreach(line IN LISTS FMHA_HELPER_KERNELS)
    separate_arguments(types UNIX_COMMAND "${line}")
    list(POP_FRONT types kind params)
    set(dependent_launch false)
    if(kind IN_LIST FMHA_DEPENDENT AND arch GREATER_EQUAL 90)
      set(dependent_launch true)
    endif()
    set(bounds cutlass_fmha::HelperConfig::kThreads)
    if(FMHA_BLOCK_${arch}_${kind})
      set(bounds ${FMHA_BLOCK_${arch}_${kind}})
    elseif(FMHA_BLOCK_${kind})
      set(bounds ${FMHA_BLOCK_${kind}})
    endif()
    list(GET bounds 0 block)
    list(JOIN bounds ", " bounds)
    foreach(type IN LISTS types)
      separate_arguments(element UNIX_COMMAND "${FMHA_ELEMENT_${type}}")
      list(GET element 0 cuda_type)
      list(GET element 1 dtype)
      set(name "${kind}_sm${arch}_${type}")
      string(APPEND UNIT_KERNELS
        "extern \"C\" __global__ void __launch_bounds__(${bounds})\n"
        "    ${name}(__grid_constant__ cutlass_fmha::${params} const params) {\n"
        "  cutlass_fmha::${kind}<${cuda_type}>(params);\n"
        "}\n\n")
      string(CONCAT config
        "cutlass_fmha::HelperConfig{.kind = cutlass_fmha::Family::${kind}, .arch = ${arch}, "
        ".dtype = cutlass_fmha::DType::${dtype}, .dependent_launch = ${dependent_launch}, .block = ${block}}")
      set(smem_bytes 0)
      if(FMHA_AHEAD_${arch}_${kind})
        math(EXPR smem_bytes "16 * ${block} * ${FMHA_AHEAD_${arch}_${kind}}")
      elseif(FMHA_AHEAD_${kind})
        math(EXPR smem_bytes "16 * ${block} * ${FMHA_AHEAD_${kind}}")
      endif()
      fmha_add_to_table("${name}" "${config}" ${smem_bytes})
    endforeach()
  endforeach()
  configure_file("${PROJECT_SOURCE_DIR}/src/unit.cu.in" "${PROJECT_BINARY_DIR}/generated/helpers_sm${arch}.cu" @ONLY)
endfunction()

# Generates the units and links them into `target`.
function(fmha_add_helpers target)
  foreach(arch IN LISTS FMHA_ARCHITECTURES)
    fmha_write_helper_unit(${arch})
    fmha_add_kernel_library(fmha_helpers_sm${arch} ${arch} "${PROJECT_BINARY_DIR}/generated/helpers_sm${arch}.cu")
    target_link_libraries(${target} PRIVATE fmha_helpers_sm${arch})
  endforeach()
endfunction()
