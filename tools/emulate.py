"""Makes an sm_90 GPU resemble ones with a slower tensor pipe and ranks the sm_89 and sm_120 rows: a model.

    python tools/emulate.py                      build, measure, write benchmarks/results/emulation-<gpu>.*
    python tools/emulate.py --head-dims 64 128 --manifest candidates.cmake --output candidates
    python tools/emulate.py --report benchmarks/results/emulation-h200.json      the tables, no GPU

Builds the extension three times (CUTLASS_FMHA_EMULATION, CUTLASS_FMHA_MMA_PASSES 1, 3 and 5), each with
FlashAttention-2's tiles and a kernel that does nothing but the mma; docs/emulation.md says what that shows.
Needs CMake, nvcc, pybind11 and torch, and for measuring an H100 or H200.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from building import ROOT, BuildError, Tree
from cubin import read_kernels
from emulation import report
from emulation.cases import SHAPES, cases

RESULTS = ROOT / "benchmarks" / "results"
MEASURE = Path(__file__).resolve().parent / "emulation" / "measure.py"
PASSES = (1, 3, 5)
#: Rows that compute long problems in bf16: neither the unaligned ones nor those whose warps share the keys.
ROWS = "_bf16_d[0-9]+_m[0-9]+n[0-9]+w[0-9]+(_[^e].*)?$"


class MeasurementError(RuntimeError):
    """The GPU part failed."""


@dataclass(frozen=True)
class Build:
    """An emulation build: how often each mma pass runs, and where the extension is."""

    passes: int
    tree: Tree

    @property
    def extension(self) -> Path:
        return self.tree.file("_C.*.so")

    @property
    def reference(self) -> Path:
        """The library that it is held against."""
        return self.tree.file("tools/emulation/libemulation_reference.so")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--report", type=Path, metavar="JSON", help="render a kept result, and stop")
    add("--output", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    add("--passes", type=odd, nargs="+", default=list(PASSES), help="times each mma pass runs")
    add("--head-dims", type=int, nargs="+", default=list(SHAPES), metavar="D")
    add("--archs", type=int, nargs="+", default=[89, 90, 120], help="whose rows to build")
    add("--rows", metavar="REGEX", help="rows to build, by name (default: bf16, aligned)")
    add("--manifest", type=Path, help="rows of another manifest than src/templates.cmake")
    add("--build-dir", type=Path, default=ROOT / "build" / "emulation")
    add("--define", action="append", default=[], metavar="NAME=VALUE", help="for CMake")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    add("--no-build", action="store_true", help="measure what is in the build directory")
    add("--build-only", action="store_true", help="stop before the GPU is needed")
    add("--seconds", type=float, default=0.06, help="of GPU time per measurement")
    return parser.parse_args(arguments)


def odd(text: str) -> int:
    """Converts an argument of --passes."""
    if not text.isdecimal() or int(text) % 2 == 0:
        raise argparse.ArgumentTypeError(f"must be an odd number from 1 on, got {text!r}")
    return int(text)


def rows_expression(options: argparse.Namespace) -> str:
    """The names to build: as asked for, else long problems' rows for the head dimensions that are measured.
    Those of another manifest may have any name."""
    if options.rows is not None:
        return str(options.rows)
    if options.manifest is not None:
        return "_bf16_"
    if set(options.head_dims) == set(SHAPES):
        return ROWS
    return ROWS.replace("_d[0-9]+_", f"_d({'|'.join(map(str, sorted(set(options.head_dims))))})_")


def make_builds(options: argparse.Namespace) -> list[Build]:
    """What is to be measured, built unless told otherwise. Raises BuildError."""
    variables: dict[str, object] = {
        "CMAKE_CUDA_ARCHITECTURES": options.archs,
        "CUTLASS_FMHA_EMULATION": "ON",
        "CUTLASS_FMHA_ROWS": rows_expression(options),
        "CUTLASS_FMHA_ROWS_PER_FILE": 1,  # a file per kernel keeps all cores busy to the end
        "CUTLASS_FMHA_MANIFEST": options.manifest.resolve() if options.manifest else "",
    } | dict(define.split("=", 1) for define in options.define)
    builds = []
    for passes in sorted(set(options.passes)):
        given = {**variables, "CUTLASS_FMHA_MMA_PASSES": passes}
        build = Build(passes, Tree(options.build_dir / f"x{passes}", given, options.jobs))
        if not options.no_build:
            build.tree.build("all", "_C.*.so")
        for name, count in spills(build).items():
            print(f"{passes} passes: {name} has {count} instructions that spill", flush=True)
        builds.append(build)
    return builds


def spills(build: Build) -> dict[str, int]:
    """Loads and stores of local memory in the kernels that have any."""
    found = {kernel.name: kernel.count("LDL", "STL") for kernel in read_kernels(build.extension)}
    return {name: count for name, count in found.items() if count}


def measure(build: Build, head_dims: list[int], seconds: float) -> dict[str, Any]:
    """One build's figures, from a process of its own. Raises MeasurementError."""
    result = build.tree.directory / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, MEASURE, build.extension, build.reference, result]
    answer = subprocess.run(
        [*map(str, command), "--seconds", str(seconds), "--head-dims", *map(str, head_dims)], check=False
    )
    if answer.returncode or not result.is_file():
        raise MeasurementError(f"measuring the build with {build.passes} mma passes failed, see above")
    part: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    spilling = spills(build)
    for entry in part["results"]:
        entry["spills"] = spilling.get(entry["row"], 0)
    return part


def default_stem(result: report.Result) -> Path:
    """benchmarks/results/emulation-h200 for an "NVIDIA H200"."""
    words = re.findall(r"[a-z0-9]+", str(result["machine"]["gpu"]).lower().replace("nvidia", ""))
    return RESULTS / f"emulation-{'-'.join(words)}"


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.report:
            result = report.read_result(options.report)
            stem = options.output or options.report.with_suffix("")
        else:
            wanted = cases(options.head_dims)  # before a build, so that a wrong dimension costs no time
            builds = make_builds(options)
            if options.build_only:
                return 0
            parts = [measure(build, options.head_dims, options.seconds) for build in builds]
            result = report.merge(parts, [case.as_dict() for case in wanted])
            stem = options.output or default_stem(result)
            stem.parent.mkdir(parents=True, exist_ok=True)
            Path(f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = report.markdown(result)
        print(text, end="")
        Path(f"{stem}.md").write_text(text, encoding="utf-8")
    except (BuildError, MeasurementError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    wrong = report.wrong_results(result)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
