# Kernels that wait for the parity gate: written and inspected, and not in the default build until `make parity` has
# passed with them. A build with them, and with everything of rows.cmake:
#     pip install . -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake
# A line moves to rows.cmake when the gate has passed and it is the fastest row of some problem.

include("${CMAKE_CURRENT_LIST_DIR}/rows.cmake")

# For few queries, in less than 49 KB, so that two blocks fit an SM of sm_89 and sm_120: those of rows.cmake fill one. On
# an emulated GPU they are ahead for short prompts (docs/performance-log.md); two by TMA went to rows.cmake, twelve were
# not ahead.
set(FMHA_NAME_SUFFIX "_small")
set(FMHA_GROUP_SUFFIX "_small")
fmha_scored("89;120" "f16;bf16"  64  64 16 32 4 4 1 2 true)
fmha_scored("89;120" "f16;bf16" 128 128 16 16 4 4 1 2 true)

set(FMHA_NAME_SUFFIX "")
set(FMHA_GROUP_SUFFIX "")
