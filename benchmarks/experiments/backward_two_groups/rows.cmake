# CUTLASS_FMHA_MANIFEST=benchmarks/experiments/backward_two_groups/rows.cmake, for sm_90: the rows of src/rows.cmake
# ("now"), and others worth a run. See run.py.
#
# unadded: dQ is multiplied, and not added to its sums. kept: the first group keeps K, or so many steps of it, in
# registers. bulk: dQ's sums by the copy unit. parts: the second group multiplies its keys in two parts, or dQ's columns
# are; values: a quarter of V is in shared memory; shared: the second group has dQ of every second unit.
function(trial SUFFIX)
  set(FMHA_NAME_SUFFIX "${SUFFIX}")
  set(FMHA_GROUP_SUFFIX "${SUFFIX}")
  fmha_backward("90" "bf16" ${ARGN})
endfunction()

#                          HEAD_DIM TILE_M TILE_N WARPS CHUNK GROUPS FEATURES COPY WRITES_SCORES SHARES_DQ ROUNDED_PAIRS KEPT_KEY_STEPS BULK_BYTES KEY_PARTS DQ_PARTS SHARED_VALUE_STEPS
trial("_now"                64      64     192    8     32    true   ranges   tma  false         true      true)
trial("_unadded"            64      64     192    8     32    true   ranges   tma  false         true      true          0              -1         1         1)
trial("_bulk"               64      64     192    8     32    true   ranges   tma  false         true      true          0              2048       1         1)
trial("_kept"               64      64     192    8     32    true   ranges   tma  false         true      true          4              0          1         1)
trial("_kept_bulk"          64      64     192    8     32    true   ranges   tma  false         true      true          4              2048       1         1)
trial("_parts"              64      64     256    8     16    true   ranges   tma  false         true      true          0              0          2         1)
trial("_parts_unshared"     64      64     256    8     16    true   ranges   tma  false         false     true          0              0          2         1)
trial("_parts_unshared_unadded" 64  64     256    8     16    true   ranges   tma  false         false     true          0              -1         2         1)
trial("_parts_values"       64      64     256    8     16    true   ranges   tma  false         true      true          0              0          2         1       1)
trial("_parts_values_unshared" 64   64     256    8     16    true   ranges   tma  false         false     true          0              0          2         1       1)
trial("_values_unshared"    64      64     256    8     16    true   ranges   tma  false         false     true          0              0          1         1       1)
trial("_now"                96      64     128    8     32    true   ranges   tma  false         false     true)
trial("_unadded"            96      64     128    8     32    true   ranges   tma  false         false     true          0              -1         1         1)
trial("_kept"               96      64     128    8     32    true   ranges   tma  false         false     true          6              0          1         1)
trial("_kept_shared"        96      64     128    8     32    true   ranges   tma  false         true      true          6              0          1         1)
trial("_bulk"               96      64     128    8     32    true   ranges   tma  false         false     true          0              1536       1         1)
trial("_now"               128      64     128    8     16    true   ranges   tma)
trial("_unadded"           128      64     128    8     16    true   ranges   tma  false         false     false         0              -1         1         1)
trial("_kept4"             128      64     128    8     16    true   ranges   tma  false         false     false         4              0          1         1)
trial("_kept8"             128      64     128    8     16    true   ranges   tma  false         false     false         8              0          1         1)
trial("_kept8_parts"       128      64     128    8     16    true   ranges   tma  false         false     false         8              0          1         2)
trial("_shared_parts"      128      64     128    8     16    true   ranges   tma  false         true      false         0              0          1         2)
trial("_bulk_115KB"        128      64     128    8     16    true   ranges   tma  false         false     false         0              4096       1         1)
trial("_shared_parts_kept4" 128     64     128    8     16    true   ranges   tma  false         true      false         4              0          1         2)
trial("_now"               256      32      64    8     16    true   ranges   tma)
trial("_unadded"           256      32      64    8     16    true   ranges   tma  false         false     false         0              -1         1         1)
trial("_kept8"             256      32      64    8     16    true   ranges   tma  false         false     false         8              0          1         1)
trial("_kept16"            256      32      64    8     16    true   ranges   tma  false         false     false        16              0          1         1)
trial("_kept16_parts"      256      32      64    8     16    true   ranges   tma  false         false     false        16              0          1         2)
trial("_bulk"              256      32      64    8     16    true   ranges   tma  false         false     false         0              2048       1         1)
