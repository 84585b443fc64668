"""Makes an sm_90 GPU resemble ones with a slower tensor pipe and ranks the sm_89 and sm_120 rows: a model.

    python tools/emulate.py                      build, measure, write benchmarks/results/emulation-<gpu>.*
    python tools/emulate.py --head-dims 64 128 --manifest candidates.cmake --output candidates
    python tools/emulate.py --report benchmarks/results/emulation-h200.json      tables and picture, no GPU

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
import time
from pathlib import Path
from typing import Any

from emulation import report
from emulation.build import ROOT, ROWS, Build, BuildError, Options, build_all, find
from emulation.cases import SHAPES, cases

RESULTS = ROOT / "benchmarks" / "results"
MEASURE = Path(__file__).resolve().parent / "emulation" / "measure.py"
PASSES = (1, 3, 5)


class MeasurementError(RuntimeError):
    """The GPU part failed."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--report", type=Path, metavar="JSON", help="render a kept result, and stop")
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json, STEM.md and STEM.png")
    parser.add_argument(
        "--passes", type=odd, nargs="+", default=list(PASSES), help="times each mma pass runs"
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(SHAPES), metavar="D")
    parser.add_argument("--archs", type=int, nargs="+", default=[89, 90, 120], help="whose rows to build")
    parser.add_argument("--rows", metavar="REGEX", help="rows to build, by name (default: bf16, aligned)")
    parser.add_argument("--manifest", type=Path, help="rows of another manifest than src/templates.cmake")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "emulation")
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="for CMake")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    parser.add_argument("--no-build", action="store_true", help="measure what is in the build directory")
    parser.add_argument("--build-only", action="store_true", help="stop before the GPU is needed")
    parser.add_argument("--seconds", type=float, default=0.06, help="of GPU time per measurement")
    parser.add_argument("--no-plot", action="store_true", help="write no picture")
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
    wanted = sorted(set(options.passes))
    if options.no_build:
        return [find(passes, options.build_dir / f"x{passes}") for passes in wanted]
    begin = time.monotonic()
    built = build_all(
        wanted,
        Options(
            directory=options.build_dir,
            rows=rows_expression(options),
            architectures=options.archs,
            manifest=options.manifest,
            defines=options.define,
            jobs=options.jobs,
        ),
    )
    print(f"built {len(built)} times in {time.monotonic() - begin:.0f} s", flush=True)
    for found in built:
        for name, count in found.spills().items():
            print(f"{found.passes} passes: {name} spills {count} bytes", flush=True)
    return built


def measure(build: Build, head_dims: list[int], seconds: float) -> dict[str, Any]:
    """One build's figures, from a process of its own. Raises MeasurementError."""
    result = build.extension.parent / "result.json"
    result.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [sys.executable, MEASURE, build.extension, build.reference, result]
    answer = subprocess.run(
        [*map(str, command), "--seconds", str(seconds), "--head-dims", *map(str, head_dims)], check=False
    )
    if answer.returncode or not result.is_file():
        raise MeasurementError(f"measuring the build with {build.passes} mma passes failed, see above")
    part: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    for entry in part["results"]:
        entry["spill_bytes"] = build.spills().get(entry["row"], 0)
    count = len(part["results"])
    print(f"{build.passes} passes: {count} measurements in {time.monotonic() - begin:.0f} s", flush=True)
    return part


def default_stem(result: report.Result) -> Path:
    """benchmarks/results/emulation-h200 for an "NVIDIA H200"."""
    words = re.findall(r"[a-z0-9]+", str(result["machine"]["gpu"]).lower().replace("nvidia", ""))
    return RESULTS / f"emulation-{'-'.join(words)}"


def beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def render(result: report.Result, stem: Path, plot: bool) -> None:
    """Writes the Markdown and the picture, and prints the former."""
    text = report.markdown(result)
    print(text, end="")
    stem.parent.mkdir(parents=True, exist_ok=True)
    beside(stem, ".md").write_text(text, encoding="utf-8")
    if plot:
        from emulation.picture import draw  # here: all else goes without matplotlib

        draw(result, beside(stem, ".png"))


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
            beside(stem, ".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        render(result, stem, not options.no_plot)
    except (BuildError, MeasurementError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"the picture needs {error.name}: pip install {error.name}, or --no-plot", file=sys.stderr)
        return 1
    wrong = report.wrong_results(result)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
