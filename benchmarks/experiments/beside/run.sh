#!/bin/bash
# Kernels on rows, by variant: us and the share of a copy of as many bytes, in graphs; results against plain kernels.
# Needs nvcc, an sm_90 and this repository's history (for the kernels before, of commit $BEFORE); 30 s.
set -e
cd "$(dirname "$0")"
root=$(git rev-parse --show-toplevel) work=$(mktemp -d)
BEFORE=${BEFORE:-ee91990}
mkdir -p "$work/new" "$work/old"
cp -r "$root/src" "$work/new/"
git -C "$root" archive "$BEFORE" src 2>/dev/null | tar x -C "$work/old" || echo "no sources of $BEFORE: the new ones alone"
python3 - "$work/new/src" <<'P'
import sys
from pathlib import Path
def swap(name, *pairs):
    path = Path(sys.argv[1]) / name
    text = path.read_text()
    for old, new in pairs:
        assert old in text, (name, old)
        text = text.replace(old, new, 1)
    path.write_text(text)
swap("beside/rows.cuh", ("__ldcs(reinterpret", "hinted(reinterpret"), ("/// What is read once, and", """__device__ inline uint4 hinted(uint4 const* p) {
#if HINT == 0
  return __ldcs(p);
#elif HINT == 2
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
#else
  return *p;
#endif
}

/// What is read once, and"""))
swap("helpers/elements.cuh", ("reinterpret_cast<Words*>(to)[n] = words[n];", """{
#if HINT == 3
      if constexpr (sizeof(Words) == 16) __stcs(reinterpret_cast<Words*>(to) + n, words[n]); else
#endif
      reinterpret_cast<Words*>(to)[n] = words[n];
    }"""))
P
toolkit=$(dirname "$(readlink -f "$(command -v nvcc)")")/../lib # of one from PyPI
compile="nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -L$toolkit bench.cu"
$compile -DOLD -DHINT=0 -I"$work/old/src" -o "$work/before" >"$work/before.log" 2>&1 &
for hint in 0 1 2 3; do $compile -DHINT=$hint -I"$work/new/src" -o "$work/hint$hint" >"$work/hint$hint.log" 2>&1 & done
wait
for name in before hint0 hint1 hint2 hint3; do
  if [ -x "$work/$name" ]; then timeout 20 "$work/$name" || true; else grep -m3 -i "error\|cannot" "$work/$name.log"; fi
done
