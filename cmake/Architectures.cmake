# Which architectures are compiled, and nvcc's flags for each.

set(FMHA_SUPPORTED_ARCHITECTURES 89 90 120)
# What sm_89's rows may be compiled for, too: nothing in them is newer than sm_80. A cubin runs on all of 8.x that follow.
set(FMHA_OLDER_TARGETS 80 86)

# Reads CMAKE_CUDA_ARCHITECTURES (or the environment's CUDAARCHS, as CMake itself does) into FMHA_ARCHITECTURES, those
# whose rows are built, in the supported list's order, and FMHA_TARGETS_89, what sm_89's are compiled for, ascending. Takes
# the variable away from CMake: each kernel library gets flags of its own, because a target's CUDA_ARCHITECTURES can say
# "120f" only in the newest CMake.
function(fmha_set_architectures)
  set(requested "${CMAKE_CUDA_ARCHITECTURES}")
  if(NOT requested)
    set(requested "$ENV{CUDAARCHS}")
  endif()
  if(NOT requested)
    set(requested "${FMHA_SUPPORTED_ARCHITECTURES}")
  endif()
  foreach(arch IN LISTS requested)
    if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES AND NOT arch IN_LIST FMHA_OLDER_TARGETS)
      list(JOIN FMHA_SUPPORTED_ARCHITECTURES ", " known)
      list(JOIN FMHA_OLDER_TARGETS ", " older)
      message(FATAL_ERROR "cutlass_fmha: CMAKE_CUDA_ARCHITECTURES contains \"${arch}\", and there are kernels for ${older}, ${known} only")
    endif()
  endforeach()
  if(NOT CUTLASS_FMHA_SM120_PROXY MATCHES "^(90)?$")
    message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_SM120_PROXY must be empty or 90, and it is \"${CUTLASS_FMHA_SM120_PROXY}\"")
  endif()
  if(NOT CUTLASS_FMHA_PTX_AHEAD MATCHES "^(90)?$")
    message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_PTX_AHEAD must be empty or 90, and it is \"${CUTLASS_FMHA_PTX_AHEAD}\"")
  endif()

  set(targets "")
  foreach(target IN LISTS FMHA_OLDER_TARGETS ITEMS 89)
    if(target IN_LIST requested)
      list(APPEND targets ${target})
    endif()
  endforeach()
  set(chosen "")
  foreach(arch IN LISTS FMHA_SUPPORTED_ARCHITECTURES)
    if(arch IN_LIST requested OR (arch EQUAL 89 AND targets))
      list(APPEND chosen ${arch})
    endif()
  endforeach()
  list(JOIN chosen ", " text)
  set(FMHA_TARGETS_89 "${targets}" PARENT_SCOPE)
  set(FMHA_ARCHITECTURES "${chosen}" PARENT_SCOPE)
  set(FMHA_ARCHITECTURES_CXX "${text}" PARENT_SCOPE)
  set(CMAKE_CUDA_ARCHITECTURES OFF PARENT_SCOPE)
endfunction()

# Checks the options of an emulation build; sets FMHA_PROXIED, the architectures whose rows are compiled for sm_90, and
# FMHA_EMULATION_DEFINITIONS, which go to everything that is compiled.
function(fmha_check_emulation)
  set(passes "${CUTLASS_FMHA_MMA_PASSES}")
  if(NOT passes MATCHES "^([1-9][0-9]*)?[13579]$")
    message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_MMA_PASSES must be an odd number from 1 on, and it is \"${passes}\"")
  endif()
  set(proxied "")
  if(CUTLASS_FMHA_EMULATION)
    set(proxied 89 120)
  elseif(passes GREATER 1)
    message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_MMA_PASSES=${passes} makes kernels slow on purpose and needs CUTLASS_FMHA_EMULATION=ON")
  elseif(CUTLASS_FMHA_SM120_PROXY)
    set(proxied 120)
  endif()
  list(JOIN proxied ", " text)
  set(FMHA_PROXIED "${proxied}" PARENT_SCOPE)
  set(FMHA_PROXIED_CXX "${text}" PARENT_SCOPE)
  set(FMHA_EMULATION_DEFINITIONS "CUTLASS_FMHA_EMULATION=$<BOOL:${CUTLASS_FMHA_EMULATION}>"
    "CUTLASS_FMHA_MMA_PASSES=${passes}" PARENT_SCOPE)
endfunction()

# What the rows made for `arch` are compiled for, by nvcc's name: of sm_89 a list. Asked once the manifest was read.
function(fmha_target_of arch out)
  set(target ${arch})
  if(arch EQUAL 90 OR arch IN_LIST FMHA_PROXIED)
    set(target 90a)  # plain sm_90 lets no warp have more registers than another
  elseif(arch EQUAL 89 AND FMHA_TARGETS_89)
    set(target ${FMHA_TARGETS_89})
  elseif(arch EQUAL 120 AND FMHA_NVCC_VERSION VERSION_GREATER_EQUAL 12.9)
    set(target 120f)  # the family: sm_120 and sm_121
  elseif(arch EQUAL 120)
    get_property(has_tma GLOBAL PROPERTY FMHA_HAS_TMA)
    if(has_tma)
      set(target 120a)  # plain sm_120 has none, and CuTe's copies become traps
    endif()
  endif()
  set(${out} "${target}" PARENT_SCOPE)
endfunction()

# nvcc's code generation flags for the rows made for `arch`.
function(fmha_code_flags arch out)
  fmha_target_of(${arch} targets)
  list(GET targets 0 least)
  set(flags "")
  foreach(target IN LISTS targets)
    set(code sm_${target})
    if(arch EQUAL 89 AND target EQUAL least AND NOT arch IN_LIST FMHA_PROXIED)
      set(code "[sm_${target},compute_${target}]")  # PTX too: through it a GPU without code of its own runs these
      if(CUTLASS_FMHA_PTX_AHEAD)
        set(code sm_${CUTLASS_FMHA_PTX_AHEAD})  # what that GPU's driver would make of it
      endif()
    endif()
    list(APPEND flags -gencode=arch=compute_${target},code=${code})
  endforeach()
  if(CUTLASS_FMHA_SIMULATOR)
    fmha_simulated_code_flags(${least} flags)
  endif()
  set(${out} "${flags}" PARENT_SCOPE)
endfunction()

# Sets FMHA_COMPILED_FOR_CXX: pairs of an architecture and its target, or its targets with commas between them; and
# FMHA_PTX_COMPILER, what makes machine code of the PTX of sm_89's rows for a GPU that has none of its own.
function(fmha_set_compiled_for)
  set(pairs "")
  foreach(arch IN LISTS FMHA_ARCHITECTURES)
    fmha_target_of(${arch} target)
    list(JOIN target "," target)
    list(APPEND pairs "{${arch}, \"${target}\"}")
  endforeach()
  set(FMHA_PTX_COMPILER "the driver's compiler" PARENT_SCOPE)
  if(CUTLASS_FMHA_PTX_AHEAD)
    set(FMHA_PTX_COMPILER "ptxas ${FMHA_NVCC_VERSION}" PARENT_SCOPE)
  endif()
  list(JOIN pairs ", " text)
  set(FMHA_COMPILED_FOR_CXX "${text}" PARENT_SCOPE)
endfunction()
