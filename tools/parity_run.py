"""A long, repeatable parity run of the rows at hand: problems drawn by hypothesis, each compared with fp64.

    python tools/parity_run.py --gradients --problems 10000 --seconds 500 --report benchmarks/results/mixed

Every problem is drawn together with the row that runs it, of the architecture at hand: a scored one, or one of those
that compute gradients. With --beside so many of each op beside attention are, with its gradients. A mismatch ends its
process, which tells at once the line that repeats it: alone, or last of an op's. Where --seconds end a run, it didn't
pass. Runs on a GPU, or on the rows of a simulator build, which tools/simulate.py makes, plain ones too. The same seed
and number of processes draw the same problems.
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
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, field, replace
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
from problems import GROUPS, is_short, listed
from source_hash import source_hash


@dataclass
class Tally:
    """What ran: rows or ops, features, parts of the tolerance, and lines that tell the problem. What failed."""

    ran: list[tuple[str, list[str], float, str]] = field(default_factory=list)
    failure: str = ""

    @property
    def worst(self) -> tuple[float, str]:
        return max(((ratio, line) for _, _, ratio, line in self.ran), default=(0.0, ""))

    @property
    def rows(self) -> Counter[str]:
        return Counter(row for row, *_ in self.ran)

    def add(self, other: Tally) -> None:
        self.ran += other.ran
        self.failure = self.failure or other.failure

    def fail(self, told: str) -> None:
        self.failure = told
        print(told, file=sys.stderr, flush=True)  # other processes may go on for long

    def conclude(self, seconds: float) -> int:
        what = f"{len(self.ran)} problems on {len(self.rows)} rows"
        print(f"{what} in {seconds:.0f} s, worst ratio {self.worst[0]:.3f}")
        return int(bool(self.failure))


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when nothing failed, 1 with the line that repeats a mismatch, 2 when nothing can run."""
    parser = argparse.ArgumentParser(prog="parity_run", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--problems", type=int, default=1000, metavar="N", help="to draw")
    add("--seed", type=int, default=1, metavar="N", help="of the draw")
    add("--processes", type=int, default=8, metavar="N", help="that share the work")
    add("--longest", type=int, default=700, metavar="N", help="sequences at most")
    add("--rows", default="", metavar="REGEX", help="only rows, or ops, in whose name it is found")
    add("--gradients", action="store_true", help="rows that compute them, in place of scored ones")
    add("--seconds", type=float, metavar="N", help="draw nothing after so long; the run then is not whole")
    add("--beside", action="store_true", help="so many problems of each op beside attention")
    add("--report", type=Path, metavar="DIR", help="where a report is written")
    add("--problem", metavar="JSON", help="run this one problem, on the row that --rows names")
    add("--overflowing", action="store_true", help="that problem, with dO so large that dS is beyond float16")
    asked = parser.parse_args(argv)
    kind = "op" if asked.beside else "row of gradients" if asked.gradients else "scored row"
    named = [] if asked.beside else rows_named(asked.rows, asked.gradients)
    rows = [*ops_beside(asked.rows)] if asked.beside else [row.name for row in named]
    asked.wanted = asked.problems * (len(rows) if asked.beside else 1)
    may_differ = not asked.report or gpu.simulated()  # a simulator's report says what it was built from
    reason = gpu.unusable() or (None if may_differ else gpu.other_sources())
    if reason is not None or not (rows or asked.problem):
        print(f"parity_run: {reason or f'no {kind} under test has {asked.rows!r} in its name'}", file=sys.stderr)
        return 2
    if asked.problem:  # of a line that a run printed
        fields = {key: tuple(x) if isinstance(x, list) else x for key, x in json.loads(asked.problem).items()}
        tally, seed = Tally(), int(os.environ.get("CUTLASS_FMHA_SIMULATOR_SEED", "0"))
        every = {row.name: row for row in (*_C.rows(), *gpu.scored_rows(), *gpu.backward_rows())}
        for row in (every[name] for name in every if name == asked.rows):
            judge(row, problems.Problem(**fields), tally, seed, asked.overflowing)
        if not tally.failure:
            print(f"agrees on {len(tally.rows)} rows, worst ratio {tally.worst[0]:.3f}")
        return 0 if tally.ran and not tally.failure else 1
    begin = time.perf_counter()
    tally = run(asked)
    seconds = time.perf_counter() - begin
    missing = sorted(set(rows) - set(tally.rows))
    if asked.report:
        print(f"report: {write(asked, tally, seconds, missing)}")
    status, whole = tally.conclude(seconds), not missing and len(tally.ran) >= asked.wanted
    if not status and not whole:
        told = f"{len(tally.ran)} of {asked.wanted} problems ran; rows without one: {missing or 'none'}"
        print(f"parity_run: the run is not whole: {told}", file=sys.stderr)
    return status or int(not whole)


def rows_named(expression: str, gradients: bool) -> list[Any]:
    return [row for row in (gpu.backward_rows if gradients else gpu.scored_rows)() if re.search(expression, row.name)]


def run(asked: argparse.Namespace) -> Tally:
    end = math.inf if asked.seconds is None else time.time() + asked.seconds
    shares = filter(None, (len(range(n, asked.problems, asked.processes)) for n in range(asked.processes)))
    jobs = [(asked, share, asked.seed + n * 1_000_003, end) for n, share in enumerate(shares)]
    if len(jobs) == 1:
        return draw(jobs[0])
    total = Tally()
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(len(jobs), spawn, torch.set_num_threads, (1,)) as pool:
        try:
            for done in futures.as_completed([pool.submit(draw, job) for job in jobs]):
                total.add(done.result())
                print(f"{len(total.ran)} of {asked.wanted} problems", flush=True)
        except futures.BrokenExecutor:  # the others are ended, too
            total.fail(total.failure or "parity_run: a process died, and what it ran is not known")
    return total


def draw(job: tuple[argparse.Namespace, int, int, float]) -> Tally:
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
            judge(*drawn, tally, seed + len(tally.ran))

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
        if len(tally.ran) < count:
            run(drawn)

    with contextlib.suppress(unittest.SkipTest):
        agrees()


def ops_beside(expression: str) -> dict[str, tuple[st.SearchStrategy[Any], Callable[..., None]]]:
    """Of each op beside attention: arguments of what compares it, with its gradients, and that."""
    import test_parity_beside as rows  # which no simulator's bare package has all of
    import test_parity_helpers as caches
    import test_parity_rope as heads

    dtypes, turned = {"dtype": st.sampled_from(caches.DTYPES)}, st.fixed_dictionaries({"p": heads.problems()})
    ops = {
        "rms_norm": (rows.norms(), rows.run_norm),
        "gated": (rows.units(), rows.run_gated),
        "swiglu_mlp": (rows.mlps(), rows.run_mlp),
        "rotary_qk": (turned, heads.check_rotary),
        "qk_norm_rope": (turned, heads.check_norm),
        "qk_norm_rope_to_cache": (st.fixed_dictionaries(caches.NEW_ROWS | dtypes), heads.check_to_cache),
        "append": (st.fixed_dictionaries(caches.APPENDS | dtypes), caches.check_append),
    }
    return {op: found for op, found in ops.items() if re.search(expression, op)}


def check_beside(expression: str, count: int, seed: int, tally: Tally, end: float) -> None:
    """Runs so many problems of each of these ops; what they allocate is NaN before it is written."""
    import test_parity_helpers

    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with mock.patch.object(test_parity_helpers, "DEVICE", gpu.device()):
        for op, (strategy, check) in ops_beside(expression).items():
            if not tally.failure:
                own, line = Tally(), f"--rows '^{op}$' --problems {count} --seed {seed} --processes 1"
                run_drawn(strategy, partial(judge_op, op, check, own, seed, line), count, seed, own, end)
                tally.add(own)
    torch.use_deterministic_algorithms(deterministic)


def judge_op(op: str, check: Callable[..., None], tally: Tally, seed: int, line: str, drawn: dict[str, Any]) -> None:
    oracle_helpers.worst = 0.0
    try:
        with mock.patch.dict(os.environ, simulation(gpu.rows_arch(), seed + len(tally.ran))):
            check(**drawn)
    except Exception:  # a sticky CUDA error, too: nothing can be trusted after it
        tally.fail(f"{op}: {drawn}: {traceback.format_exc(limit=-2)}python tools/parity_run.py --beside {line}")
        return
    fields = drawn["p"]._asdict() if "p" in drawn else drawn
    told = [f"{name} {x}" for name, x in fields.items() if isinstance(x, (str, bool, torch.dtype))]
    tally.ran.append((op, told, oracle_helpers.worst, f"{op}: {drawn}"))


def simulation(arch: int | None, seed: int) -> dict[str, str]:
    names = ("CUTLASS_FMHA_SIMULATED_ARCH", "CUTLASS_FMHA_FORCE_ARCH", "CUTLASS_FMHA_SIMULATOR_SEED")
    return dict(zip(names, map(str, (arch, arch, seed)), strict=True)) if gpu.simulated() else {}


def check_listed(row: Any, seed: int, tally: Tally) -> None:
    """Runs the tests' listed problems that take little time, and stops at the first mismatch."""
    if gradients := row.family.startswith("backward"):  # by seeds which say how they are launched
        every = enumerate(backward_launch.listed(row))
        made = [replace(each, seed=each.seed or 3 * n + len(each.features) % 2) for n, each in every]
    else:
        made = [*itertools.chain(*GROUPS.values())] if row.takes_features else listed()
        made = [problem for problem in dict.fromkeys(launches.fit(each, row) for each in made) if is_short(problem)]
    for number, problem in enumerate(made):
        if not tally.failure:
            judge(row, problem, tally, seed + number)
    if gradients and row.dtype == "float16" and not tally.failure:
        for problem in backward_launch.OVERFLOWING:
            judge(row, problem, tally, overflowing=True)


def judge(row: Any, problem: Any, tally: Tally, seed: int = 0, overflowing: bool = False) -> None:
    """One problem on one row. ``seed``: of every order that a GPU leaves open, where that is a simulator."""
    gradients = row.family.startswith("backward")
    problem = (backward_launch if gradients else launches).fit(problem, row)
    line = f"python tools/parity_run.py --rows {row.name} --problem '{json.dumps(asdict(problem))}'"
    line += " --overflowing" * overflowing
    # Sums of gradients in a fixed order await blocks before, which another seed runs afterwards.
    settings = simulation(row.arch, 0 if gradients else seed)
    line = " ".join([*(f"{name}={value}" for name, value in settings.items()), line])
    try:
        with mock.patch.dict(os.environ, settings):
            made_by = backward_launch.BackwardLaunch
            make = (made_by.overflowing if overflowing else made_by.drawn) if gradients else launches.Launch.of
            launch = make(row, problem, gpu.device())
            launch.run()
        errors, intact = launch.errors(), launch.intact()
    except Exception as error:  # a sticky CUDA error, too: nothing can be trusted after it
        tally.fail(f"{type(error).__name__}: {error}\n{line}")
        return
    tally.ran.append((row.name, problem.features, errors.worst, line))
    if errors.complaint or not errors.worst <= 1.0 or not intact:
        what = errors.complaint or (f"{errors}" if intact else "it wrote outside its outputs")
        tally.fail(f"{row.name}: {problem}: {what}\n{line}")


def write(asked: argparse.Namespace, tally: Tally, seconds: float, missing: list[str]) -> Path:
    if gpu.simulated():
        build = {key: str(value) for key, value in _C.build_info().items()}
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        machine = {"gpu": "simulator", "mode": "simulated", "arch": gpu.rows_arch(), "build": build, "date": date}
    else:
        machine = parity_report.environment(gpu.rows_arch(), gpu.mode(), source_hash())
    features = Counter(itertools.chain.from_iterable(features for _, features, _, _ in tally.ran))
    ratios = {row: round(ratio, 4) for ratio, row in sorted((ratio, row) for row, _, ratio, _ in tally.ran)}
    content = {
        "kind": "cutlass_fmha parity run",
        **{x: vars(asked)[x] for x in ("gradients", "beside", "wanted", "seed", "processes", "longest")},
        "passed": not tally.failure and not missing and len(tally.ran) >= asked.wanted,
        "problems": len(tally.ran), "seconds": round(seconds, 1), "limit_seconds": asked.seconds,
        "worst_ratio": round(tally.worst[0], 4), "worst": tally.worst[1], "failure": tally.failure,
        "rows_missing": missing, "features": dict(features.most_common()), "rows": dict(sorted(tally.rows.items())),
        "ratios": dict(sorted(ratios.items())), "source_hash": source_hash(), **machine,
    }  # fmt: skip
    kind = "-beside" if asked.beside else "-gradients" if asked.gradients else ""
    return parity_report.write(asked.report, content, f"{kind}-{asked.seed}")


if __name__ == "__main__":
    sys.exit(main())
