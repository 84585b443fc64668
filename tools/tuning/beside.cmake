# The manifest of tools/emulate.py --families: rows, candidates, and FlashAttention-2's tiles for GPUs with 99 KB of shared
# memory per block (its launch templates), made of this project's parts. At head dim 64 its forward's are rows already.

include("${CMAKE_CURRENT_LIST_DIR}/../../src/candidates.cmake")
set(FMHA_NAME_SUFFIX "_fa2")
set(FMHA_GROUP_SUFFIX "_fa2")
fmha_forward("89"  "bf16" 128     128  32 4 1 1 2 false false cp_async_16)
fmha_ranged("89"   "bf16" 128 128 128  32 4 1 2 false false cp_async_16)
fmha_score_mod("89" "bf16"  64  64 128  64 4 1 2 false false cp_async_16)
fmha_score_mod("89" "bf16" 128 128 128  32 4 1 2 false false cp_async_16)
fmha_backward("89"  "bf16" 128  64  64 4 32 1 ranges cp_async_16)
