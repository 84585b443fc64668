"""Runs rows of a simulator build and compares them with the tests' fp64 oracle.

Needs the tests on the path (``load`` puts them there) and a process of its own: it makes a scratch extension
this process's ``cutlass_fmha._C``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from building import load_extension

#: Scores of a problem, and its heads in all batches, that the short list goes up to: tens of milliseconds.
SHORT_SCORES = 2**20
SHORT_BLOCKS = 3000


@dataclass(frozen=True)
class Limits:
    """Which problems a row runs: so many drawn ones, none longer than ``longest``, and the short list."""

    drawn: int = 0
    longest: int = 300
    listed: bool = True


@dataclass
class Tally:
    """A row's problems so far."""

    problems: int = 0
    worst: float = 0.0  # error as a ratio to the tolerance
    seconds: float = 0.0  # in the simulator


class MismatchError(AssertionError):
    """A row gave a wrong result, wrote where it must not, or broke a rule of the GPU."""


def load(extension: Path) -> Any:
    """Make a simulator build this process's ``cutlass_fmha._C``, and the tests' modules importable."""
    module = load_extension(extension)
    if not module.build_info().get("simulator"):
        raise ValueError(f"{extension} is no simulator build")
    return module


def check(row: Any, problem: Any, seed: int, tally: Tally) -> None:
    """Run one problem. Raises MismatchError with what repeats it."""
    launch = make_launch(row, problem)
    os.environ["CUTLASS_FMHA_SIMULATED_ARCH"] = str(row.arch)
    os.environ["CUTLASS_FMHA_SIMULATOR_SEED"] = str(seed)
    begin = time.perf_counter()
    try:
        launch.run()
        tally.seconds += time.perf_counter() - begin
        errors = launch.errors().check() if row.scored else compare(launch, problem).check()
        tally.worst = max(tally.worst, errors.worst)
        if not launch.intact():
            raise AssertionError("it wrote outside its outputs")
    except (AssertionError, RuntimeError) as error:
        raise MismatchError(f"{row.name}, simulator seed {seed}: {problem}\n{problem!r}\n{error}") from error
    tally.problems += 1


def make_launch(row: Any, problem: Any) -> Any:
    import torch

    if row.scored:
        from general import GeneralLaunch

        return GeneralLaunch.of(row, problem, torch.device("cpu"))
    import gpu

    return gpu.Launch.of(row, problem, torch.device("cpu"))


def compare(launch: Any, problem: Any) -> Any:
    import oracle

    lse = launch.lse.view if launch.lse else None
    operands = (launch.out.view, launch.q, launch.k, launch.v)
    return oracle.compare(*operands, launch.scale, problem.causal, lse, problem.exact_scores)


def short_list(row: Any) -> list[Any]:
    """The tests' listed problems that take little time, as the row can take them."""
    if row.scored:
        from general import fit
        from listed_general import GROUPS

        fitting = dict.fromkeys(fit(problem, row) for group in GROUPS.values() for problem in group)
        return [problem for problem in fitting if scores(problem) <= SHORT_SCORES]
    from problems import listed

    return [
        problem
        for problem in listed()
        if problem.runs_on(row.alignment)
        and scores(problem) <= SHORT_SCORES
        and problem.batch * problem.num_heads <= SHORT_BLOCKS
    ]


def scores(problem: Any) -> int:
    return int(problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k)


def check_drawn(row: Any, limits: Limits, seed: int, tally: Tally) -> None:
    """Run problems that hypothesis draws. Raises MismatchError with the smallest one that fails."""
    import hypothesis
    import problems

    strategy: Any
    if row.scored:
        import problems_general

        strategy = problems_general.problems(limits.longest)
    else:
        strategy = problems.problems()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=limits.drawn,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(problem=strategy)
    def agrees(problem: Any) -> None:
        if not row.scored:
            layout = problem.layout if problem.runs_on(row.alignment) else "bshd"
            lengths = (min(problem.seqlen_q, limits.longest), min(problem.seqlen_k, limits.longest))
            problem = replace(problem, seqlen_q=lengths[0], seqlen_k=lengths[1], layout=layout)
        check(row, problem, seed + tally.problems, tally)

    agrees()


def check_rows(rows: Iterable[Any], limits: Limits, seed: int, tell: Callable[[str], None]) -> None:
    """Run each row on what ``limits`` says, and tell a line of a table. Raises MismatchError."""
    import torch

    torch.set_num_threads(1)  # these problems are small, and others may run beside
    tell(f"{'row':44} {'problems':>8} {'worst error':>11} {'seconds':>8}")
    for row in rows:
        tally = Tally()
        for number, problem in enumerate(short_list(row) if limits.listed else []):
            check(row, problem, seed + number, tally)
        if limits.drawn:
            check_drawn(row, limits, seed, tally)
        tell(f"{row.name:44} {tally.problems:8} {tally.worst:11.3f} {tally.seconds:8.2f}")
