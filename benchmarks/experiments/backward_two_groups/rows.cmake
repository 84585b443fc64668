# CUTLASS_FMHA_MANIFEST=benchmarks/experiments/backward_two_groups/rows.cmake, for sm_90: the rows of src/rows.cmake, those
# before them (but for what all of these share: stmatrix, dO by TMA), and others worth a run. See run.py.
function(trial SUFFIX)
  set(FMHA_NAME_SUFFIX "${SUFFIX}")
  set(FMHA_GROUP_SUFFIX "${SUFFIX}")
  fmha_backward("90" ${ARGN})
endfunction()

#                                DTYPES HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY WRITES_SCORES SHARES_DQ ROUNDED_PAIRS
trial("_shared_pairs"            "bf16"  64      64     192    8     32    true   ranges   tma  false         true      true)
trial("_before"                  "bf16"  64      64     192    8     16    true   ranges   tma  false         false     false)
trial("_pairs"                   "bf16"  64      64     192    8     32    true   ranges   tma  false         false     true)
trial("_shared"                  "bf16"  64      64     192    8     32    true   ranges   tma  false         true      false)
trial("_shared_pairs_chunk16"    "bf16"  64      64     192    8     16    true   ranges   tma  false         true      true)
trial("_shared_pairs_spills"     "bf16"  64      64     256    8     16    true   ranges   tma  false         true      true)
trial("_shared_pairs"            "bf16"  96      64     128    8     32    true   ranges   tma  false         true      true)
trial("_before"                  "bf16"  96      64     128    8     32    true   ranges   tma  false         false     false)
trial("_pairs"                   "bf16"  96      64     128    8     32    true   ranges   tma  false         false     true)
trial("_before"                  "bf16" 128      64     128    8     16    true   ranges   tma  false         false     false)
trial("_pairs"                   "bf16" 128      64     128    8     16    true   ranges   tma  false         false     true)
