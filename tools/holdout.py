"""How often selection picks the right row: times every row of random problems that no calibration has seen, on a GPU,
or judges the present model and calibration by stored timings, without one (docs/selection.md).

    python tools/holdout.py --problems 240 --seed 1 --output holdout.json [--markdown holdout.md]
    python tools/holdout.py --evaluate holdout.json [--markdown holdout.md]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cutlass_fmha.bench.report import table
from cutlass_fmha.bench.runner import CannotMeasure, require_gpu
from cutlass_fmha.bench.timing import percentile
from cutlass_fmha.calibrate import measurements, problems, verdict
from cutlass_fmha.calibrate.measurements import InvalidTimings, Measurements
from cutlass_fmha.calibrate.verdict import Pick
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.any_rows import no_rows

REQUIRED = 0.95
WORST = 12


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--problems", type=int, default=240, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=1, metavar="N", help="of the draw (default: %(default)s)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="FILE", help="measure; all timings go there, as JSON")
    what.add_argument("--evaluate", type=Path, metavar="FILE", help="judge by stored timings alone")
    add("--markdown", type=Path, metavar="FILE", help="write the verdict there as well")
    fit = "also time a calibration's problems, with so many random ones for each head dim: for calibrate"
    add("--with-calibration", type=int, metavar="DRAWN", help=f"{fit} --from-timings, to work on the model")
    arguments = parser.parse_args(argv)
    try:
        taken = measurements.load(arguments.evaluate) if arguments.evaluate else measure(arguments)
        calibration = store.for_device(taken.machine.device)
        picks = verdict.judge(taken.holdout, taken.machine.device, tables.this_build(), calibration)
    except (CannotMeasure, InvalidTimings, verdict.Unjudgeable, store.InvalidCalibration) as error:
        print(f"holdout: {error}", file=sys.stderr)
        return 1
    share = verdict.share_right(picks)
    if arguments.output:
        told = {"costs": str(calibration), "problems": len(picks), "close": verdict.CLOSE}
        measurements.save(taken, arguments.output, {**told, "share_right": round(share, 4)})
    text = markdown(taken, picks, str(calibration))
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 0 if share >= REQUIRED else 1


def measure(arguments: argparse.Namespace) -> Measurements:
    """Times the rows of the drawn problems. Raises CannotMeasure where there is nothing to time them with."""
    require_gpu(0)
    build, machine = tables.this_build(), measurements.this_machine(0)
    if (nothing := no_rows(machine.device, build)) is not None:
        raise CannotMeasure(nothing)
    kinds = measurements.kinds(machine.device, build)
    grid = problems.calibration(kinds, machine.sm_count, machine.limits, arguments.with_calibration)
    held_out = problems.holdout(arguments.problems, arguments.seed, kinds, machine.limits, grid)
    taken, begin = Measurements(machine, seed=arguments.seed), time.perf_counter()
    if arguments.with_calibration:
        taken.calibration = measurements.collect(grid, 0, build, "calibration", measurements.GIVE_UP)
        measurements.save(taken, arguments.output)  # kept, should the rest be interrupted
    taken.holdout = measurements.collect(held_out, 0, build, "holdout")
    taken.wall_s = time.perf_counter() - begin
    measurements.save(taken, arguments.output)
    return taken


def markdown(taken: Measurements, picks: Sequence[Pick], costs: str) -> str:
    machine, dims, worst = taken.machine, [], sorted(picks, key=lambda pick: -pick.loss)[:WORST]
    for dim in (*sorted({pick.problem.head_dim for pick in picks}), "all"):
        own = [pick for pick in picks if dim in ("all", pick.problem.head_dim)]
        lost = [pick.loss for pick in own]
        shares = (verdict.share_right(own), percentile(lost, 0.5), percentile(lost, 0.95), max(lost))
        dims.append((str(dim), str(len(own)), *(f"{share:.1%}" for share in shares)))
    lines = [
        f"# Hold-out: what selection picks on {machine.gpu}\n",
        f"{verdict.share_right(picks):.1%} of {len(picks)} picks are within {verdict.CLOSE:.0%} of the best "
        f"row ({REQUIRED:.0%} are required). Costs: {costs}. Seed {taken.seed}, {machine.date[:10]}, "
        f"cutlass_fmha {machine.package}, torch {machine.torch}.\n",
        *table(("head dim", "problems", "within 5 %", "time lost: median", "p95", "worst"), dims),
        "",
        *(f"- {x.loss:.1%}: {x.row} {x.us:.1f} us, {x.best_row} {x.best_us:.1f} us, {x.problem}" for x in worst),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
