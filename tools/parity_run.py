"""A long, repeatable parity run of the rows at hand: problems drawn by hypothesis, each compared with fp64.

    python tools/parity_run.py --problems 20000 --seed 1 --report benchmarks/results/mixed
    python tools/parity_run.py --gradients --problems 10000 --seconds 500 --report benchmarks/results/mixed

Every problem is drawn together with the row that runs it, of the architecture at hand: a scored one, or one
of those that compute gradients. A mismatch ends its process, which tells at once the line that repeats it
alone. The report counts problems by feature and by row; where --seconds end a run, it didn't pass. Runs on a
GPU, or on the rows of a simulator build, which tools/simulate.py makes, plain ones too. The same seed and
number of processes draw the same problems.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import strategies as st

from cutlass_fmha import _C

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import backward_launch
import gpu
import launches
import parity_report
import problems
from listed_problems import GROUPS, is_short, listed
from source_hash import source_hash

KIND = "cutlass_fmha parity run"
#: Seeds of the processes that share a run lie so far apart.
STRIDE = 1_000_003


@dataclass
class Tally:
    """What was drawn and how it went."""

    problems: int = 0
    features: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    worst_line: str = ""
    failure: str = ""

    def add(self, other: Tally) -> None:
        self.problems += other.problems
        self.features += other.features
        self.rows += other.rows
        if other.worst > self.worst:
            self.worst, self.worst_line = other.worst, other.worst_line
        self.failure = self.failure or other.failure

    def fail(self, told: str) -> None:
        self.failure = told
        print(told, file=sys.stderr, flush=True)  # other processes may go on for long

    def conclude(self, seconds: float) -> int:
        """Tells how it went: 0, or 1 for a mismatch."""
        found = f"{self.problems} problems on {len(self.rows)} rows in {seconds:.0f} s"
        print(f"{found}, worst ratio {self.worst:.3f}")
        return 1 if self.failure else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parity_run", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--problems", type=int, default=1000, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=1, metavar="N", help="of the draw; default: %(default)s")
    add("--processes", type=int, default=8, metavar="N", help="that share the work; default: %(default)s")
    add("--longest", type=int, default=700, metavar="N", help="sequences at most; default: %(default)s")
    add("--rows", default="", metavar="REGEX", help="only rows in whose name it is found")
    add("--gradients", action="store_true", help="rows that compute them, in place of scored ones")
    add("--seconds", type=float, metavar="N", help="draw nothing after so long; the run then is not whole")
    told = "for <date>-<gpu>-<mode>-<arch>[-gradients]-<seed>.json"
    add("--report", type=Path, metavar="DIR", help=told)
    add("--problem", metavar="JSON", help="run this one problem, on the row that --rows names")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when nothing failed, 1 with the line that repeats a mismatch, 2 when nothing can run."""
    arguments = build_parser().parse_args(argv)
    rows = [row.name for row in rows_named(arguments.rows, arguments.gradients)]
    if (reason := gpu.unusable()) is not None or not (rows or arguments.problem):
        kind = "row of gradients" if arguments.gradients else "scored row"
        reason = reason or f"no {kind} under test has {arguments.rows!r} in its name"
        print(f"parity_run: {reason}", file=sys.stderr)
        return 2
    if arguments.problem:
        return repeat(arguments.rows, arguments.problem)
    begin = time.perf_counter()
    tally = run(arguments)
    seconds = time.perf_counter() - begin
    missing = sorted(set(rows) - set(tally.rows))
    if arguments.report:
        path = write(arguments, tally, seconds, missing)
        print(f"report: {path}")
    if status := tally.conclude(seconds):
        return status
    if missing or tally.problems < arguments.problems:
        ran = f"{tally.problems} of {arguments.problems} problems ran"
        told = f"the run is not whole: {ran}; rows without one: {missing or 'none'}"
        print(f"parity_run: {told}", file=sys.stderr)
        return 1
    return 0


# ---- drawing -----------------------------------------------------------------------------------------------


def rows_named(expression: str, gradients: bool) -> list[Any]:
    rows = gpu.backward_rows() if gradients else gpu.scored_rows()
    return [row for row in rows if re.search(expression, row.name)]


def run(arguments: argparse.Namespace) -> Tally:
    """The whole run, by one process or several."""
    processes = arguments.processes
    shares = [len(range(number, arguments.problems, processes)) for number in range(processes)]
    end = time.time() + arguments.seconds if arguments.seconds is not None else math.inf
    said = (arguments.longest, end, arguments.rows, arguments.gradients)
    jobs = [(share, arguments.seed + number * STRIDE, *said) for number, share in enumerate(shares)]
    total = Tally()
    if processes == 1:
        return draw(jobs[0])
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        for tally in pool.imap_unordered(draw, jobs):
            total.add(tally)
            print(f"{total.problems} of {arguments.problems} problems", flush=True)
    return total


def draw(job: tuple[int, int, int, float, str, bool]) -> Tally:
    """Runs so many problems of a seed, and stops at the first mismatch or when it is time."""
    count, seed, longest, end, expression, gradients = job
    tally = Tally()
    check_drawn(rows_named(expression, gradients), count, seed, longest, tally, end)
    return tally


def check_drawn(rows: Sequence[Any], count: int, seed: int, longest: int, tally: Tally, end: float = math.inf) -> None:
    """Runs so many problems, each on one of the rows, and stops at a mismatch or at the time ``end``."""
    settings = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @hypothesis.seed(seed)
    @settings
    @hypothesis.given(st.tuples(st.sampled_from(rows), problems.problems(longest)))
    def agrees(drawn: Any) -> None:
        if tally.failure or time.time() >= end:
            raise unittest.SkipTest  # which ends the drawing, too
        if tally.problems < count and drawn[1].num_heads:
            judge(*drawn, tally, seed + tally.problems)

    with contextlib.suppress(unittest.SkipTest):
        agrees()


def check_listed(row: Any, seed: int, tally: Tally) -> None:
    """Runs the tests' listed problems that take little time, and stops at the first mismatch."""
    made = itertools.chain(*GROUPS.values()) if row.takes_features else listed()
    for number, problem in enumerate(dict.fromkeys(launches.fit(problem, row) for problem in made)):
        if is_short(problem) and not tally.failure:
            judge(row, problem, tally, seed + number)


def judge(row: Any, problem: Any, tally: Tally, seed: int = 0) -> None:
    """One problem on one row. ``seed``: of every order that a GPU leaves open, where that is a simulator."""
    gradients = row.family.startswith("backward")
    problem = (backward_launch if gradients else launches).fit(problem, row)
    line = f"python tools/parity_run.py --rows {row.name} --problem '{json.dumps(asdict(problem))}'"
    settings: dict[str, str] = {}
    if gpu.simulated():
        if gradients:  # sums in a fixed order await blocks before, which another seed runs afterwards
            seed = 0
        settings = {"CUTLASS_FMHA_SIMULATED_ARCH": str(row.arch), "CUTLASS_FMHA_SIMULATOR_SEED": str(seed)}
        line = " ".join(f"{name}={value}" for name, value in settings.items()) + f" {line}"
    try:
        with mock.patch.dict(os.environ, settings):
            make = backward_launch.BackwardLaunch.drawn if gradients else launches.Launch.of
            launch = make(row, problem, gpu.device())
            launch.run()
        errors = launch.errors()
        intact = launch.intact()
    except Exception as error:  # a sticky CUDA error, too: nothing can be trusted after it
        tally.fail(f"{type(error).__name__}: {error}\n{line}")
        return
    tally.problems += 1
    tally.rows[row.name] += 1
    tally.features.update(problem.features)
    if errors.worst > tally.worst:
        tally.worst, tally.worst_line = errors.worst, line
    if errors.complaint or not errors.worst <= 1.0 or not intact:
        what = errors.complaint or (f"{errors}" if intact else "it wrote outside its outputs")
        tally.fail(f"{row.name}: {problem}: {what}\n{line}")


def repeat(name: str, text: str) -> int:
    """The one problem of a line that a run printed."""
    fields = {key: tuple(x) if isinstance(x, list) else x for key, x in json.loads(text).items()}
    tally = Tally()
    rows = {row.name: row for row in (*_C.rows(), *gpu.scored_rows(), *gpu.backward_rows())}
    if (row := rows.get(name)) is not None:
        judge(row, problems.Problem(**fields), tally, int(os.environ.get("CUTLASS_FMHA_SIMULATOR_SEED", "0")))
    if not tally.failure:
        print(f"agrees on {len(tally.rows)} rows, worst ratio {tally.worst:.3f}")
    return 0 if tally.rows and not tally.failure else 1


# ---- the report --------------------------------------------------------------------------------------------


def environment() -> dict[str, object]:
    """The machine and the versions."""
    arch = gpu.rows_arch()
    assert arch is not None
    if not gpu.simulated():
        return parity_report.environment(arch, gpu.mode(), source_hash())
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    build = {str(key): str(value) for key, value in _C.build_info().items()}
    said = {"date": now, "gpu": "simulator", "mode": "simulated", "arch": arch}
    return {**said, "source_hash": source_hash(), "build": build}


def write(arguments: argparse.Namespace, tally: Tally, seconds: float, missing: list[str]) -> Path:
    """Writes the report; returns its path."""
    content = {
        "kind": KIND,
        "gradients": arguments.gradients,
        "passed": not tally.failure and not missing and tally.problems >= arguments.problems,
        "problems": tally.problems, "wanted": arguments.problems, "seed": arguments.seed,
        "processes": arguments.processes, "longest": arguments.longest, "seconds": round(seconds, 1),
        "limit_seconds": arguments.seconds,
        "worst_ratio": round(tally.worst, 4), "worst": tally.worst_line, "failure": tally.failure,
        "rows_missing": missing,
        "features": dict(tally.features.most_common()),
        "rows": dict(sorted(tally.rows.items())),
        **environment(),
    }  # fmt: skip
    tail = f"{'-gradients' if arguments.gradients else ''}-{arguments.seed}"
    return parity_report.write(arguments.report, content, tail)


if __name__ == "__main__":
    sys.exit(main())
