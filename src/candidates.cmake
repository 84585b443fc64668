# Kernels that wait for the parity gate: written and inspected, and not in the default build until `make parity` has
# passed with them. A build with them, and with everything of rows.cmake:
#     pip install . -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake
# A line moves to rows.cmake when the gate has passed and it is the fastest row of some problem.

include("${CMAKE_CURRENT_LIST_DIR}/rows.cmake")

# For few queries, in less than 49 KB, so that two blocks fit an SM of sm_89 and sm_120: those of rows.cmake fill one.
set(FMHA_NAME_SUFFIX "_small")
set(FMHA_GROUP_SUFFIX "_small")
fmha_forward("89"  "f16;bf16" 128 16 16 4 4 2 2 true  false ldg_16)
fmha_forward("89"  "f16;bf16" 128 32 32 4 2 1 2 true  false ldg_16)
fmha_forward("120" "f16;bf16"  32 32 32 4 4 2 2 true  false tma    true)
fmha_forward("120" "f16;bf16"  64 16 32 4 4 1 2 true  false tma    true)
fmha_forward("120" "f16;bf16"  64 32 32 4 4 1 2 true  false tma    true)
fmha_forward("120" "f16;bf16"  64 32 32 4 4 2 2 true  false ldg_16 true)
fmha_forward("120" "f16;bf16"  96 32 32 4 2 1 2 true  false tma    true)
fmha_forward("120" "f16;bf16" 128 16 16 4 4 1 2 true  false tma    true)
fmha_forward("120" "f16;bf16" 128 32 32 4 2 1 2 true  false tma    true)
fmha_scored("89;120" "f16;bf16"  32  32 16 32 4 4 2 2 true)
fmha_scored("89;120" "f16;bf16"  64  64 16 16 4 4 2 2 true)
fmha_scored("89;120" "f16;bf16"  64  64 16 32 4 4 1 2 true)
fmha_scored("89;120" "f16;bf16"  96  96 16 16 4 4 1 2 true)
fmha_scored("89;120" "f16;bf16" 128 128 16 16 4 4 1 2 true)
fmha_scored("89;120" "f16;bf16" 192 128 16 16 4 4 1 2 true)
fmha_scored("89;120" "f16;bf16" 256 256 16 16 2 2 1 2 false)
set(FMHA_NAME_SUFFIX "")
set(FMHA_GROUP_SUFFIX "")
