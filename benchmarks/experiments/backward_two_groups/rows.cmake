# CUTLASS_FMHA_MANIFEST=benchmarks/experiments/backward_two_groups/rows.cmake, for sm_90: the rows of src/rows.cmake
# ("now"), and others worth a run. See run.py.
#
# apart: without a diagonal, blocks of a head begin at different tiles of queries; under one, the tiles of a head follow
# each other. warps: one lane arrives at barriers for its warp. 256 keys keep a quarter of V in shared memory; what
# "spills" keeps up to 64 bytes of addresses on the stack.
function(trial SUFFIX)
  set(FMHA_NAME_SUFFIX "${SUFFIX}")
  set(FMHA_GROUP_SUFFIX "${SUFFIX}")
  fmha_backward("90" ${ARGN})
endfunction()

#                              DTYPES HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY WRITES_SCORES SHARES_DQ ROUNDED_PAIRS STAGGERED HEADS_IN_ORDER WARPS_ARRIVE
trial("_now"                   "bf16"  64      64     192    8     32    true   ranges   tma  false         true      true)
trial("_apart"                 "bf16"  64      64     192    8     32    true   ranges   tma  false         true      true          true      true)
trial("_apart_warps"           "bf16"  64      64     192    8     32    true   ranges   tma  false         true      true          true      true           true)
trial("_warps"                 "bf16"  64      64     192    8     32    true   ranges   tma  false         true      true          false     false          true)
trial("_spills"                "bf16"  64      64     256    8     16    true   ranges   tma  false         true      true)
trial("_apart_spills"          "bf16"  64      64     256    8     16    true   ranges   tma  false         true      true          true      true)
trial("_apart_warps_spills"    "bf16"  64      64     256    8     16    true   ranges   tma  false         true      true          true      true           true)
trial("_apart_unshared_spills" "bf16"  64      64     256    8     16    true   ranges   tma  false         false     true          true      true)
trial("_now"                   "bf16"  96      64     128    8     32    true   ranges   tma  false         false     true)
trial("_apart_warps"           "bf16"  96      64     128    8     32    true   ranges   tma  false         false     true          true      true           true)
trial("_now"                   "bf16" 128      64     128    8     16    true   ranges   tma)
trial("_apart_spills"          "bf16" 128      64     128    8     16    true   ranges   tma  false         false     false         true      true)
trial("_apart_warps"           "bf16" 128      64     128    8     16    true   ranges   tma  false         false     false         true      true           true)
trial("_pairs_apart"           "bf16" 128      64     128    8     16    true   ranges   tma  false         false     true          true      true)
