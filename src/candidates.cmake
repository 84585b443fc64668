# Kernels that wait for the parity gate: written and inspected, and not in the default build until `make parity` has
# passed with them. A build with them, and with everything of rows.cmake:
#     pip install . -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake
# A line moves to rows.cmake when the gate has passed and it is the fastest row of some problem. None waits now.

include("${CMAKE_CURRENT_LIST_DIR}/rows.cmake")
