# Prints the rows of the manifest without compiling any: a name each, and ON where the subset `ci` has it, else OFF.
#     cmake [-D CUTLASS_FMHA_MANIFEST=FILE] -P cmake/list_rows.cmake
cmake_minimum_required(VERSION 3.26...4.2)
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH PROJECT_SOURCE_DIR)
include("${CMAKE_CURRENT_LIST_DIR}/Architectures.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/Instances.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/Wide.cmake")
set(FMHA_ARCHITECTURES ${FMHA_SUPPORTED_ARCHITECTURES})
function(fmha_find_example out)
  set(${out} "any" PARENT_SCOPE)  # whether its headers are there is a question of a build
endfunction()
fmha_include_manifest()
get_property(names GLOBAL PROPERTY FMHA_ROW_NAMES)
set(text "")
foreach(name IN LISTS names)
  get_property(in_subset GLOBAL PROPERTY FMHA_IN_SUBSET_${name})
  string(APPEND text "${name} ${in_subset}\n")
endforeach()
execute_process(COMMAND "${CMAKE_COMMAND}" -E echo_append "${text}")
