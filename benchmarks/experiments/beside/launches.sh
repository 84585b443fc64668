#!/bin/bash
# Ops beside attention by their own launches, by variant, a line for each op: launches.cu. Needs nvcc and an sm_90, and this
# repository's history for the kernels of before, and CUTLASS where PYTHON (.venv) has it; 70 s on 16 cores. `launches.sh build DIR` only compiles (all at once),
# `launches.sh run DIR` runs what was compiled there. ONLY=few: of those variants alone whose ops have that in their names, these ops alone.
set -e
cd "$(dirname "$0")"
what=${1:-all} work=${2:-$(mktemp -d)}
root=$(cd ../../.. && pwd)
cutlass=$("${PYTHON:-$root/.venv/bin/python}" "$root/build_backend/probe.py" cutlass)
toolkit=$(dirname "$(readlink -f "$(command -v nvcc)")")/../lib # of one from PyPI
# variant NAME OPS OPTIONS SED FILE [SED FILE ...]: today's sources, each FILE of src/beside changed by SED
variant() {
  local name=$1 ops=$2 options=$3 src=$work/$1/src
  shift 3
  if [ -n "$ONLY" ]; then if [[ $ops != *$ONLY* ]]; then return; fi; ops=$ONLY; fi
  names+=("$name") of+=("$ops")
  if [ "$what" = run ]; then return; fi
  mkdir -p "$work/$name"
  cp -r "$root/src" "$src"
  if [ -n "${commits[$name]}" ]; then rm -r "$src"; git -C "$root" archive "${commits[$name]}" src | tar x -C "$work/$name"; fi
  while [ $# -gt 0 ]; do
    cp "$src/beside/$2" "$work/$name/unchanged"
    sed -i "$1" "$src/beside/$2"
    if cmp -s "$src/beside/$2" "$work/$name/unchanged"; then echo "$name: nothing changed in $2"; fi
    shift 2
  done
  nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -Xptxas -v -L"$toolkit" $options -I"$src" -I"$cutlass" -o "$work/$name/run" \
    launches.cu >"$work/$name/log" 2>&1 &
}
declare -A commits=([before]=5210315 [ring]=5e25add) # whose sources are of then
heads() { echo "s/kMaxHeads = 4/kMaxHeads = $1/"; }
together() { echo "s/kRowsTogether = 2/kRowsTogether = $1/"; }
if git -C "$root" cat-file -e 5210315 2>/dev/null; then
  variant before "rope norm gated" "-DROPE=1 -DROPE_BACKWARD=1 -DPARTS=6 -DPDL=false -DAHEAD=24"
fi
if git -C "$root" cat-file -e 5e25add 2>/dev/null; then variant ring few ""; fi # rows that are alone like those that aren't
variant now "rope norm gated few" ""
variant no_overlap rope "-DPDL=false"
variant prefetch_all "norm gated" "" 's/p.early = sms \* (kThreadsOfSm \/ threads)/p.early = 1 << 30/' ../helpers/launch.h
variant prefetch_none "norm gated" "" 's/p.early = sms \* (kThreadsOfSm \/ threads)/p.early = 0/' ../helpers/launch.h
variant heads8 rope "" "$(heads 8)" rope_launch.cpp
variant heads2 rope "" "$(heads 2)" rope_launch.cpp
variant heads4backward rope "" 's/kMaxHeadsBackward = 8/kMaxHeadsBackward = 4/' rope_launch.cpp
variant together2x5 rope "-DROPE=5"
variant together4x4heads8 rope "-DROPE=4" "$(together 4)" rope_params.h "$(heads 8)" rope_launch.cpp
variant parts3 rope "-DPARTS=3"
variant ahead8 norm "-DAHEAD=8"
variant blocks256 norm "-DNORM_BLOCKS=2"
variant unrolled_sum "norm few" "" \
  's/for (int other = warps \/ 2; other > 0; other \/= 2) x +=/_Pragma("unroll") for (int other = 8; other > 0; other \/= 2) if (other < warps) x +=/' rows.cuh
if [ "$what" != run ]; then wait; fi
if [ "$what" = build ]; then exit; fi
for n in "${!names[@]}"; do
  name=${names[$n]}
  if [ -x "$work/$name/run" ]; then timeout 30 "$work/$name/run" "$name" "${of[$n]}" || true; else grep -m3 -i "error\|cannot" "$work/$name/log"; fi
done
for name in "${names[@]}"; do
  grep -h "spill\|Used" "$work/$name/log" | paste - - | grep -v " 0 bytes spill stores" | sed "s/^/$name: /" || true
done
