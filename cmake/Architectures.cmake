# Which architectures are compiled, and nvcc's flags for each.

set(FMHA_SUPPORTED_ARCHITECTURES 89 90 120)

# Reads CMAKE_CUDA_ARCHITECTURES (or the environment's CUDAARCHS, as CMake itself does) into FMHA_ARCHITECTURES, in the
# supported list's order, and takes the variable away from CMake: each kernel library gets flags of its own, because a
# target's CUDA_ARCHITECTURES can say "120f" only in the newest CMake.
function(fmha_set_architectures)
  set(requested "${CMAKE_CUDA_ARCHITECTURES}")
  if(NOT requested)
    set(requested "$ENV{CUDAARCHS}")
  endif()
  if(NOT requested)
    set(requested "${FMHA_SUPPORTED_ARCHITECTURES}")
  endif()
  foreach(arch IN LISTS requested)
    if(NOT arch IN_LIST FMHA_SUPPORTED_ARCHITECTURES)
      list(JOIN FMHA_SUPPORTED_ARCHITECTURES ", " known)
      message(FATAL_ERROR "cutlass_fmha: CMAKE_CUDA_ARCHITECTURES contains \"${arch}\", and there are kernels for ${known} only")
    endif()
  endforeach()
  if(NOT CUTLASS_FMHA_SM120_PROXY MATCHES "^(90)?$")
    message(FATAL_ERROR "cutlass_fmha: CUTLASS_FMHA_SM120_PROXY must be empty or 90, and it is \"${CUTLASS_FMHA_SM120_PROXY}\"")
  endif()

  set(chosen "")
  foreach(arch IN LISTS FMHA_SUPPORTED_ARCHITECTURES)
    if(arch IN_LIST requested)
      list(APPEND chosen ${arch})
    endif()
  endforeach()
  list(JOIN chosen ", " text)
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

# What the rows made for `arch` are compiled for, by nvcc's name. Asked once the manifest was read.
function(fmha_target_of arch out)
  set(target ${arch})
  if(arch IN_LIST FMHA_PROXIED)
    set(target 90)
  elseif(arch EQUAL 120 AND FMHA_NVCC_VERSION VERSION_GREATER_EQUAL 12.9)
    set(target 120f)  # the family: sm_120 and sm_121
  elseif(arch EQUAL 120)
    get_property(has_tma GLOBAL PROPERTY FMHA_HAS_TMA)
    if(has_tma)
      set(target 120a)  # plain sm_120 has none, and CuTe's copies become traps
    endif()
  endif()
  set(${out} ${target} PARENT_SCOPE)
endfunction()

# nvcc's code generation flags for the rows made for `arch`.
function(fmha_code_flags arch out)
  fmha_target_of(${arch} target)
  set(code sm_${target})
  if(target EQUAL 89)
    set(code "[sm_89,compute_89]")  # PTX too: through it a GPU without rows of its own runs these
  endif()
  set(flags -gencode=arch=compute_${target},code=${code})
  if(CUTLASS_FMHA_SIMULATOR)
    fmha_simulated_code_flags(${arch} flags)
  endif()
  set(${out} "${flags}" PARENT_SCOPE)
endfunction()

# Sets FMHA_COMPILED_FOR_CXX: pairs of an architecture and its target.
function(fmha_set_compiled_for)
  set(pairs "")
  foreach(arch IN LISTS FMHA_ARCHITECTURES)
    fmha_target_of(${arch} target)
    list(APPEND pairs "{${arch}, \"${target}\"}")
  endforeach()
  list(JOIN pairs ", " text)
  set(FMHA_COMPILED_FOR_CXX "${text}" PARENT_SCOPE)
endfunction()
