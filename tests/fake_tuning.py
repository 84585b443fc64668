"""A tuner's builder and GPU that exist on every machine: fates and times follow from a candidate's columns.

As a program it runs a search on them, so that a test can kill it: fake_tuning.py LEADERBOARD. It prints the
candidates whose results it has recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from tuning.build import Built, Wanted
from tuning.candidate import Candidate
from tuning.evaluate import Job, Record
from tuning.leaderboard import Leaderboard, Sighting
from tuning.session import Plan, Session
from tuning.space import Space
from tuning.targets import Target, make_targets

ABOUT = {"gpu": "a GPU", "arch": 90, "mma_passes": 1, "shared_kib": 99, "kernel_hash": "k", "nvcc": "13.0.88"}
HANG_S = 1200.0  # what takes longer will never end
INCUMBENT = Candidate(64, 64, 64, 4, 1, 2, 2, True, False, "cp_async_16")


@dataclass
class FakeBuilder:
    """``refuses``: what nvcc says to a candidate, or None. ``spills``: likewise of its machine code."""

    refuses: Callable[[Candidate], str | None] = lambda c: None
    spills: Callable[[Candidate, tuple[str, ...]], str | None] = lambda c, dtypes: None
    built: list[tuple[Wanted, Wanted]] = field(default_factory=list)

    def build(self, name: str, wanted: Wanted, incumbents: Wanted) -> Built:
        self.built.append((dict(wanted), dict(incumbents)))
        failed = {c: words for c in wanted if (words := self.refuses(c))}
        left = {c: dtypes for c, dtypes in wanted.items() if c not in failed}
        complaints = {c: [words] for c, dtypes in left.items() if (words := self.spills(c, dtypes))}
        return Built(Path(name), failed, complaints, dict.fromkeys(left, 128))


@dataclass
class FakeGpu:
    """``us``: a candidate's time in its n-th timing run. ``wrong``: what the parity gate says, or None.
    ``after``: called when a result is recorded."""

    us: Callable[[Candidate, int], float] = lambda c, run: 100.0
    wrong: Callable[[Candidate], str | None] = lambda c: None
    after: Callable[[Job], None] = lambda job: None
    runs: list[tuple[str, Candidate, bool]] = field(default_factory=list)

    def evaluate(self, extension: Path, jobs: Sequence[Job], record: Record) -> None:
        for job in jobs:
            before = sum((name, c) == (job.target.name, job.candidate) for name, c, _ in self.runs)
            self.runs.append((job.target.name, job.candidate, job.confirm))
            if reason := self.wrong(job.candidate):
                record(job, "parity", reason)
            else:
                cases = [case.name for case in job.target.cases]
                rows = {case: {i.key: 100.0 for i in job.incumbents} for case in cases}
                record(job, "times", Sighting(dict.fromkeys(cases, self.us(job.candidate, before)), rows))
            self.after(job)


def session(
    board: Leaderboard,
    builder: FakeBuilder,
    gpu: FakeGpu,
    plan: Plan,
    own: FakeBuilder | None = None,
    targets: Sequence[Target] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Session:
    """A search for the benchmark's dense cases of head dim 64, against one row."""
    targets = targets or make_targets(["dense"], [], [64])
    spaces = {target.name: Space(90, target.head_dim) for target in targets}
    incumbents = {target.name: [INCUMBENT] for target in targets}
    return Session(board, targets, spaces, incumbents, builder, gpu, plan, say, own)


def main(path: str) -> None:
    board = Leaderboard.resume(Path(path), ABOUT)
    gpu = FakeGpu(
        us=lambda c, run: 90.0 if c.stages == 3 else 120.0,
        after=lambda job: print(job.candidate.key, flush=True),
    )
    session(board, FakeBuilder(), gpu, Plan(per_round=6)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
