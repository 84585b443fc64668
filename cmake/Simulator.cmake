# With CUTLASS_FMHA_SIMULATOR the CUDA runtime that the extension links runs the kernels' PTX on the CPU: tools/simulator,
# docs/simulation.md.

# The library in place of the CUDA runtime.
function(fmha_add_simulator cuda_include)
  set(directory "${PROJECT_SOURCE_DIR}/tools/simulator")
  file(GLOB sources CONFIGURE_DEPENDS "${directory}/*.cpp")
  list(REMOVE_ITEM sources "${directory}/c_api.cpp")
  add_library(fmha_simulator STATIC ${sources})
  target_compile_features(fmha_simulator PUBLIC cxx_std_20)
  target_compile_options(fmha_simulator PRIVATE -Wall -Wextra
    -O3 -march=native            # loops over the lanes of a warp become vector instructions; runs where it was built
    -ffp-contract=off            # a product and a sum that PTX rounds one after the other
    -fno-math-errno -fno-trapping-math
    -fwrapv -fno-strict-aliasing)  # integers overflow, and registers have no type
  target_include_directories(fmha_simulator SYSTEM PUBLIC "${cuda_include}")
  target_link_libraries(fmha_simulator PUBLIC Threads::Threads)
  set_target_properties(fmha_simulator PROPERTIES POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  # For the simulator's own tests, which bring PTX with them.
  add_library(simulator_ptx SHARED EXCLUDE_FROM_ALL "${directory}/c_api.cpp")
  target_link_libraries(simulator_ptx PRIVATE fmha_simulator)
  set_target_properties(simulator_ptx PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# nvcc's flags for the rows compiled for `target`: PTX, as it is, and no machine code.
function(fmha_simulated_code_flags target out)
  set(virtual ${target})
  if(target MATCHES "^120")
    set(virtual 120f)  # what has TMA; nvcc 12.8 knows no family
    if(FMHA_NVCC_VERSION VERSION_LESS 12.9)
      set(virtual 120a)
    endif()
  endif()
  set(${out} -gencode=arch=compute_${virtual},code=compute_${virtual} --no-compress PARENT_SCOPE)
endfunction()
