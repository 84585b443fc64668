# Turns the manifest (src/rows.cmake) into generated .cu files, one object library per architecture.
#
# Three steps, so that an error in the manifest is found before anything is written:
#   fmha_forward(...)         one call per manifest line: makes rows and files each under a group "sm<arch>_d<head_dim>"
#                             or, of scored rows, "sm<arch>_scored"; those that the subset `ci` lacks have a "_rest" each
#   fmha_add_kernels(target)  writes each group as a .cu with its kernels
#   fmha_write_table(target)  writes rows.cpp, the table of all kernels in the manifest's order
# Wide.cmake and Helpers.cmake add kernels of their own between the second and the third.

# What a unit of a family's kernels includes, and what is written for a row @NAME@.
set(FMHA_forward_HEADER "forward/kernel.cuh")
set(FMHA_forward_PARAMS "cutlass_fmha::KernelParams<@NAME@_config>")
set(FMHA_features_HEADER "features/kernel.cuh")
set(FMHA_features_PARAMS "cutlass_fmha::FeatureKernelParams<@NAME@_config>")
set(FMHA_backward_HEADER "backward/kernel.cuh")
set(FMHA_backward_PARAMS "cutlass_fmha::BackwardKernelParams<@NAME@_config>")
set(FMHA_query_product_HEADER "backward/query_product.cuh")
set(FMHA_query_product_PARAMS "cutlass_fmha::BackwardParams")
set(FMHA_backward_wide_HEADER "backward_wide/kernel.cuh")
set(FMHA_backward_wide_PARAMS "cutlass_fmha::BackwardParams")
set(FMHA_wide_scored_HEADER "wide/scored.cuh")
set(FMHA_wide_scored_PARAMS "cutlass_fmha::FeatureParams")
set(FMHA_wide_HEADER "wide/kernel.cuh")
set(FMHA_wide_PARAMS "cutlass_fmha::FeatureParams")

# Calls fmha_forward() for each line of src/rows.cmake, or of the manifest that CUTLASS_FMHA_MANIFEST names. Such a
# one may set two variables, which hold for the lines after them: FMHA_NAME_SUFFIX ends the names of their rows, so that
# rows which differ in columns that no name tells can be in one build, and FMHA_GROUP_SUFFIX the names of their files.
macro(fmha_include_manifest)
  set(FMHA_MANIFEST "${PROJECT_SOURCE_DIR}/src/rows.cmake")
  if(CUTLASS_FMHA_MANIFEST)
    get_filename_component(FMHA_MANIFEST "${CUTLASS_FMHA_MANIFEST}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
    if(NOT EXISTS "${FMHA_MANIFEST}")
      message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_MANIFEST is ${FMHA_MANIFEST}, and there is no such file")
    endif()
    message(STATUS "cutlass_fmha: kernels of ${FMHA_MANIFEST}")
  endif()
  include("${FMHA_MANIFEST}")
endmacro()

# Adds the rows of one manifest line: one for each pair of ARCHS and DTYPES. The columns are ForwardConfig's fields; a
# 13th one, DEPENDENT_LAUNCH, may be left out where it is false.
# A warp passes its turn on before the last two n16 of a step (Keys::kPassAt): with one it never would.
function(fmha_check_turns NAME HEAD_DIM TILE_N PING_PONG COPY)
  if(PING_PONG AND COPY STREQUAL "tma" AND HEAD_DIM GREATER_EQUAL 96 AND TILE_N LESS 32)
    message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for ${NAME}, whose turns need a TILE_N of at least 32")
  endif()
endfunction()

function(fmha_forward
    ARCHS DTYPES HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY)
  set(DEPENDENT_LAUNCH false)
  if(ARGC GREATER 12)
    set(DEPENDENT_LAUNCH "${ARGV12}")
  endif()
  if(ARGC GREATER 13 OR NOT DEPENDENT_LAUNCH MATCHES "^(true|false)$")
    message(FATAL_ERROR "cutlass_fmha: a line of src/rows.cmake has too many columns: ${ARGV}")
  endif()
  set(DTYPE_f16 float16)
  set(DTYPE_bf16 bfloat16)
  foreach(arch IN LISTS ARCHS)
    foreach(dtype IN LISTS DTYPES)
      if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES OR NOT DEFINED DTYPE_${dtype})
        message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for sm_${arch} ${dtype}, which does not exist")
      endif()
      set(name "fwd_sm${arch}_${dtype}_d${HEAD_DIM}_m${TILE_M}n${TILE_N}w${WARPS}")
      if(KV_WARPS GREATER 1)
        string(APPEND name "k${KV_WARPS}")
      endif()
      if(COPY MATCHES "^(element|tma)$")
        string(APPEND name "_${COPY}")
      endif()
      if(COPY STREQUAL "tma" AND arch LESS 90)
        message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for ${name}, and sm_${arch} has no TMA")
      endif()
      fmha_check_turns(${name} ${HEAD_DIM} ${TILE_N} ${PING_PONG} ${COPY})
      if(COPY STREQUAL "tma" AND arch IN_LIST FMHA_ARCHITECTURES)
        set_property(GLOBAL PROPERTY FMHA_HAS_TMA ON)
      endif()
      if(DEPENDENT_LAUNCH)
        string(APPEND name "_pdl")
        if(arch LESS 90 OR KV_WARPS EQUAL 1)
          message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for ${name}; only few-query rows from sm_90 on overlap")
        endif()
      endif()
      string(APPEND name "${FMHA_NAME_SUFFIX}")
      set(config
          "cutlass_fmha::ForwardConfig{{.arch = ${arch}, .dtype = cutlass_fmha::DType::${DTYPE_${dtype}},"
          ".head_dim = ${HEAD_DIM}, .tile_m = ${TILE_M}, .tile_n = ${TILE_N}, .warps = ${WARPS},"
          ".min_blocks = ${MIN_BLOCKS}, .dependent_launch = ${DEPENDENT_LAUNCH}},"
          "{.kv_warps = ${KV_WARPS}, .stages = ${STAGES}, .q_in_registers = ${Q_IN_REGISTERS},"
          ".ping_pong = ${PING_PONG}, .copy = cutlass_fmha::Copy::${COPY}}}")
      list(JOIN config " " config)
      fmha_add_row(forward ${arch} ${dtype} ${HEAD_DIM} "sm${arch}_d${HEAD_DIM}" "${name}" "${config}")
    endforeach()
  endforeach()
endfunction()

# Adds the scored rows of one manifest line: the columns as above, VALUE_DIM being the head dimension of V and O. TILE_N
# is that of a warp: a step of the main loop takes TILE_N * KV_WARPS keys.
function(fmha_scored
    ARCHS DTYPES HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS)
  fmha_add_features(scores scored "${ARCHS}" "${DTYPES}" ${HEAD_DIM} ${VALUE_DIM} ${TILE_M} ${TILE_N} ${WARPS}
    ${KV_WARPS} ${STAGES} ${MIN_BLOCKS} ${Q_IN_REGISTERS} false cp_async_16 ${ARGN})
endfunction()

# Adds the ranged rows of one manifest line.
function(fmha_ranged
    ARCHS DTYPES HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY)
  fmha_add_features(ranges ranged "${ARCHS}" "${DTYPES}" ${HEAD_DIM} ${VALUE_DIM} ${TILE_M} ${TILE_N} ${WARPS}
    1 ${STAGES} ${MIN_BLOCKS} ${Q_IN_REGISTERS} ${PING_PONG} ${COPY} ${ARGN})
endfunction()

# Adds the score-mod rows of one manifest line.
function(fmha_score_mod
    ARCHS DTYPES HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY)
  fmha_add_features(score_mods score_mod "${ARCHS}" "${DTYPES}" ${HEAD_DIM} ${VALUE_DIM} ${TILE_M} ${TILE_N} ${WARPS}
    1 ${STAGES} ${MIN_BLOCKS} ${Q_IN_REGISTERS} ${PING_PONG} ${COPY} ${ARGN})
endfunction()

# Adds the masked rows of one manifest line.
function(fmha_masked
    ARCHS DTYPES HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY)
  fmha_add_features(masks masked "${ARCHS}" "${DTYPES}" ${HEAD_DIM} ${VALUE_DIM} ${TILE_M} ${TILE_N} ${WARPS}
    1 ${STAGES} ${MIN_BLOCKS} ${Q_IN_REGISTERS} ${PING_PONG} ${COPY} ${ARGN})
endfunction()

function(fmha_add_features FEATURES SUFFIX
    ARCHS DTYPES HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY)
  if(ARGC GREATER 15)
    message(FATAL_ERROR "cutlass_fmha: a line of src/rows.cmake has too many columns: ${ARGV}")
  endif()
  set(dims "d${HEAD_DIM}")
  if(NOT HEAD_DIM EQUAL VALUE_DIM)
    string(APPEND dims "v${VALUE_DIM}")
  endif()
  set(shared "")
  if(KV_WARPS GREATER 1)
    set(shared "k${KV_WARPS}")
  endif()
  set(copied "")
  if(COPY STREQUAL "tma")
    set(copied "_tma")
  endif()
  set(DTYPE_f16 float16)
  set(DTYPE_bf16 bfloat16)
  foreach(arch IN LISTS ARCHS)
    foreach(dtype IN LISTS DTYPES)
      if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES OR NOT DEFINED DTYPE_${dtype})
        message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for sm_${arch} ${dtype}, which does not exist")
      endif()
      set(name
          "fwd_sm${arch}_${dtype}_${dims}_m${TILE_M}n${TILE_N}w${WARPS}${shared}${copied}_${SUFFIX}${FMHA_NAME_SUFFIX}")
      fmha_check_turns(${name} ${HEAD_DIM} ${TILE_N} ${PING_PONG} "${COPY}")
      set(dependent_launch false)
      if(KV_WARPS GREATER 1 AND arch GREATER_EQUAL 90)
        set(dependent_launch true)  # where the GPU can: decoding is many short launches
      endif()
      set(config
          "cutlass_fmha::ForwardConfig{{.arch = ${arch}, .dtype = cutlass_fmha::DType::${DTYPE_${dtype}},"
          ".head_dim = ${HEAD_DIM}, .tile_m = ${TILE_M}, .tile_n = ${TILE_N}, .warps = ${WARPS},"
          ".min_blocks = ${MIN_BLOCKS}, .dependent_launch = ${dependent_launch}},"
          "{.kv_warps = ${KV_WARPS}, .stages = ${STAGES}, .q_in_registers = ${Q_IN_REGISTERS},"
          ".ping_pong = ${PING_PONG}, .copy = cutlass_fmha::Copy::${COPY},"
          ".features = cutlass_fmha::Features::${FEATURES}, .value_dim = ${VALUE_DIM}}}")
      list(JOIN config " " config)
      fmha_add_row(features ${arch} ${dtype} ${HEAD_DIM} "sm${arch}_${SUFFIX}" "${name}" "${config}")
    endforeach()
  endforeach()
endfunction()

# Whether a kernel's launches can start beside the kernel ahead (core/dependent_launch.cuh).
function(fmha_overlaps ARCH RESULT)
  set(can false)
  if(ARCH GREATER_EQUAL 90)
    set(can true)
  endif()
  set(${RESULT} ${can} PARENT_SCOPE)
endfunction()

# Adds the rows of one manifest line that compute gradients, which are several launches in a row: the columns are BackwardConfig's fields; the last
# four, WRITES_SCORES, ROUNDED_PAIRS, WHOLE_DQ and TAIL, may be left out where they are false, or 0.
function(fmha_backward ARCHS DTYPES HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY)
  set(defaults false false false 0)
  math(EXPR given "${ARGC} - 10")
  if(given LESS 4)
    list(SUBLIST defaults ${given} -1 rest)
    list(APPEND ARGN ${rest})
  endif()
  list(GET ARGN 0 WRITES_SCORES)
  list(GET ARGN 1 ROUNDED_PAIRS)
  list(GET ARGN 2 WHOLE_DQ)
  list(GET ARGN 3 TAIL)
  if(given GREATER 4 OR NOT GROUPS MATCHES "^[123]$" OR NOT FEATURES MATCHES "^(ranges|scores)$" OR
     NOT COPY MATCHES "^(cp_async_16|tma)$" OR
     NOT "${WRITES_SCORES},${ROUNDED_PAIRS},${WHOLE_DQ},${TAIL}" MATCHES
     "^(true|false),(true|false),(true|false),[0-9]+$")
    message(FATAL_ERROR "cutlass_fmha: a line of src/rows.cmake has too many columns: ${ARGV}")
  endif()
  set(DTYPE_f16 float16)
  set(DTYPE_bf16 bfloat16)
  foreach(arch IN LISTS ARCHS)
    foreach(dtype IN LISTS DTYPES)
      if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES OR NOT DEFINED DTYPE_${dtype})
        message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for sm_${arch} ${dtype}, which does not exist")
      endif()
      fmha_overlaps(${arch} dependent_launch)
      set(name "bwd_sm${arch}_${dtype}_d${HEAD_DIM}_m${TILE_M}n${TILE_N}w${WARPS}")
      if(GROUPS GREATER 1)
        string(APPEND name "_groups")
      endif()
      if(COPY STREQUAL "tma")
        string(APPEND name "_tma")
      endif()
      if(FEATURES STREQUAL "scores")
        string(APPEND name "_scored")
      endif()
      if(WRITES_SCORES)
        string(APPEND name "_ds")
      endif()
      string(APPEND name "${FMHA_NAME_SUFFIX}")
      set(config
          "cutlass_fmha::BackwardConfig{{.arch = ${arch}, .dtype = cutlass_fmha::DType::${DTYPE_${dtype}},"
          ".head_dim = ${HEAD_DIM}, .tile_m = ${TILE_M}, .tile_n = ${TILE_N}, .warps = ${WARPS}, .min_blocks = 1,"
          ".dependent_launch = ${dependent_launch}},"
          "{.chunk = ${CHUNK}, .groups = ${GROUPS}, .features = cutlass_fmha::Features::${FEATURES},"
          ".copy = cutlass_fmha::Copy::${COPY}, .writes_scores = ${WRITES_SCORES},"
          ".rounded_pairs = ${ROUNDED_PAIRS}, .whole_dq = ${WHOLE_DQ}, .tail = ${TAIL}}}")
      list(JOIN config " " config)
      fmha_add_row(backward ${arch} ${dtype} ${HEAD_DIM} "sm${arch}_backward" "${name}" "${config}")
    endforeach()
  endforeach()
endfunction()

# Adds the rows of one manifest line that make dQ of what rows with WRITES_SCORES wrote: the columns are
# QueryProductConfig's fields.
function(fmha_query_product ARCHS DTYPES HEAD_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS)
  if(ARGC GREATER 8)
    message(FATAL_ERROR "cutlass_fmha: a line of src/rows.cmake has too many columns: ${ARGV}")
  endif()
  set(DTYPE_f16 float16)
  set(DTYPE_bf16 bfloat16)
  foreach(arch IN LISTS ARCHS)
    foreach(dtype IN LISTS DTYPES)
      if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES OR NOT DEFINED DTYPE_${dtype})
        message(FATAL_ERROR "cutlass_fmha: src/rows.cmake asks for sm_${arch} ${dtype}, which does not exist")
      endif()
      fmha_overlaps(${arch} dependent_launch)
      set(name "bwd_sm${arch}_${dtype}_d${HEAD_DIM}_m${TILE_M}n${TILE_N}w${WARPS}_dq${FMHA_NAME_SUFFIX}")
      set(config
          "cutlass_fmha::QueryProductConfig{{.arch = ${arch}, .dtype = cutlass_fmha::DType::${DTYPE_${dtype}},"
          ".head_dim = ${HEAD_DIM}, .tile_m = ${TILE_M}, .tile_n = ${TILE_N}, .warps = ${WARPS},"
          ".min_blocks = ${MIN_BLOCKS}, .dependent_launch = ${dependent_launch}}, ${STAGES}}")
      list(JOIN config " " config)
      fmha_add_row(query_product ${arch} ${dtype} ${HEAD_DIM} "sm${arch}_query_product" "${name}" "${config}")
    endforeach()
  endforeach()
endfunction()

function(fmha_check_subset)
  if(NOT CUTLASS_FMHA_SUBSET MATCHES "^(ci)?$")
    message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_SUBSET must be empty or ci, and it is \"${CUTLASS_FMHA_SUBSET}\"")
  endif()
endfunction()

# Whether the subset `ci` (CUTLASS_FMHA_SUBSET), which `make test` compiles, has a row: each line of the manifest, and so
# each family, tile and architecture, in the types other than float16, and float16 for one head dimension (of wide rows:
# any). Its rows are in files of their own: what `make test` has compiled is not compiled again by `make build`.
function(fmha_is_in_subset dtype head_dim out)
  set(${out} ON PARENT_SCOPE)
  if(dtype STREQUAL "f16" AND NOT head_dim MATCHES "^(64|any)$")
    set(${out} OFF PARENT_SCOPE)
  endif()
endfunction()

# Files a row under its group and in the table. A name is also the kernel's symbol and the key of every tool: two are an
# error. `kind`: forward, features, backward, backward_wide, wide or wide_scored, the function that the kernel calls.
function(fmha_add_row kind arch dtype head_dim group name config)
  get_property(names GLOBAL PROPERTY FMHA_ROW_NAMES)
  if(name IN_LIST names)
    message(FATAL_ERROR "cutlass_fmha: src/rows.cmake makes two rows named ${name}")
  endif()
  set_property(GLOBAL APPEND PROPERTY FMHA_ROW_NAMES "${name}")
  fmha_is_in_subset(${dtype} ${head_dim} in_subset)
  set_property(GLOBAL PROPERTY FMHA_IN_SUBSET_${name} ${in_subset})
  if(NOT arch IN_LIST FMHA_ARCHITECTURES OR (CUTLASS_FMHA_SUBSET AND NOT in_subset))
    return()
  endif()
  if(NOT in_subset)
    string(APPEND group "_rest")
  endif()
  string(APPEND group "${FMHA_GROUP_SUFFIX}")
  if(CUTLASS_FMHA_ROWS AND NOT name MATCHES "${CUTLASS_FMHA_ROWS}")
    return()
  endif()
  set_property(GLOBAL PROPERTY FMHA_CONFIG_${name} "${config}")
  set_property(GLOBAL APPEND PROPERTY FMHA_ROWS_${group} "${name}")
  get_property(groups GLOBAL PROPERTY FMHA_GROUPS_${kind}_${arch})
  if(NOT group IN_LIST groups)
    set_property(GLOBAL APPEND PROPERTY FMHA_GROUPS_${kind}_${arch} "${group}")
  endif()
  fmha_add_to_table("${name}" "${config}" "${name}_smem_bytes")
endfunction()

# Appends a kernel to the table: how its configuration is written, and the dynamic shared memory of a launch.
function(fmha_add_to_table name config smem_bytes)
  set_property(GLOBAL APPEND_STRING PROPERTY FMHA_TABLE_DECLARATIONS "void ${name}();\n")
  if(smem_bytes STREQUAL "${name}_smem_bytes")
    set_property(GLOBAL APPEND_STRING PROPERTY FMHA_TABLE_DECLARATIONS "extern int const ${smem_bytes};\n")
  endif()
  set_property(GLOBAL APPEND_STRING PROPERTY FMHA_TABLE
    "      {\"${name}\",\n       ${config},\n       ${smem_bytes}, reinterpret_cast<void const*>(&${name})},\n")
endfunction()

# Writes one .cu with the kernels `rows`, from src/unit.cu.in.
function(fmha_write_unit kind unit rows)
  set(UNIT_HEADERS "#include \"${FMHA_${kind}_HEADER}\"")
  set(UNIT_KERNELS "")
  foreach(NAME IN LISTS rows)
    get_property(config GLOBAL PROPERTY FMHA_CONFIG_${NAME})
    string(CONFIGURE "${FMHA_${kind}_PARAMS}" params @ONLY)
    string(APPEND UNIT_KERNELS
      "constexpr auto ${NAME}_config =\n    ${config};\n"
      "extern \"C\" {\n"
      "extern int const ${NAME}_smem_bytes;\n"
      "int const ${NAME}_smem_bytes = cutlass_fmha::${kind}_smem_bytes<${NAME}_config>();\n"
      "__global__ void __launch_bounds__(${NAME}_config.threads(), ${NAME}_config.min_blocks)\n"
      "    ${NAME}(__grid_constant__ ${params} const params) {\n"
      "  cutlass_fmha::${kind}<${NAME}_config>(params);\n"
      "}\n"
      "}\n\n")
  endforeach()
  configure_file("${PROJECT_SOURCE_DIR}/src/unit.cu.in" "${PROJECT_BINARY_DIR}/generated/${unit}.cu" @ONLY)
endfunction()

# Writes rows.cpp, all_rows() of src/table.h: kernels are compiled without the table, which may change without them.
function(fmha_write_table target)
  get_property(declarations GLOBAL PROPERTY FMHA_TABLE_DECLARATIONS)
  get_property(rows GLOBAL PROPERTY FMHA_TABLE)
  file(CONFIGURE OUTPUT generated/rows.cpp @ONLY CONTENT
"// Generated by CMake from src/rows.cmake: every kernel of this build, in the manifest's order. Do not edit.
#include \"table.h\"

extern \"C\" {  // a kernel's symbol is what cudaLaunchKernel() knows it by: whatever it takes
@declarations@}

namespace cutlass_fmha {

std::vector<Row> all_rows() {
  return {
@rows@  };
}

}  // namespace cutlass_fmha
")
  target_sources(${target} PRIVATE "${PROJECT_BINARY_DIR}/generated/rows.cpp")
endfunction()

# The object library of one architecture.
function(fmha_add_kernel_library library arch sources)
  add_library(${library} OBJECT ${sources})
  fmha_code_flags(${arch} code_flags)
  separate_arguments(extra_flags UNIX_COMMAND "${CUTLASS_FMHA_CUDA_FLAGS}")
  if(FMHA_NVCC_VERSION VERSION_GREATER_EQUAL 12.9)
    list(PREPEND extra_flags --compress-mode=size)  # half the bytes of machine code and PTX
  endif()
  target_compile_features(${library} PRIVATE cuda_std_20)
  target_compile_options(${library} PRIVATE
    ${code_flags} --expt-relaxed-constexpr ${FMHA_HOST_FLAGS} "$<$<BOOL:${CUTLASS_FMHA_PTXAS_VERBOSE}>:-Xptxas=-v>" ${extra_flags})
  target_compile_definitions(${library} PRIVATE ${FMHA_EMULATION_DEFINITIONS})
  target_include_directories(${library} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_include_directories(${library} SYSTEM PRIVATE "${FMHA_CUTLASS_INCLUDE}")
  set_target_properties(${library} PROPERTIES
    CUDA_ARCHITECTURES OFF  # code_flags say it
    CUDA_EXTENSIONS OFF
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    JOB_POOL_COMPILE fmha_nvcc)
endfunction()

# Generates the sources of every row and links them into `target`.
function(fmha_add_kernels target)
  foreach(arch IN LISTS FMHA_ARCHITECTURES)
    set(sources "")
    set(count 0)
    foreach(kind forward features backward query_product backward_wide wide_scored)
      get_property(groups GLOBAL PROPERTY FMHA_GROUPS_${kind}_${arch})
      foreach(group IN LISTS groups)
        get_property(rows GLOBAL PROPERTY FMHA_ROWS_${group})
        list(LENGTH rows length)
        math(EXPR count "${count} + ${length}")
        math(EXPR last "(${length} - 1) / ${CUTLASS_FMHA_ROWS_PER_FILE}")
        foreach(part RANGE ${last})
          math(EXPR begin "${part} * ${CUTLASS_FMHA_ROWS_PER_FILE}")
          list(SUBLIST rows ${begin} ${CUTLASS_FMHA_ROWS_PER_FILE} unit_rows)
          set(unit "${group}_${part}")
          fmha_write_unit(${kind} ${unit} "${unit_rows}")
          list(APPEND sources "${PROJECT_BINARY_DIR}/generated/${unit}.cu")
        endforeach()
      endforeach()
    endforeach()
    if(sources)
      fmha_add_kernel_library(fmha_sm${arch} ${arch} "${sources}")
      target_link_libraries(${target} PRIVATE fmha_sm${arch})
    endif()
    list(LENGTH sources files)
    message(STATUS "cutlass_fmha: sm_${arch}: ${count} kernels in ${files} files")
  endforeach()
  fmha_limit_jobs()
endfunction()

# Caps parallel nvcc jobs: one takes up to 4 GB.
function(fmha_limit_jobs)
  set(jobs "${CUTLASS_FMHA_JOBS}")
  if(NOT jobs)
    fmha_probe(jobs jobs)
  endif()
  set_property(GLOBAL PROPERTY JOB_POOLS fmha_nvcc=${jobs})
  message(STATUS "cutlass_fmha: nvcc jobs at a time: ${jobs} (one per core, 4 GB each)")
endfunction()
