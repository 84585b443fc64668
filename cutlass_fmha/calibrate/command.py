"""``python -m cutlass_fmha calibrate``: measures what the rows cost on this machine's GPU."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from cutlass_fmha import _C
from cutlass_fmha.bench.runner import CannotMeasure, require_gpu
from cutlass_fmha.calibrate import fit, gradients, measurements, problems, verdict
from cutlass_fmha.cli import output
from cutlass_fmha.cost import PRICES, store
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.any_rows import no_rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha calibrate",
        description="Time the rows of this build on this machine's GPU and keep what they cost, for "
        "selection to go by. Takes about a minute, and the GPU should have nothing else to do.",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device number; default: 0")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of the user's cache directory")
    parser.add_argument("--timings", type=Path, metavar="FILE", help="also keep all timings, as JSON")
    parser.add_argument("--from-timings", type=Path, metavar="FILE", help="fit timings that were kept, measure nothing")
    parser.add_argument("--report", action="store_true", help="print how well each row's timings are met")
    output.add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Calibrate. Returns 0, or 1 with a sentence on stderr when there is nothing to measure with."""
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.from_timings:
            taken = measurements.load(arguments.from_timings)
        else:
            require_gpu(arguments.device)
            taken = measure(arguments.device, arguments.output is not None)
            if arguments.timings:
                measurements.save(taken, arguments.timings)
        build = tables.this_build()
        calibration = fit.fit(taken.machine, taken.calibration, build, taken.gradients)
        require_rows(calibration)
        path = arguments.output or store.user_file(taken.machine.gpu, taken.machine.package)
        store.save(calibration, path)
    except (CannotMeasure, measurements.InvalidTimings, store.InvalidCalibration, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    store.forget()
    quality = _quality(taken, build, calibration)
    parts: list[str | output.Table] = report(calibration) if arguments.report else []
    parts += [f"{len(calibration.rows)} rows of {taken.machine.device}: {quality}", f"kept in {path}"]
    content = {
        "gpu": taken.machine.gpu,
        "file": str(path),
        "quality": quality,
        "rows": {name: asdict(found) for name, found in sorted(calibration.rows.items())},
        "measured_over_default": calibration.scale,
    }
    output.emit(content, parts, arguments.json)
    return 0


def _quality(taken: measurements.Measurements, build: tables.Table, calibration: store.Calibration) -> str:
    """How selection does with a calibration on its own problems."""
    try:
        picks = verdict.judge(taken.calibration, taken.machine.device, build, calibration)
    except verdict.Unjudgeable as error:  # stored timings, and a row that is newer than they are
        return f"{len(taken.calibration)} problems, the picks can't be judged because {error}"
    return (
        f"{len(picks)} problems, {verdict.share_right(picks):.1%} of the picks are within "
        f"{verdict.CLOSE:.0%} of the best row"
    )


def measure(index: int, elsewhere: bool) -> measurements.Measurements:
    """Times the calibration's problems on CUDA device ``index``.

    Raises CannotMeasure, in a sentence, where the result could not be used.
    """
    forced = devices.forced_arch()
    if forced is not None and not elsewhere:
        raise CannotMeasure(
            f"{devices.FORCE_ARCH}={forced} makes the GPU take rows that are not its own: unset it, or name "
            "a file with --output"
        )
    if _C.build_info().get("emulation"):
        raise CannotMeasure("this build emulates other GPUs (CUTLASS_FMHA_EMULATION): its times are not this GPU's")
    device = devices.of_index(index)
    build = tables.this_build()
    if (nothing := no_rows(device, build)) is not None:
        raise CannotMeasure(nothing)
    machine = measurements.this_machine(index)
    kinds = measurements.kinds(device, build)
    grid = problems.calibration(kinds, machine.sm_count, machine.limits)
    taken = measurements.Measurements(machine)
    begin = time.perf_counter()
    taken.calibration = measurements.collect(grid, index, build, "calibrate", measurements.GIVE_UP)
    taken.gradients = gradients.collect(index, device, machine.limits)
    taken.wall_s = time.perf_counter() - begin
    return taken


def require_rows(calibration: store.Calibration) -> None:
    """Raises InvalidCalibration when nothing could be fitted, as with timings of another build."""
    if not calibration.rows:
        raise store.InvalidCalibration("the timings fit no row of this build")


def report(calibration: store.Calibration) -> list[str | output.Table]:
    """A line per row: its costs in microseconds, and median and worst error of what they predict."""
    rows = [
        [
            name,
            *(f"{getattr(found.cost, price):.3f}" for price in PRICES),
            str(found.cost.resident),
            str(found.samples),
            f"{found.error:.1%}",
            f"{found.worst:.1%}",
        ]
        for name, found in sorted(calibration.rows.items())
    ]
    headings = ["row", *PRICES, "resident", "timings", "error", "worst"]
    scales = ", ".join(f"{kind} {scale:.2f}" for kind, scale in sorted(calibration.scale.items()))
    return [output.Table(headings, rows), f"measured over default: {scales}"]
