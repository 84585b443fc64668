#!/bin/bash
# Kernels on rows, by variant: us and the share of a copy of as many bytes, in graphs; results against plain kernels.
# Needs nvcc, an sm_90 and this repository's history (for the kernels before, of commit $BEFORE); 60 s, of which half
# compile. `run.sh build DIR` only compiles, `run.sh run DIR` runs what was compiled there.
set -e
cd "$(dirname "$0")"
what=${1:-all} work=${2:-$(mktemp -d)}
BEFORE=${BEFORE:-5741695}
if [ "$what" != run ]; then
  root=$(git rev-parse --show-toplevel)
  mkdir -p "$work/old"
  git -C "$root" archive "$BEFORE" src | tar x -C "$work/old" || echo "no sources of $BEFORE: the new ones alone"
  sed -i 's/= __ldcs(\(reinterpret_cast<uint4 const\*>(from) + n\))/= *(\1)/' "$work/old/src/beside/rows.cuh" || true
  toolkit=$(dirname "$(readlink -f "$(command -v nvcc)")")/../lib # of one from PyPI
  compile="nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -Xptxas -v -L$toolkit bench.cu"
  $compile -DBEFORE -I"$work/old/src" -o "$work/before" >"$work/before.log" 2>&1 &
  $compile -I"$root/src" -o "$work/now" >"$work/now.log" 2>&1 &
  wait
fi
if [ "$what" = build ]; then exit; fi
for name in before now; do
  if [ -x "$work/$name" ]; then timeout 40 "$work/$name" || true; else grep -m3 -i "error\|cannot" "$work/$name.log"; fi
done
