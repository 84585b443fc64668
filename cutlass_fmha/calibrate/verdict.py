"""How good selection's picks are, held against timings of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass_fmha.calibrate.measurements import Sample
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch import choose
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.errors import UnsupportedError

CLOSE = 0.05
"""A pick within this of the best row counts as right."""


@dataclass(frozen=True)
class Pick:
    """What selection took for a problem, and what would have been best."""

    problem: Problem
    row: str
    us: float
    best_row: str
    best_us: float

    @property
    def loss(self) -> float:
        """Time lost, relative to the best row's."""
        return self.us / self.best_us - 1

    @property
    def right(self) -> bool:
        return self.loss <= CLOSE


class Unjudgeable(ValueError):
    """Timings that say nothing about this build's selection; the message says why."""


def judge(
    samples: Sequence[Sample], device: Device, build: Table, calibration: Calibration | None = None
) -> list[Pick]:
    """Selection's pick for each sample's problem. A skipped row counts with the time of its first call.

    Of ranged and scored rows, only those that are in question count (``choose.contenders``).
    Timings that have no scored row at all judge the choice among the others.
    Raises Unjudgeable when selection takes a row that was never timed: the timings are of another build.
    """
    picks = []
    by_name = {row.name: row for row in build.rows}
    timed = {name for sample in samples for name in sample.rows}
    if not any(row.takes_features and row.name in timed for row in build.rows):
        build = Table(tuple(row for row in build.rows if not row.takes_features), build.compiled_for)
    for sample in samples:
        try:
            row = choose.choose(sample.problem, device, table=build, calibration=calibration).name
        except UnsupportedError as error:
            raise Unjudgeable(f"this build can't run a problem that was timed: {sample.problem}") from error
        if row not in sample.rows:
            raise Unjudgeable(f"the timings have no row {row}, which this build takes for {sample.problem}")
        of_features = {row.name for row in build.rows if row.takes_features and row.name in sample.times}
        known = [by_name[name] for name in sample.times if name in by_name]
        of_features -= {row.name for row in choose.contenders(known, sample.problem)}
        times = {name: us for name, us in sample.times.items() if name not in of_features}
        best = min(times, key=times.__getitem__)
        picks.append(Pick(sample.problem, row, sample.rows[row].us, best, times[best]))
    return picks


def share_right(picks: Sequence[Pick]) -> float:
    return sum(pick.right for pick in picks) / max(1, len(picks))
