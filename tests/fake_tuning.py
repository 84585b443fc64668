"""A tuner's builder and GPU that exist on every machine: fates and times follow from a candidate's columns.

As a program it runs a search on them, so that a test can kill it: fake_tuning.py LEADERBOARD. It prints the
candidates whose results it has recorded.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from tuning.build import Built, Stopped, Wanted
from tuning.candidate import Candidate
from tuning.evaluate import Record, TargetJobs
from tuning.leaderboard import Leaderboard, Sighting
from tuning.progress import Progress
from tuning.session import Plan, Session
from tuning.space import Space
from tuning.targets import Target, make_targets
from tuning.verdict import judge

ABOUT = {"gpu": "a GPU", "arch": 90, "mma_passes": 1, "shared_kib": 99, "kernel_hash": "k", "nvcc": "13.0.88"}
HANG_S = 1200.0  # what takes longer will never end
INCUMBENT = Candidate(64, 64, 64, 4, 1, 2, 2, True, False, "cp_async_16")


def dense() -> list[Target]:
    return make_targets(["dense"], [], [64])


@dataclass
class FakeBuilder:
    """``refuses``: what nvcc says to a candidate, or None. ``spills``: likewise of its machine code."""

    refuses: Callable[[Candidate], str | None] = lambda c: None
    spills: Callable[[Candidate, tuple[str, ...]], str | None] = lambda c, dtypes: None
    #: Builds after so many last until stop().
    endless_after: int | None = None
    built: list[tuple[Wanted, Wanted]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def build(self, name: str, wanted: Wanted, incumbents: Wanted | None = None) -> Built:
        self.built.append((dict(wanted), dict(incumbents or {})))
        if self.endless_after is not None and len(self.built) > self.endless_after:
            assert self.stopped.wait(HANG_S), "nobody stopped the build"
            raise Stopped
        failed = {c: words for c in wanted if (words := self.refuses(c))}
        left = {c: dtypes for c, dtypes in wanted.items() if c not in failed}
        complaints = {c: [words] for c, dtypes in left.items() if (words := self.spills(c, dtypes))}
        return Built(Path(name), failed, complaints, dict.fromkeys(left, 128))

    def stop(self) -> None:
        self.stopped.set()


@dataclass
class FakeGpu:
    """``us``: a candidate's time in its n-th timing run. ``wrong``: what the parity gate says, or None."""

    us: Callable[[Candidate, int], float] = lambda c, run: 100.0
    wrong: Callable[[Candidate], str | None] = lambda c: None
    runs: list[tuple[str, Candidate, bool]] = field(default_factory=list)
    log: TextIO | None = None

    def evaluate(self, extension: Path, work: Sequence[TargetJobs], record: Record) -> None:
        for one in work:
            for job in one.jobs:
                before = sum(c == job.candidate and name == one.target.name for name, c, _ in self.runs)
                self.runs.append((one.target.name, job.candidate, job.confirm))
                if reason := self.wrong(job.candidate):
                    record(one.target, job.candidate, "parity", reason)
                else:
                    times = {case.name: self.us(job.candidate, before) for case in one.target.cases}
                    rows = {case.name: {i.key: 100.0 for i in one.incumbents} for case in one.target.cases}
                    judgement = judge(times, rows)
                    sighting = Sighting(times, rows, judgement.geomean, judgement.worst)
                    record(one.target, job.candidate, "times", sighting)
                if self.log:
                    print(job.candidate.key, file=self.log, flush=True)


def session(
    board: Leaderboard,
    builder: FakeBuilder,
    gpu: FakeGpu,
    plan: Plan,
    own: FakeBuilder | None = None,
    targets: Sequence[Target] | None = None,
) -> Session:
    """A search for the benchmark's dense cases of head dim 64, against one row."""
    targets = targets or dense()
    spaces = {target.name: Space(90, target.head_dim) for target in targets}
    incumbents = {target.name: [INCUMBENT] for target in targets}
    quiet = Progress(plan.limit_s, plan.limit, io.StringIO())
    return Session(board, targets, spaces, incumbents, builder, gpu, plan, quiet, own)


def main(path: str) -> None:
    board = Leaderboard.resume(Path(path), ABOUT)
    gpu = FakeGpu(us=lambda c, run: 90.0 if c.stages == 3 else 120.0, log=sys.stdout)
    session(board, FakeBuilder(), gpu, Plan(per_round=6)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
