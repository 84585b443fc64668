"""How often selection picks the right row: times every row of random problems that no calibration has seen.

    python tools/holdout.py --problems 240 --seed 1 --output holdout.json [--markdown holdout.md]
    python tools/holdout.py --evaluate holdout.json [--markdown holdout.md]

The first needs a GPU and an installed package, and stores all timings with the verdict; the second judges the
present model and calibration data by stored timings, without a GPU. CUTLASS_FMHA_CALIBRATION=FILE judges a
calibration that is not installed yet. Both end with exit status 1 when less than 95 % of the picks are within
5 % of the best row. How problems are drawn: ``draw`` in cutlass_fmha/calibrate/problems.py.
"""

from __future__ import annotations

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
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
WORST = 12


def main(argv: list[str] | None = None) -> int:
    """Measure or evaluate, print the verdict; 1 when picks are not good enough or can't be judged."""
    arguments = parser().parse_args(argv)
    if (arguments.evaluate is None) == (arguments.output is None):
        print("holdout: either --output FILE (measure) or --evaluate FILE is needed", file=sys.stderr)
        return 2
    try:
        taken = measurements.load(arguments.evaluate) if arguments.evaluate else measure(arguments)
        calibration = store.for_device(taken.machine.device)
        build = tables.this_build()
        picks = verdict.judge(taken.holdout, taken.machine.device, build, calibration)
    except (CannotMeasure, InvalidTimings, verdict.Unjudgeable, store.InvalidCalibration) as error:
        print(f"holdout: {error}", file=sys.stderr)
        return 1
    if arguments.output:
        measurements.save(taken, arguments.output, summary(picks, str(calibration)))
    text = markdown(taken, picks, str(calibration))
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 0 if verdict.share_right(picks) >= REQUIRED else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    result.add_argument("--problems", type=int, default=240, metavar="N", help="default: %(default)s")
    result.add_argument("--seed", type=int, default=1, metavar="N", help="of the draw (default: %(default)s)")
    result.add_argument("--output", type=Path, metavar="FILE", help="measure; all timings go there, as JSON")
    result.add_argument("--evaluate", type=Path, metavar="FILE", help="judge by stored timings alone")
    result.add_argument("--markdown", type=Path, metavar="FILE", help="write the verdict there as well")
    result.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    result.add_argument(
        "--with-calibration",
        type=int,
        metavar="DRAWN",
        help="also time a calibration's problems, with so many random ones for each head dim: what "
        "`python -m cutlass_fmha calibrate --from-timings` fits, to work on the model",
    )
    return result


def measure(arguments: argparse.Namespace) -> Measurements:
    """Times the rows of the drawn problems. Raises CannotMeasure where there is nothing to time them with."""
    require_gpu(arguments.device)
    build = tables.this_build()
    machine = measurements.this_machine(arguments.device)
    if (nothing := no_rows(machine.device, build)) is not None:
        raise CannotMeasure(nothing)
    kinds = measurements.kinds(machine.device, build)
    grid = problems.calibration(kinds, machine.sm_count, machine.limits, arguments.with_calibration)
    held_out = problems.holdout(arguments.problems, arguments.seed, kinds, machine.limits, grid)
    taken = Measurements(machine, seed=arguments.seed)
    begin = time.perf_counter()
    if arguments.with_calibration:
        taken.calibration = measurements.collect(
            grid, arguments.device, build, "calibration", measurements.GIVE_UP
        )
        measurements.save(taken, arguments.output)  # kept, should the rest be interrupted
    taken.holdout = measurements.collect(held_out, arguments.device, build, "holdout")
    taken.wall_s = time.perf_counter() - begin
    measurements.save(taken, arguments.output)
    return taken


# ---- the verdict -------------------------------------------------------------------------------------------


def summary(picks: Sequence[Pick], costs: str) -> dict[str, object]:
    """The verdict as the JSON file holds it."""
    return {
        "costs": costs,
        "problems": len(picks),
        "close": verdict.CLOSE,
        "share_right": round(verdict.share_right(picks), 4),
        "loss_quantiles": {str(q): round(percentile(losses(picks), q), 4) for q in QUANTILES},
    }


def losses(picks: Sequence[Pick]) -> list[float]:
    return [pick.loss for pick in picks]


def markdown(taken: Measurements, picks: Sequence[Pick], costs: str) -> str:
    """The verdict as text that is also Markdown."""
    machine = taken.machine
    share = verdict.share_right(picks)
    worst = sorted(picks, key=lambda pick: -pick.loss)[:WORST]
    lines = [
        f"# Hold-out: what selection picks on {machine.gpu}",
        "",
        f"{share:.1%} of {len(picks)} picks are within {verdict.CLOSE:.0%} of the best row "
        f"({REQUIRED:.0%} are required). Costs: {costs}. Seed {taken.seed}, {machine.date[:10]}, "
        f"cutlass_fmha {machine.package}, torch {machine.torch}.",
        "",
        *table(HEAD, [_line(label, own) for label, own in by_head_dim(picks)]),
        *("", f"Quantiles of the time lost: {_quantiles(picks)}.", ""),
        *table(("lost", "picked", "best", "us / us", "problem"), map(_row, worst)),
    ]
    return "\n".join(lines) + "\n"


HEAD = ("head dim", "problems", "within 5 %", "time lost: median", "p95", "worst")


def by_head_dim(picks: Sequence[Pick]) -> list[tuple[str, list[Pick]]]:
    dims = sorted({pick.problem.head_dim for pick in picks})
    own = [(str(dim), [pick for pick in picks if pick.problem.head_dim == dim]) for dim in dims]
    return [*own, ("all", list(picks))]


def _line(label: str, picks: Sequence[Pick]) -> tuple[str, ...]:
    lost = losses(picks)
    shares = (verdict.share_right(picks), percentile(lost, 0.5), percentile(lost, 0.95), max(lost))
    return label, str(len(picks)), *(f"{share:.1%}" for share in shares)


def _quantiles(picks: Sequence[Pick]) -> str:
    return ", ".join(f"{q:.0%} {percentile(losses(picks), q):.1%}" for q in QUANTILES)


def _row(pick: Pick) -> tuple[str, ...]:
    p = pick.problem
    shape = f"B{p.batch} H{p.num_heads}/{p.num_heads_kv} Sq{p.seqlen_q} Sk{p.seqlen_k} D{p.head_dim}"
    times = f"{pick.us:.1f} / {pick.best_us:.1f}"
    return f"{pick.loss:.1%}", pick.row, pick.best_row, times, f"{shape} {p.dtype} {p.causal}"


if __name__ == "__main__":
    sys.exit(main())
