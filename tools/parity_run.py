"""A long, repeatable parity run of the rows at hand: problems drawn by hypothesis, each compared with fp64.

    python tools/parity_run.py --problems 20000 --seed 1 --report benchmarks/results/mixed
    python tools/parity_run.py --gradients --problems 10000 --seconds 500 --report benchmarks/results/mixed
    python tools/parity_run.py --beside --problems 2000 --report benchmarks/results/mixed

Every problem is drawn together with the row that runs it, of the architecture at hand: a scored one, or one
of those that compute gradients. With --beside so many of each op beside attention are, with its gradients. A
mismatch ends its process, which tells at once the line that repeats it: alone, or last of an op's. The report
counts problems by feature and by row or op; where --seconds end a run, it didn't pass. Runs on a GPU, or on
the rows of a simulator build, which tools/simulate.py makes, plain ones too. The same seed and number of
processes draw the same problems.
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
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import torch
from hypothesis import strategies as st

from cutlass_fmha import _C

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import backward_launch
import gpu
import launches
import oracle_helpers
import parity_report
import problems
from listed_problems import GROUPS, is_short, listed
from source_hash import source_hash

KIND = "cutlass_fmha parity run"
BESIDE = "python tools/parity_run.py --beside"
#: Seeds of the processes that share a run lie so far apart.
STRIDE = 1_000_003


@dataclass
class Tally:
    """What was drawn and how it went."""

    problems: int = 0
    features: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, float] = field(default_factory=dict)
    worst: float = 0.0
    worst_line: str = ""
    failure: str = ""

    def add(self, other: Tally) -> None:
        self.problems += other.problems
        self.features += other.features
        self.rows += other.rows
        self.ratios |= {row: max(ratio, self.ratios.get(row, 0.0)) for row, ratio in other.ratios.items()}
        if other.worst > self.worst:
            self.worst, self.worst_line = other.worst, other.worst_line
        self.failure = self.failure or other.failure

    def ran(self, row: str, features: Iterable[str], ratio: float, line: str) -> None:
        """One problem, at so much of the tolerance."""
        self.add(Tally(1, Counter(features), Counter([row]), {row: ratio}, ratio, line))

    def fail(self, told: str) -> None:
        self.failure = told
        print(told, file=sys.stderr, flush=True)  # other processes may go on for long

    def conclude(self, seconds: float) -> int:
        """Tells how it went: 0, or 1 for a mismatch."""
        rows = f"{self.problems} problems on {len(self.rows)} rows"
        print(f"{rows} in {seconds:.0f} s, worst ratio {self.worst:.3f}")
        return 1 if self.failure else 0


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when nothing failed, 1 with the line that repeats a mismatch, 2 when nothing can run."""
    parser = argparse.ArgumentParser(prog="parity_run", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--problems", type=int, default=1000, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=1, metavar="N", help="of the draw; default: %(default)s")
    add("--processes", type=int, default=8, metavar="N", help="that share the work; default: %(default)s")
    add("--longest", type=int, default=700, metavar="N", help="sequences at most; default: %(default)s")
    add("--rows", default="", metavar="REGEX", help="only rows in whose name it is found")
    add("--gradients", action="store_true", help="rows that compute them, in place of scored ones")
    add("--seconds", type=float, metavar="N", help="draw nothing after so long; the run then is not whole")
    told = "for <date>-<gpu>-<mode>-<arch>[-gradients|-beside]-<seed>.json"
    add("--beside", action="store_true", help="so many problems of each op beside attention; --rows picks ops")
    add("--report", type=Path, metavar="DIR", help=told)
    add("--problem", metavar="JSON", help="run this one problem, on the row that --rows names")
    arguments = parser.parse_args(argv)
    if arguments.beside:
        kind, rows = "op", [op for op in ops_beside() if re.search(arguments.rows, op)]
    else:
        kind = "row of gradients" if arguments.gradients else "scored row"
        rows = [row.name for row in rows_named(arguments.rows, arguments.gradients)]
    arguments.wanted = arguments.problems * (len(rows) if arguments.beside else 1)
    if (reason := gpu.unusable()) is not None or not (rows or arguments.problem):
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
        print(f"report: {write(arguments, tally, seconds, missing)}")
    status = tally.conclude(seconds)
    if not status and (missing or tally.problems < arguments.wanted):
        told = f"{tally.problems} of {arguments.wanted} problems ran; rows without one: {missing or 'none'}"
        print(f"parity_run: the run is not whole: {told}", file=sys.stderr)
        return 1
    return status


def rows_named(expression: str, gradients: bool) -> list[Any]:
    rows = gpu.backward_rows() if gradients else gpu.scored_rows()
    return [row for row in rows if re.search(expression, row.name)]


def run(arguments: argparse.Namespace) -> Tally:
    """The whole run, by one process or several."""
    end = math.inf if arguments.seconds is None else time.time() + arguments.seconds
    jobs = []
    for number in range(arguments.processes):
        share = len(range(number, arguments.problems, arguments.processes))
        jobs.append((arguments, share, arguments.seed + number * STRIDE, end))
    if len(jobs) == 1:
        return draw(jobs[0])
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(len(jobs), torch.set_num_threads, (1,)) as pool:
        for tally in pool.imap_unordered(draw, jobs):
            total.add(tally)
            print(f"{total.problems} of {arguments.wanted} problems", flush=True)
    return total


def draw(job: tuple[argparse.Namespace, int, int, float]) -> Tally:
    """Runs so many problems of a seed, and stops at the first mismatch or when it is time."""
    asked, count, seed, end = job
    tally = Tally()
    if asked.beside:
        check_beside(asked.rows, count, seed, tally, end)
    else:
        check_drawn(rows_named(asked.rows, asked.gradients), count, seed, asked.longest, tally, end)
    return tally


def check_drawn(rows: Sequence[Any], count: int, seed: int, longest: int, tally: Tally, end: float = math.inf) -> None:
    """Runs so many problems, each on one of the rows, and stops at a mismatch or at the time ``end``."""

    def run(drawn: Any) -> None:
        if drawn[1].num_heads:
            judge(*drawn, tally, seed + tally.problems)

    run_drawn(st.tuples(st.sampled_from(rows), problems.problems(longest)), run, count, seed, tally, end)


def run_drawn(
    strategy: st.SearchStrategy[Any], run: Callable[[Any], None], count: int, seed: int, tally: Tally, end: float
) -> None:
    own = {"deadline": None, "database": None, "suppress_health_check": list(hypothesis.HealthCheck)}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, phases=[hypothesis.Phase.generate], **own)
    @hypothesis.given(strategy)
    def agrees(drawn: Any) -> None:
        if tally.failure or time.time() >= end:
            raise unittest.SkipTest  # which ends the drawing, too
        if tally.problems < count:
            run(drawn)

    with contextlib.suppress(unittest.SkipTest):
        agrees()


def ops_beside() -> dict[str, tuple[st.SearchStrategy[Any], Callable[..., None]]]:
    """Of each op beside attention: arguments of what compares it, with its gradients, and that."""
    import test_parity_beside as rows  # which no simulator's bare package has all of
    import test_parity_helpers as caches
    import test_parity_rope as heads

    dtypes, turned = {"dtype": st.sampled_from(caches.DTYPES)}, st.fixed_dictionaries({"p": heads.problems()})
    return {
        "rms_norm": (rows.norms(), rows.run_norm),
        "gated": (rows.units(), rows.run_gated),
        "swiglu_mlp": (rows.mlps(), rows.run_mlp),
        "rotary_qk": (turned, heads.check_rotary),
        "qk_norm_rope": (turned, heads.check_norm),
        "qk_norm_rope_to_cache": (st.fixed_dictionaries(caches.NEW_ROWS | dtypes), heads.check_to_cache),
        "append": (st.fixed_dictionaries(caches.APPENDS | dtypes), caches.check_append),
    }


def check_beside(expression: str, count: int, seed: int, tally: Tally, end: float) -> None:
    """Runs so many problems of each of these ops; what they allocate is NaN before it is written."""
    import test_parity_helpers

    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with mock.patch.object(test_parity_helpers, "DEVICE", gpu.device()):
        for op, (strategy, check) in ops_beside().items():
            if re.search(expression, op) and not tally.failure:
                own, line = Tally(), f"{BESIDE} --rows '^{op}$' --problems {count} --seed {seed} --processes 1"
                run_drawn(strategy, partial(judge_op, op, check, own, seed, line), count, seed, own, end)
                tally.add(own)
    torch.use_deterministic_algorithms(deterministic)


def judge_op(op: str, check: Callable[..., None], tally: Tally, seed: int, line: str, drawn: dict[str, Any]) -> None:
    oracle_helpers.worst = 0.0
    try:
        with mock.patch.dict(os.environ, simulation(gpu.rows_arch(), seed + tally.problems)):
            check(**drawn)
    except Exception:  # a sticky CUDA error, too: nothing can be trusted after it
        tally.fail(f"{op}: {drawn}: {traceback.format_exc(limit=-2)}{line}")
        return
    fields = drawn["p"]._asdict() if "p" in drawn else drawn
    told = (f"{name} {x}" for name, x in fields.items() if isinstance(x, (str, bool, torch.dtype)))
    tally.ran(op, told, oracle_helpers.worst, f"{op}: {drawn}")


def simulation(arch: int | None, seed: int) -> dict[str, str]:
    """Environment of a simulator."""
    seeded = {"CUTLASS_FMHA_SIMULATED_ARCH": str(arch), "CUTLASS_FMHA_SIMULATOR_SEED": str(seed)}
    return seeded if gpu.simulated() else {}


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
    # Sums of gradients in a fixed order await blocks before, which another seed runs afterwards.
    settings = simulation(row.arch, 0 if gradients else seed)
    line = " ".join([*(f"{name}={value}" for name, value in settings.items()), line])
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
    tally.ran(row.name, problem.features, errors.worst, line)
    if errors.complaint or not errors.worst <= 1.0 or not intact:
        what = errors.complaint or (f"{errors}" if intact else "it wrote outside its outputs")
        tally.fail(f"{row.name}: {problem}: {what}\n{line}")


def repeat(name: str, text: str) -> int:
    """The one problem of a line that a run printed."""
    fields = {key: tuple(x) if isinstance(x, list) else x for key, x in json.loads(text).items()}
    tally, seed = Tally(), int(os.environ.get("CUTLASS_FMHA_SIMULATOR_SEED", "0"))
    rows = {row.name: row for row in (*_C.rows(), *gpu.scored_rows(), *gpu.backward_rows())}
    if name in rows:
        judge(rows[name], problems.Problem(**fields), tally, seed)
    if not tally.failure:
        print(f"agrees on {len(tally.rows)} rows, worst ratio {tally.worst:.3f}")
    return 0 if tally.rows and not tally.failure else 1


def write(arguments: argparse.Namespace, tally: Tally, seconds: float, missing: list[str]) -> Path:
    """Writes the report, with the machine and the versions; returns its path."""
    if gpu.simulated():
        build = {key: str(value) for key, value in _C.build_info().items()}
        machine = {"gpu": "simulator", "mode": "simulated", "arch": gpu.rows_arch(), "build": build}
        machine["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    else:
        machine = parity_report.environment(gpu.rows_arch(), gpu.mode(), source_hash())
    content = {
        "kind": KIND,
        **{x: vars(arguments)[x] for x in ("gradients", "beside", "wanted", "seed", "processes", "longest")},
        "passed": not tally.failure and not missing and tally.problems >= arguments.wanted,
        "problems": tally.problems, "seconds": round(seconds, 1), "limit_seconds": arguments.seconds,
        "worst_ratio": round(tally.worst, 4), "worst": tally.worst_line, "failure": tally.failure,
        "rows_missing": missing,
        "features": dict(tally.features.most_common()),
        "rows": dict(sorted(tally.rows.items())),
        "ratios": {row: round(ratio, 4) for row, ratio in sorted(tally.ratios.items())},
        "source_hash": source_hash(), **machine,
    }  # fmt: skip
    kind = "-beside" if arguments.beside else "-gradients" if arguments.gradients else ""
    return parity_report.write(arguments.report, content, f"{kind}-{arguments.seed}")


if __name__ == "__main__":
    sys.exit(main())
