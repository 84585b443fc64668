# Kernels that wait for the parity gate: written and inspected, and not in the default build until `make parity` has
# passed with them. A build with them, and with everything of templates.cmake:
#     pip install . -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake
# A line moves to templates.cmake when the gate has passed and it is the fastest row of some problem.

include("${CMAKE_CURRENT_LIST_DIR}/templates.cmake")

# Two small blocks an SM instead of turns, the tiles that FlashAttention-2 has there: near ours on the emulated GPUs.
#            ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_forward("89;120"  "f16;bf16"  64      128      64     4      1       2      2          true           false     cp_async_16)
fmha_forward("89;120"  "f16;bf16" 128      128      32     4      1       1      2          false          false     cp_async_16)
# Fewer hand-overs, as by TMA.
fmha_forward("89"      "f16;bf16"  64      256      96     8      1       2      1          false          true      cp_async_16)
# One small block an SM: faster by cp.async where two fit (sm_90), not known where one does.
fmha_forward("120"     "f16;bf16" 256       64      64     4      1       1      1          false          false     tma)
