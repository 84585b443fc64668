#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: on a machine with one, from a clean source tree.
#
#     tools/prove.sh OUT [STEP...]
#
# builds the wheel, the sm_120 proxy and the candidates into OUT and runs the steps, each on its own, by default all but one:
#
#     parity90 parity89 parity120   the parity gate: native rows, sm_89's PTX, sm_120's source compiled for sm_90;
#                                   ptxas compiles the PTX beforehand, which the driver takes minutes for
#     parity80                      the gate of sm_89's rows compiled for sm_80, by their PTX; asked for alone
#     candidates                    the gate's tests of the rows with those of src/candidates.cmake, by sm_89's PTX
#     sanitize                      memcheck, racecheck, synccheck and initcheck over every kernel
#     mixed                         long runs of problems that mix all features, in the three modes of the gate
#     bench calibrate holdout demo  figures for benchmarks/results and cutlass_fmha/data/costs
#     examples                      those that need torch alone: its own modules with our attention, and a GPT's training
#
# Results lie in OUT/results as they are committed, a log of each step in OUT/logs; the last lines say which steps passed.
# PYTHON is an interpreter with torch, pytest, hypothesis, scikit-build-core and pybind11 (default python3). The native
# steps are named for an H100 or H200 (sm_90), where alone the proxy runs.
set -uo pipefail

cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?tools/prove.sh OUT [STEP...]}")
shift
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(parity90 parity89 parity120 candidates sanitize mixed bench calibrate holdout demo examples)
python=${PYTHON:-python3}
results=$out/results
mkdir -p "$results" "$out/logs"

# build NAME OPTION...: a package in OUT/NAME, for PYTHONPATH
build() {
  local name=$1
  shift
  [ -d "$out/$name/cutlass_fmha" ] && return
  echo "==> building $name"
  "$python" -m pip install . --no-deps --no-build-isolation --target "$out/$name" -C build-dir="$out/build-$name" "$@" \
    > "$out/logs/build-$name" 2>&1 || { tail -n 20 "$out/logs/build-$name"; return 1; }
}

build_ptx() { build "ptx$1" -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$1" -C cmake.define.CUTLASS_FMHA_PTX_AHEAD=90; }
build_proxy() { build proxy -C cmake.define.CUTLASS_FMHA_SM120_PROXY=90 -C cmake.define.CMAKE_CUDA_ARCHITECTURES=120; }

# with NAME ARGUMENT...: Python with that package; away from the sources, which would be imported in its place
with() { (cd tests && PYTHONSAFEPATH=1 PYTHONPATH=$out/$1 "$python" "${@:2}"); }

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
    parity89) build_ptx 89 && CUTLASS_FMHA_FORCE_ARCH=89 parity ptx89 ;;
    parity120) build_proxy && CUTLASS_FMHA_FORCE_ARCH=120 parity proxy ;;
    parity80) build_ptx 80 && CUTLASS_FMHA_FORCE_ARCH=89 parity ptx80 ;;
    candidates)
      build candidates -C cmake.define.CUTLASS_FMHA_MANIFEST=src/candidates.cmake \
        && CUTLASS_FMHA_FORCE_ARCH=89 with candidates -m pytest -q -m gpu test_parity_features.py test_parity_runtime.py
      ;;
    # in one process, which on one GPU is faster than several
    sanitize) build native && with native ../tools/sanitize.py --tool all ;;
    mixed)
      build native && mixed native 20000 && CUTLASS_FMHA_FORCE_ARCH=89 mixed native 5000 \
        && build_proxy && CUTLASS_FMHA_FORCE_ARCH=120 mixed proxy 5000
      ;;
    bench)
      build native && with native -m cutlass_fmha bench --json "$results/bench.json" \
        --markdown "$results/bench.md" --plot "$results/bench.png"
      ;;
    calibrate) build native && with native -m cutlass_fmha calibrate --output "$results/costs.json" ;;
    holdout)
      local costs=$results/costs.json
      [ -f "$costs" ] && export CUTLASS_FMHA_CALIBRATION=$costs
      build native && with native ../tools/holdout.py --problems 240 --seed 1 \
        --output "$results/holdout.json" --markdown "$results/holdout.md"
      ;;
    demo) build native && with native -m cutlass_fmha demo > "$results/demo.md" ;;
    examples) build native && with native ../examples/sdpa.py && with native ../examples/train_gpt.py ;;
    *) echo "tools/prove.sh: there is no step $1" >&2; return 2 ;;
  esac
}

verdicts=()
failed=0
for step in "${steps[@]}"; do
  echo "==> $step"
  if (run "$step") > "$out/logs/$step" 2>&1; then
    verdicts+=("passed $step")
  else
    verdicts+=("FAILED $step: see $out/logs/$step")
    failed=1
    tail -n 30 "$out/logs/$step"
  fi
  tail -n 1 "$out/logs/$step"
done
printf '%s\n' "${verdicts[@]}"
exit $failed
