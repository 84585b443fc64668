# Rows for float32 and head dims above 256 (src/wide): lines of the manifest become one generated .cu per
# architecture, in a library of its own: most are CUTLASS's example 41, whose headers only they include.

# The example's headers, beside CUTLASS's own in a source tree and in the PyPI package; empty when there are none.
function(fmha_find_example out)
  cmake_path(SET directory NORMALIZE "${FMHA_CUTLASS_INCLUDE}/../examples/41_fused_multi_head_attention")
  if(NOT EXISTS "${directory}/kernel_forward.h")
    set(directory "")
  endif()
  set(${out} "${directory}" PARENT_SCOPE)
endfunction()

# Adds the rows of one manifest line: one for each pair of ARCHS and DTYPES. The columns are WideConfig's fields. Where
# the example's headers are missing, the build has no such row: float32 and head dims above 256 then raise, with that
# reason.
function(fmha_wide ARCHS DTYPES HEAD_DIM TILE_M TILE_N WARPS MIN_BLOCKS MMA)
  fmha_find_example(example)
  if(NOT example)
    return()
  endif()
  set(DTYPE_f16 float16)
  set(DTYPE_bf16 bfloat16)
  set(DTYPE_f32 float32)
  set(head_dim "${HEAD_DIM}")
  if(HEAD_DIM STREQUAL "any")
    set(head_dim "cutlass_fmha::kAnyHeadDim")
  endif()
  foreach(arch IN LISTS ARCHS)
    foreach(dtype IN LISTS DTYPES)
      if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES OR NOT DEFINED DTYPE_${dtype})
        message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for sm_${arch} ${dtype}, which does not exist")
      endif()
      set(name "wide_sm${arch}_${dtype}_d${HEAD_DIM}_m${TILE_M}n${TILE_N}w${WARPS}")
      if(dtype STREQUAL "f32")
        string(APPEND name "_${MMA}")
      endif()
      string(CONCAT config
        "cutlass_fmha::WideConfig{{.arch = ${arch}, .dtype = cutlass_fmha::DType::${DTYPE_${dtype}}, "
        ".head_dim = ${head_dim}, .tile_m = ${TILE_M}, .tile_n = ${TILE_N}, .warps = ${WARPS}, "
        ".min_blocks = ${MIN_BLOCKS}, .mma = cutlass_fmha::MmaKind::${MMA}}}")
      fmha_add_row(wide ${arch} ${dtype} ${HEAD_DIM} "wide_sm${arch}" "${name}" "${config}")
    endforeach()
  endforeach()
endfunction()

# Adds the rows of one manifest line in whose walk TILE rows of queries, or of keys where gradients are computed, meet as
# many of the others at a time. They need no header of the example. `config` is of src/wide or src/backward_wide.
function(fmha_add_wide_rows kind config begin end ARCHS DTYPES HEAD_DIM TILE WARPS MIN_BLOCKS MMA)
  set(DTYPE_f16 float16)
  set(DTYPE_bf16 bfloat16)
  set(DTYPE_f32 float32)
  foreach(arch IN LISTS ARCHS)
    foreach(dtype IN LISTS DTYPES)
      set(name "${begin}_sm${arch}_${dtype}_d${HEAD_DIM}_m${TILE}n${TILE}w${WARPS}${end}")
      string(CONCAT made
        "cutlass_fmha::${config}{{.arch = ${arch}, .dtype = cutlass_fmha::DType::${DTYPE_${dtype}}, "
        ".head_dim = ${HEAD_DIM}, .tile_m = ${TILE}, .tile_n = ${TILE}, .warps = ${WARPS}, "
        ".min_blocks = ${MIN_BLOCKS}, .mma = cutlass_fmha::MmaKind::${MMA}}}")
      fmha_add_row(${kind} ${arch} ${dtype} ${HEAD_DIM} "sm${arch}_${kind}" "${name}" "${made}")
    endforeach()
  endforeach()
endfunction()

# Gradients.
function(fmha_backward_wide ARCHS DTYPES)
  fmha_add_wide_rows(backward_wide WideBackwardConfig widebwd "" "${ARCHS}" "${DTYPES}" ${ARGN})
endfunction()

# For all that a call may say.
function(fmha_wide_scored ARCHS DTYPES)
  fmha_add_wide_rows(wide_scored WideScoredConfig wide _scored "${ARCHS}" "${DTYPES}" ${ARGN})
endfunction()

# Generates the units and links them into `target`.
function(fmha_add_wide target)
  fmha_find_example(example)
  if(NOT example)
    message(WARNING "cutlass_fmha: ${FMHA_CUTLASS_INCLUDE} has no ../examples/41_fused_multi_head_attention, so this build has no kernels for float32 and for head dims above 256; use a whole CUTLASS tree or the PyPI package nvidia-cutlass")
  endif()
  foreach(arch IN LISTS FMHA_ARCHITECTURES)
    get_property(units GLOBAL PROPERTY FMHA_GROUPS_wide_${arch})
    foreach(unit IN LISTS units)
      get_property(rows GLOBAL PROPERTY FMHA_ROWS_${unit})
      fmha_write_unit(wide ${unit} "${rows}")
      fmha_add_kernel_library(fmha_${unit} ${arch} "${PROJECT_BINARY_DIR}/generated/${unit}.cu")
      target_include_directories(fmha_${unit} BEFORE PRIVATE "${PROJECT_SOURCE_DIR}/src/wide/include")
      target_include_directories(fmha_${unit} SYSTEM PRIVATE "${example}")
      target_link_libraries(${target} PRIVATE fmha_${unit})
      list(LENGTH rows count)
      message(STATUS "cutlass_fmha: sm_${arch}: ${count} wide kernels")
    endforeach()
  endforeach()
endfunction()
