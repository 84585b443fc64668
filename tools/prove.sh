#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: on a machine with one, from a clean source tree.
#
#     tools/prove.sh OUT [STEP...]
#
# builds what the steps need into OUT and runs them, each on its own, by default all but parity80:
#
#     parity90 parity89 parity120   the parity gate: native rows, sm_89's PTX, sm_120's source compiled for sm_90;
#                                   ptxas compiles the PTX beforehand, which the driver takes minutes for
#     parity80                      the gate of sm_89's rows compiled for sm_80, by their PTX
#     candidates                    the gate's tests of the rows with those of src/candidates.cmake, by sm_89's PTX
#     sanitize mixed                every kernel under compute-sanitizer; long runs in the three modes of the gate
#     bench calibrate holdout demo  figures for benchmarks/results and cutlass_fmha/data/costs
#     examples                      those that need torch alone
#
# Results lie in OUT/results as they are committed, a log of each step in OUT/logs. PYTHON is an interpreter with
# torch, pytest, hypothesis, scikit-build-core and pybind11 (default python3). The native steps are named for an H100
# or H200 (sm_90), where alone the proxy runs.
set -uo pipefail

cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?tools/prove.sh OUT [STEP...]}")
shift
[ $# -gt 0 ] || set -- parity90 parity89 parity120 candidates sanitize mixed bench calibrate holdout demo examples
python=${PYTHON:-python3}
results=$out/results
mkdir -p "$results" "$out/logs"

# build NAME OPTION...: a package in OUT/NAME, for PYTHONPATH
build() {
  local log=$out/logs/build-$1
  [ -d "$out/$1/cutlass_fmha" ] || "$python" -m pip install . --no-deps --no-build-isolation --target "$out/$1" \
    -C build-dir="$out/build-$1" "${@:2}" > "$log" 2>&1 || { tail -n 20 "$log"; return 1; }
}
build_ptx() { build "ptx$1" -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$1" -C cmake.define.CUTLASS_FMHA_PTX_AHEAD=90; }
build_proxy() { build proxy -C cmake.define.CUTLASS_FMHA_SM120_PROXY=90 -C cmake.define.CMAKE_CUDA_ARCHITECTURES=120; }

# with NAME ARGUMENT...: Python with that package; away from the sources, which would be imported in its place
with() { (cd tests && PYTHONSAFEPATH=1 PYTHONPATH=$out/$1 "$python" "${@:2}"); }
native() { build native && with native "$@"; }

# parity NAME: the GPU tests, in several processes where pytest-xdist is installed
parity() {
  local workers=
  "$python" -c 'import xdist' 2> /dev/null && workers="-n ${PARITY_WORKERS:-4} --dist worksteal"
  with "$1" -m pytest -q -m gpu $workers --parity-report "$results/parity" .
}
mixed() {
  local drawn=(../tools/parity_run.py --seed 1 --report "$results/mixed")
  with "$1" "${drawn[@]}" --problems "$2" && with "$1" "${drawn[@]}" --beside --problems 2000
}

run() {
  case $1 in
    parity90) build native && parity native ;;
    parity8[09]) build_ptx "${1#parity}" && CUTLASS_FMHA_FORCE_ARCH=89 parity "ptx${1#parity}" ;;
    parity120) build_proxy && CUTLASS_FMHA_FORCE_ARCH=120 parity proxy ;;
    candidates)
      build candidates -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake \
        && CUTLASS_FMHA_FORCE_ARCH=89 with candidates -m pytest -q -m gpu test_parity_features.py test_parity_runtime.py
      ;;
    # in one process, which on one GPU is faster than several
    sanitize) native ../tools/sanitize.py --tool all ;;
    mixed)
      build native && mixed native 20000 && CUTLASS_FMHA_FORCE_ARCH=89 mixed native 5000 \
        && build_proxy && CUTLASS_FMHA_FORCE_ARCH=120 mixed proxy 5000
      ;;
    bench) native -m cutlass_fmha bench --json "$results/bench.json" --markdown "$results/bench.md" --plot "$results/bench.png" ;;
    calibrate) native -m cutlass_fmha calibrate --output "$results/costs.json" ;;
    holdout)
      [ -f "$results/costs.json" ] && export CUTLASS_FMHA_CALIBRATION=$results/costs.json
      native ../tools/holdout.py --problems 240 --seed 1 --output "$results/holdout.json" --markdown "$results/holdout.md"
      ;;
    demo) native -m cutlass_fmha demo > "$results/demo.md" ;;
    examples) native ../examples/sdpa.py && native ../examples/train_gpt.py ;;
    *) echo "tools/prove.sh: there is no step $1" >&2; return 2 ;;
  esac
}

failed=0
for step; do
  echo "==> $step"
  lines=1 verdict="passed $step"
  (run "$step") > "$out/logs/$step" 2>&1 || { failed=1 lines=30 verdict="FAILED $step: see $out/logs/$step"; }
  tail -n $lines "$out/logs/$step"
  verdicts+=("$verdict")
done
printf '%s\n' "${verdicts[@]}"
exit $failed
