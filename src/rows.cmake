# THE MANIFEST: every kernel of the build, one line per tile. ARCH and DTYPE are lists: a line makes one row for each
# pair, all from the same source and the same configuration. See config.h for what a column means.
#
# A row's name is made from its line: fwd_sm<arch>_<f16|bf16>_d<head_dim>_m<tile_m>n<tile_n>w<warps>[k<kv_warps>][_element|_tma][_pdl|_ranged|_scored],
# or bwd_sm...w<warps>[_groups][_tma][_scored][_ds], bwd_sm...w<warps>_dq, or widebwd_sm...w<warps>.
# Selection, tests and tools read the compiled table (_C.rows()): no other file lists kernels.

# Copies by TMA and overlapping launches (`_pdl`) begin with sm_90. There, rows by cp.async are left out that were slower
# than one by TMA everywhere, except for the largest tile of head dim 64, with which to compare; that of 128 spills there.
set(ALL 89 90 120)
set(TMA 90 120)

#            ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_forward("89"      "f16;bf16"  32      256     128     8      1       1      1          false          true      cp_async_16)
fmha_forward("120"     "f16;bf16"  32      256     128     8      1       2      1          false          true      tma)
fmha_forward("90"      "f16;bf16"  32      128     128     4      1       2      2          false          false     tma)
fmha_forward("${ALL}"  "f16;bf16"  32       64      64     4      1       2      2          true           false     cp_async_16)
fmha_forward("${ALL}"  "f16;bf16"  32       64      64     4      1       2      2          true           false     element)
fmha_forward("${ALL}"  "f16;bf16"  64      256      64     8      1       2      1          false          true      cp_async_16)
fmha_forward("120"     "f16;bf16"  64      256      64     8      1       2      1          true           true      tma)
fmha_forward("90"      "f16;bf16"  64      256      96     8      1       2      1          false          true      tma)
fmha_forward("89"      "f16;bf16"  64      128      64     4      1       2      2          false          false     cp_async_16)
fmha_forward("${TMA}"  "f16;bf16"  64      128      64     4      1       2      2          true           false     tma)
fmha_forward("89"      "f16;bf16"  64       64      64     4      1       2      2          true           false     cp_async_16)
fmha_forward("${TMA}"  "f16;bf16"  64       64      64     4      1       2      2          true           false     tma)
fmha_forward("${ALL}"  "f16;bf16"  64       64      64     4      1       2      2          true           false     element)
fmha_forward("89"      "f16;bf16"  96      256      64     8      1       2      1          false          true      cp_async_16)
fmha_forward("${TMA}"  "f16;bf16"  96      256      64     8      1       2      1          false          true      tma)
fmha_forward("90"      "f16;bf16"  96      128      64     4      1       2      1          false          false     tma)
fmha_forward("${ALL}"  "f16;bf16"  96       64      32     4      1       2      2          true           false     cp_async_16)
fmha_forward("${ALL}"  "f16;bf16"  96       64      32     4      1       2      2          true           false     element)
fmha_forward("89;120"  "f16;bf16" 128      256      64     8      1       1      1          false          true      cp_async_16)
fmha_forward("${TMA}"  "f16;bf16" 128      256      64     8      1       1      1          false          true      tma)
fmha_forward("90"      "f16;bf16" 128      128      48     4      1       2      1          false          false     tma)
fmha_forward("89"      "f16;bf16" 128       64      64     4      1       1      2          true           false     cp_async_16)
fmha_forward("90"      "f16;bf16" 128       64      32     4      1       2      2          true           false     tma)
fmha_forward("120"     "f16;bf16" 128       64      64     4      1       1      2          true           false     tma)
fmha_forward("${ALL}"  "f16;bf16" 128       64      32     4      1       2      2          true           false     element)
fmha_forward("89"      "f16;bf16" 192      128      64     8      1       1      1          false          true      cp_async_16)
fmha_forward("${TMA}"  "f16;bf16" 192      128      64     8      1       1      1          true           true      tma)
fmha_forward("89"      "f16;bf16" 192       64      32     4      1       2      1          true           false     cp_async_16)
fmha_forward("${TMA}"  "f16;bf16" 192       64      48     4      1       2      1          true           false     tma)
fmha_forward("${ALL}"  "f16;bf16" 192       64      32     4      1       2      1          true           false     element)
fmha_forward("89"      "f16;bf16" 256      128      32     8      1       1      1          false          true      cp_async_16)
fmha_forward("120"     "f16;bf16" 256      128      32     8      1       1      1          false          true      tma)
fmha_forward("${ALL}"  "f16;bf16" 256       64      64     4      1       1      1          false          false     cp_async_16)
fmha_forward("89"      "f16;bf16" 256       64      32     4      1       1      1          false          false     element)
fmha_forward("90"      "f16;bf16" 256       64      16     4      1       1      1          false          false     element)
fmha_forward("120"     "f16;bf16" 256       64      32     4      1       2      1          false          false     element)

# For problems with too few query rows to fill the GPU: the warps of a block share the keys of a few query rows.
#            ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY    DEPENDENT_LAUNCH
fmha_forward("89"      "f16;bf16"  32       32      64     8      8       2      1          true           false     ldg_16)
fmha_forward("${TMA}"  "f16;bf16"  32       32      64     8      8       2      1          true           false     ldg_16  true)
fmha_forward("${TMA}"  "f16;bf16"  32       32      64     4      4       2      1          true           false     tma     true)
fmha_forward("89"      "f16;bf16"  64       16      32     4      4       2      1          true           false     ldg_16)
fmha_forward("${TMA}"  "f16;bf16"  64       16      64     4      4       1      1          true           false     tma     true)
fmha_forward("89"      "f16;bf16"  64       32      32     8      8       2      1          true           false     ldg_16)
fmha_forward("${TMA}"  "f16;bf16"  64       32      32     8      8       2      1          true           false     ldg_16  true)
fmha_forward("89"      "f16;bf16"  64       32      32     4      4       2      1          true           false     ldg_16)
fmha_forward("${TMA}"  "f16;bf16"  64       32      64     4      4       1      1          true           false     tma     true)
fmha_forward("120"     "f16;bf16"  64       16      32     4      4       1      2          true           false     tma     true)
fmha_forward("120"     "f16;bf16"  64       32      32     4      4       1      2          true           false     tma     true)
fmha_forward("${TMA}"  "f16;bf16"  96       32      32     4      4       1      1          true           false     tma     true)
fmha_forward("89"      "f16;bf16" 128       16      16     8      8       2      1          true           false     ldg_16)
fmha_forward("${TMA}"  "f16;bf16" 128       16      32     4      4       1      1          true           false     tma     true)
fmha_forward("89"      "f16;bf16" 128       32      32     8      4       1      1          true           false     ldg_16)
fmha_forward("${TMA}"  "f16;bf16" 128       32      32     4      4       1      1          false          false     tma     true)

# For every range of keys (features/params.h): packed documents, lengths, windows, pages, any smaller head dimension that is
# a multiple of 8. Many queries, and nothing becomes of their scores.
#            ARCHS     DTYPES     HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_ranged("89"      "f16;bf16"  32       32       256     64     8     2      1          false          true  cp_async_16)
fmha_ranged("${TMA}"  "f16;bf16"  32       32       256     64     8     2      1          false          true  tma)
fmha_ranged("89"      "f16;bf16"  64       64       256     64     8     2      1          false          true  cp_async_16)
fmha_ranged("${TMA}"  "f16;bf16"  64       64       256     64     8     2      1          false          true  tma)
fmha_ranged("90"      "f16;bf16"  64       64       256     96     8     2      1          false          true  tma)
fmha_ranged("90"      "f16;bf16"  64       64       128     64     8     2      2          true           false tma)
fmha_ranged("89"      "f16;bf16"  64       64       128     64     4     2      2          false          false cp_async_16)
fmha_ranged("120"     "f16;bf16"  64       64       128     64     4     2      2          false          false tma)
fmha_ranged("89"      "f16;bf16"  64       64        64     64     4     2      2          true           false cp_async_16)
fmha_ranged("120"     "f16;bf16"  64       64        64     64     4     2      2          true           false tma)
fmha_ranged("89"      "f16;bf16"  96       96       256     64     8     1      1          false          true  cp_async_16)
fmha_ranged("${TMA}"  "f16;bf16"  96       96       256     64     8     2      1          false          true  tma)
fmha_ranged("89;120"  "f16;bf16" 128      128       256     64     8     1      1          false          true  cp_async_16)
fmha_ranged("90"      "f16;bf16" 128      128       256     64     8     1      1          false          true  tma)
fmha_ranged("90"      "f16;bf16" 128      128       128     48     4     2      2          false          false tma)
fmha_ranged("90"      "f16;bf16" 128      128       128     32     8     2      2          false          false tma)
fmha_ranged("90"      "f16;bf16" 128      128        64     32     2     2      4          false          false tma)
fmha_ranged("89"      "f16;bf16" 128      128        64     64     4     1      2          true           false cp_async_16)
fmha_ranged("120"     "f16;bf16" 128      128        64     64     4     1      2          true           false tma)
fmha_ranged("89"      "f16;bf16" 192      128       128     64     8     1      1          false          true  cp_async_16)
fmha_ranged("90"      "f16;bf16" 192      128       128     32     4     2      2          false          false tma)
fmha_ranged("120"     "f16;bf16" 192      128       128     64     8     1      1          false          true  tma)
fmha_ranged("89"      "f16;bf16" 256      256       128     32     8     1      1          false          true  cp_async_16)
fmha_ranged("${TMA}"  "f16;bf16" 256      256       128     32     8     1      1          false          true  tma)

# The same where scores are capped, get ALiBi's distances, or are dropped.
#              ARCHS     DTYPES     HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_score_mod("89"      "f16;bf16"  32       32       256     64     8     2      1          false          true  cp_async_16)
fmha_score_mod("${TMA}"  "f16;bf16"  32       32       256     64     8     2      1          false          true  tma)
fmha_score_mod("89"      "f16;bf16"  64       64       256     64     8     2      1          false          true  cp_async_16)
fmha_score_mod("${TMA}"  "f16;bf16"  64       64       256     64     8     2      1          false          true  tma)
fmha_score_mod("89"      "f16;bf16"  96       96       256     64     8     1      1          false          true  cp_async_16)
fmha_score_mod("90"      "f16;bf16"  96       96       256     64     8     2      1          false          true  tma)
fmha_score_mod("120"     "f16;bf16"  96       96       256     48     8     2      1          false          true  tma)
fmha_score_mod("89"      "f16;bf16" 128      128       256     64     8     1      1          false          true  cp_async_16)
fmha_score_mod("${TMA}"  "f16;bf16" 128      128       256     64     8     1      1          false          true  tma)
fmha_score_mod("90"      "f16;bf16" 128      128       128     48     4     2      2          false          false tma)
fmha_score_mod("89"      "f16;bf16" 192      128       128     64     8     1      1          false          true  cp_async_16)
fmha_score_mod("90"      "f16;bf16" 192      128       128     32     4     2      2          false          false tma)
fmha_score_mod("120"     "f16;bf16" 192      128       128     64     8     1      1          false          true  tma)
fmha_score_mod("89"      "f16;bf16" 256      256       128     32     8     1      1          false          true  cp_async_16)
fmha_score_mod("${TMA}"  "f16;bf16" 256      256       128     32     8     1      1          false          true  tma)

# The same as ranged rows where a mask hides keys, or a bias of 16 bits is added.
#           ARCHS     DTYPES     HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS PING_PONG COPY
fmha_masked("89"      "f16;bf16"  32       32       256     64     8     2      1          false          true  cp_async_16)
fmha_masked("${TMA}"  "f16;bf16"  32       32       256     64     8     2      1          false          true  tma)
fmha_masked("89"      "f16;bf16"  64       64       256     64     8     2      1          false          true  cp_async_16)
fmha_masked("${TMA}"  "f16;bf16"  64       64       256     64     8     2      1          false          true  tma)
fmha_masked("89"      "f16;bf16"  96       96       256     64     8     1      1          false          true  cp_async_16)
fmha_masked("${TMA}"  "f16;bf16"  96       96       256     32     8     2      1          false          true  tma)
fmha_masked("89"      "f16;bf16" 128      128       256     48     8     1      1          false          true  cp_async_16)
fmha_masked("${TMA}"  "f16;bf16" 128      128       256     32     8     2      1          false          true  tma)
fmha_masked("89"      "f16;bf16" 192      128       128     64     8     1      1          false          true  cp_async_16)
fmha_masked("${TMA}"  "f16;bf16" 192      128       128     64     8     1      1          false          true  tma)
fmha_masked("89"      "f16;bf16" 256      256       128     32     8     1      1          false          true  cp_async_16)
fmha_masked("${TMA}"  "f16;bf16" 256      256       128     32     8     1      1          false          true  tma)

# For everything that plain rows don't know (features/params.h): one for many queries and one for few, whose warps share
# the keys, per head dimension. Any smaller head dimension runs on them too.
#           ARCHS     DTYPES     HEAD_DIM VALUE_DIM TILE_M TILE_N WARPS KV_WARPS STAGES MIN_BLOCKS Q_IN_REGISTERS
fmha_scored(90        "f16;bf16"  32       32       128     64     4     1        2      3          false)
fmha_scored("${ALL}"  "f16;bf16"  32       32        64     64     4     1        2      2          true)
fmha_scored("89;120"  "f16;bf16"  32       32        16     64     4     4        2      1          true)
fmha_scored(90        "f16;bf16"  32       32        16     64     4     4        2      2          true)
fmha_scored(90        "f16;bf16"  32       32        16     64     2     2        3      4          true)
fmha_scored(90        "f16;bf16"  64       64       128     64     4     1        2      2          true)
fmha_scored("${ALL}"  "f16;bf16"  64       64        64     64     4     1        2      2          true)
fmha_scored("89;120"  "f16;bf16"  64       64        16     32     4     4        2      1          true)
fmha_scored(90        "f16;bf16"  64       64        16     32     4     4        2      2          true)
fmha_scored(90        "f16;bf16"  64       64        16     32     2     2        3      4          true)
fmha_scored("89;120"  "f16;bf16"  64       64        16     32     2     2        2      2          true)
fmha_scored(90        "f16;bf16"  96       96       128     64     4     1        2      2          false)
fmha_scored("${ALL}"  "f16;bf16"  96       96        64     32     4     1        2      2          true)
fmha_scored("${ALL}"  "f16;bf16"  96       96        16     16     4     4        2      1          true)
fmha_scored(90        "f16;bf16"  96       96        16     16     2     2        4      4          true)
fmha_scored(90        "f16;bf16" 128      128       128     64     4     1        2      2          false)
fmha_scored("${ALL}"  "f16;bf16" 128      128        64     32     4     1        2      2          true)
fmha_scored("${ALL}"  "f16;bf16" 128      128        16     16     4     4        2      3          true)
fmha_scored(90        "f16;bf16" 128      128        16     16     2     2        3      4          true)
fmha_scored("89;120"  "f16;bf16" 128      128        16     16     2     2        2      2          true)
fmha_scored(90        "f16;bf16" 192      128       128     32     4     1        2      2          false)
fmha_scored("${ALL}"  "f16;bf16" 192      128        64     32     4     1        2      1          true)
fmha_scored("${ALL}"  "f16;bf16" 192      128        16     16     4     4        2      1          true)
fmha_scored("${ALL}"  "f16;bf16" 256      256        64     32     4     1        2      1          false)
fmha_scored("${ALL}"  "f16;bf16" 256      256        16     16     2     2        2      1          false)

# For what the rows above don't take: CUTLASS's own memory-efficient attention (its example 41) or, for float32 and head
# dims up to 512 on sm_90, main loops of our own. See src/wide/config.h.
#         ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS MIN_BLOCKS MMA
fmha_wide(89        f32         64       64     64    4     4          simt)
fmha_wide(120       f32         64       64     64    4     3          simt)
fmha_wide("89;120"  f32        128       64    128    8     2          simt)
fmha_wide("89;120"  f32        any       64    128    8     2          simt)
fmha_wide(90        f32         64      128     48    4     2          tf32x3)
fmha_wide(90        f32         64       64     64    4     2          tf32x3)
fmha_wide(90        f32        128      128     32    4     2          tf32x3)
fmha_wide(90        f32        128       64     32    4     2          tf32x3)
fmha_wide(90        f32        any       32    128    4     2          tf32x3)
fmha_wide("89;120"  "f16;bf16" any       64    128    8     1          m16n8k16)
fmha_wide(90        "f16;bf16" 512       64     64    8     1          m16n8k16)
fmha_wide(90        "f16;bf16" any       32    128    4     2          m16n8k16)

# The same for all that a call may say: windows with a left limit, pages, what becomes of scores. See src/wide/scored.cuh.
# Two blocks fit an SM of sm_90 alone.
#                ARCHS     DTYPES     HEAD_DIM TILE WARPS MIN_BLOCKS MMA
fmha_wide_scored(90        f32        128       64  8     2          tf32x3)
fmha_wide_scored("${ALL}"  f32        512       64  8     1          tf32x3)
fmha_wide_scored("${ALL}"  "f16;bf16" 512       64  8     1          m16n8k16)

# Gradients of Q, K and V: TILE_N keys per thread block, TILE_M queries per step, CHUNK of them at a time, by so many
# GROUPS of warps. Where ptxas would spill in one architecture, it has another tile there. Of two tiles of one head dim
# the lengths decide (cutlass_fmha/cost/gradients.py).
#             ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY         WRITES_SCORES ROUNDED_PAIRS WHOLE_DQ TAIL
fmha_backward("89"      "f16;bf16"  32       64     256    8     32    1      ranges   cp_async_16)
fmha_backward("${TMA}"  "f16;bf16"  32       64     256    8     32    1      ranges   tma)
fmha_backward("89"      "f16;bf16"  64       64     256    8     16    1      ranges   cp_async_16)
fmha_backward("89;120"  "f16;bf16"  64       64     128    8     64    1      ranges   cp_async_16)
fmha_backward("90"      "f16;bf16"  64       64     192   12     32    3      ranges   tma          false         true          true     64)
fmha_backward("90"      "f16;bf16"  64       64     128   12     32    3      ranges   tma          false         true          true)
fmha_backward("120"     "f16;bf16"  64       64     256    8     16    1      ranges   tma)
fmha_backward("89"      "f16;bf16"  96       64     128    8     64    1      ranges   cp_async_16)
fmha_backward("90"      "f16;bf16"  96       64     128   12     32    3      ranges   tma          false         true          true)
fmha_backward("120"     "f16;bf16"  96       64     128    8     64    1      ranges   tma)
fmha_backward("89"      "f16;bf16" 128       64     128    8     16    2      ranges   cp_async_16)
fmha_backward("90"      "f16;bf16" 128       64     128   12     16    3      ranges   tma          false         true)
fmha_backward("120"     "f16;bf16" 128       64     128    8     64    1      ranges   tma)
fmha_backward("89"      "f16;bf16" 256       32      64    8     16    2      ranges   cp_async_16)
fmha_backward("${TMA}"  "f16;bf16" 256       32      64   12     16    3      ranges   tma)
fmha_backward("${ALL}"  "f16;bf16"  32       64     256    8     16    1      scores   cp_async_16)
fmha_backward("89"      "f16;bf16"  64       64     256    8     16    1      scores   cp_async_16)
fmha_backward("90"      "f16;bf16"  64       64     256    8     16    1      scores   tma)
fmha_backward("89;120"  "f16;bf16"  64       64     128    8     64    1      scores   cp_async_16)
fmha_backward("90"      "f16;bf16"  64       64     128    8     64    1      scores   tma)
fmha_backward("${ALL}"  "f16;bf16"  96       64     128    8     32    1      scores   cp_async_16)
fmha_backward("89"      "f16;bf16" 128       64     128    8     32    1      scores   cp_async_16)
fmha_backward("120"     "f16;bf16" 128       64     128    8     16    1      scores   cp_async_16)
fmha_backward("90"      "f16;bf16" 128       64     128    8     32    1      scores   tma)
fmha_backward("${ALL}"  "f16;bf16" 256       32      64    8     16    2      scores   cp_async_16)

# The same with dS written to memory, for gradients that have the same bits each time; and dQ of it: TILE_M queries per
# thread block, TILE_N keys per step, STAGES of them.
#             ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY         WRITES_SCORES ROUNDED_PAIRS WHOLE_DQ TAIL
fmha_backward("${ALL}"  "f16;bf16"  32       64     256    8     32    1      ranges   cp_async_16  true)
fmha_backward("89;120"  "f16;bf16"  64       64     256    8     16    1      ranges   cp_async_16  true)
fmha_backward("90"      "f16;bf16"  64       64     192   12     32    3      ranges   tma          true          true          false    64)
fmha_backward("89;120"  "f16;bf16"  96       64     128    8     64    1      ranges   cp_async_16  true)
fmha_backward("90"      "f16;bf16"  96       64     128   12     32    3      ranges   tma          true          true)
fmha_backward("89;120"  "f16;bf16" 128       64     128    8     64    1      ranges   cp_async_16  true)
fmha_backward("90"      "f16;bf16" 128       64     128   12     16    3      ranges   tma          true          true)
fmha_backward("89"      "f16;bf16" 256       32      64    8     16    2      ranges   cp_async_16  true)
fmha_backward("${TMA}"  "f16;bf16" 256       32      64   12     16    3      ranges   tma          true)
fmha_backward("${ALL}"  "f16;bf16"  32       64     256    8     16    1      scores   cp_async_16  true)
fmha_backward("${ALL}"  "f16;bf16"  64       64     256    8     16    1      scores   cp_async_16  true)
fmha_backward("${ALL}"  "f16;bf16"  96       64     128    8     32    1      scores   cp_async_16  true)
fmha_backward("${ALL}"  "f16;bf16" 128       64     128    8     32    1      scores   cp_async_16  true)
fmha_backward("${ALL}"  "f16;bf16" 256       32      64    8     16    2      scores   cp_async_16  true)
#                  ARCHS     DTYPES     HEAD_DIM TILE_M TILE_N WARPS STAGES MIN_BLOCKS
fmha_query_product("${ALL}"  "f16;bf16"  32      256     32    8     4      1)
fmha_query_product("89;120"  "f16;bf16"  64      128     32    4     4      1)
fmha_query_product("90"      "f16;bf16"  64      128     32    4     4      3)
fmha_query_product("${ALL}"  "f16;bf16"  96      256     32    8     4      1)
fmha_query_product("${ALL}"  "f16;bf16" 128      256     32    8     4      1)
fmha_query_product("${ALL}"  "f16;bf16" 256      128     32    8     4      1)

# Gradients of float32, and of head dims above 256: a thread block owns TILE rows of one of them. On all architectures
# float32 is multiplied on tensor cores. See src/backward_wide/config.h.
#                  ARCHS     DTYPES     HEAD_DIM TILE WARPS MIN_BLOCKS MMA
fmha_backward_wide("${ALL}"  f32         64       64  8     1          tf32x3)
fmha_backward_wide("${ALL}"  f32        128       64  8     1          tf32x3)
fmha_backward_wide("${ALL}"  f32        256       64  8     1          tf32x3)
fmha_backward_wide("${ALL}"  f32        512       64  8     1          tf32x3)
fmha_backward_wide("${ALL}"  "f16;bf16" 512       64  8     1          m16n8k16)
