# CUTLASS_FMHA_MANIFEST=benchmarks/experiments/backward_two_groups/rows.cmake, for sm_90: the rows of src/rows.cmake
# ("now"), and others that were slower. See run.py.
function(trial SUFFIX)
  set(FMHA_NAME_SUFFIX "${SUFFIX}")
  set(FMHA_GROUP_SUFFIX "${SUFFIX}")
  fmha_backward("90" "bf16" ${ARGN})
endfunction()

#               HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY WRITES_SCORES ROUNDED_PAIRS KEPT_KEY_STEPS WHOLE_DQ BY_PIECES
trial("_now"     64      64     192    8     32    true   ranges   tma  false         true          4              true)
trial("_units"   64      64     192    8     32    true   ranges   tma  false         true          4)
trial("_now"     96      64     128    8     32    true   ranges   tma  false         true          6              true     true)
trial("_whole"   96      64     128    8     32    true   ranges   tma  false         true          6              true)
trial("_now"    128      64     128    8     32    true   ranges   tma  false         true          1)
trial("_pieces" 128      64     128    8     32    true   ranges   tma  false         true          1              false    true)
trial("_now"    256      32      64    8     16    true   ranges   tma  false         false         4)
trial("_kept2"  256      32      64    8     16    true   ranges   tma  false         false         2)
