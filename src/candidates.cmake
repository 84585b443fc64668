# Kernels that wait for the parity gate: written and inspected, and not in the default build until `make parity` has
# passed with them. A build with them, and with everything of templates.cmake:
#     pip install . -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake
# A line moves to templates.cmake when the gate has passed and it is the fastest row of some problem.

include("${CMAKE_CURRENT_LIST_DIR}/templates.cmake")

# By TMA. Compared with an fp64 reference on an H200 by standalone programs (docs/performance-log.md).
set(TMA 90 120)  # the architectures that have it

#            ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_forward("${TMA}"  "f16;bf16"  32      256     128     8      1       2      1          false          true      tma)
fmha_forward("${TMA}"  "f16;bf16"  64      256      96     8      1       2      1          false          true      tma)
fmha_forward("${TMA}"  "f16;bf16"  64      128      64     4      1       2      2          true           false     tma)
fmha_forward("${TMA}"  "f16;bf16"  64       64      64     4      1       2      2          true           false     tma)
fmha_forward("${TMA}"  "f16;bf16"  96      256      64     8      1       2      1          false          true      tma)
fmha_forward("${TMA}"  "f16;bf16" 128      256      64     8      1       1      1          false          true      tma)
fmha_forward("${TMA}"  "f16;bf16" 128       64      32     4      1       2      2          true           false     tma)
fmha_forward("${TMA}"  "f16;bf16" 192      128      64     8      1       1      1          true           true      tma)
fmha_forward("${TMA}"  "f16;bf16" 192       64      48     4      1       2      1          true           false     tma)
fmha_forward("${TMA}"  "f16;bf16" 256      128      32     8      1       1      1          false          true      tma)
fmha_forward("${TMA}"  "f16;bf16" 256       64      64     4      1       1      1          false          false     tma)

# Split rows whose launches overlap: programmatic dependent launch, which sm_90 and later have. Of these, a prototype
# was timed; whether its results were right is not on record.
set(OVERLAP 90 120)

#            ARCHS         DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY    DEPENDENT_LAUNCH
fmha_forward("${OVERLAP}"  "f16;bf16"  64       16      32     4      4       2      1          true           false     ldg_16  true)
fmha_forward("${OVERLAP}"  "f16;bf16"  64       32      32     8      8       2      1          true           false     ldg_16  true)
fmha_forward("${OVERLAP}"  "f16;bf16"  64       32      32     4      4       2      1          true           false     ldg_16  true)

# Split rows whose tiles pass through shared memory (`_staged`): shown to be right in the simulator, never timed.
#            ARCHS         DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY         DEPENDENT_LAUNCH
fmha_forward("89"          "f16;bf16"  64       64      32     8      4       2      1          true           false     cp_async_16)
fmha_forward("89"          "f16;bf16"  64       32      32     8      8       1      1          true           false     cp_async_16)
fmha_forward("${OVERLAP}"  "f16;bf16"  64       64      32     8      4       2      1          true           false     cp_async_16  true)
fmha_forward("${OVERLAP}"  "f16;bf16"  64       32      32     8      8       1      1          true           false     cp_async_16  true)
fmha_forward("${OVERLAP}"  "f16;bf16"  64       32      32     4      4       2      1          true           false     cp_async_16  true)
fmha_forward("${OVERLAP}"  "f16;bf16" 128       32      32     8      4       1      1          true           false     cp_async_16  true)

# Two small blocks an SM instead of turns, the tiles that FlashAttention-2 has there: near ours on the emulated GPUs.
#            ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_forward("89;120"  "f16;bf16"  64      128      64     4      1       2      2          true           false     cp_async_16)
fmha_forward("89;120"  "f16;bf16" 128      128      32     4      1       1      2          false          false     cp_async_16)
# Fewer hand-overs, as by TMA.
fmha_forward("89"      "f16;bf16"  64      256      96     8      1       2      1          false          true      cp_async_16)
