# CUTLASS_FMHA_MANIFEST=benchmarks/experiments/backward_groups/rows.cmake, for sm_90: the rows of src/rows.cmake
# ("now"), and others. See run.py.
function(trial SUFFIX)
  set(FMHA_NAME_SUFFIX "${SUFFIX}")
  set(FMHA_GROUP_SUFFIX "${SUFFIX}")
  fmha_backward("90" "bf16" ${ARGN})
endfunction()

#               HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY WRITES_SCORES ROUNDED_PAIRS WHOLE_DQ
trial("_now"     64      64     192   12     32    3      ranges   tma  false         true          true 64)
trial("_units"   64      64     192   12     32    3      ranges   tma  false         true)
trial("_two"     64      64     192    8     32    2      ranges   tma  false         true)
trial("_now"     96      64     128   12     32    3      ranges   tma  false         true          true)
trial("_units"   96      64     128   12     32    3      ranges   tma  false         true)
trial("_two"     96      64     128    8     32    2      ranges   tma  false         true)
trial("_now"    128      64     128   12     16    3      ranges   tma  false         true)
trial("_two"    128      64     128    8     32    2      ranges   tma  false         true)
trial("_now"    256      32      64   12     16    3      ranges   tma  false         false)
trial("_two"    256      32      64    8     16    2      ranges   tma  false         false)
