"""Runs a scratch extension's candidates in a worker process, and finds the one that ended it, if one did."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .candidate import Candidate
from .leaderboard import Sighting
from .space import Limits
from .targets import Target
from .verdict import judge

WORKER = Path(__file__).with_name("worker.py")
FAILED = 3  # the worker's exit status after an error of CUDA's
START_S = 180.0  # importing torch and making a context, on a cold machine
HANG_S = 60.0  # no step of the worker takes that much longer than it says
Record = Callable[[Target, Candidate, str, "Sighting | str"], None]
"""Called with target, candidate and what is known: ("parity", reason) and so on, or ("times", Sighting)."""


class EvaluationError(RuntimeError):
    """Candidates could not be run, and none of them is to blame."""


@dataclass(frozen=True)
class Job:
    """A candidate to run: for which dtypes, and whether for acceptance (the whole gate) or a first look."""

    candidate: Candidate
    dtypes: tuple[str, ...]
    confirm: bool = False


@dataclass(frozen=True)
class TargetJobs:
    """The jobs of one target; ``budget_s``: seconds of GPU time for each candidate and case."""

    target: Target
    incumbents: tuple[Candidate, ...]
    jobs: tuple[Job, ...]
    budget_s: float


@dataclass
class _End:
    """How an attempt ended: not well, with the (target, tag) that was at work, if one was."""

    reason: str
    guilty: tuple[str, str] | None


@dataclass
class Evaluator:
    """Runs extensions on one GPU. ``directory``: for the worker's specification and its log."""

    directory: Path
    arch: int
    device: int = 0
    mma_passes: int = 1
    hang_s: float = HANG_S
    start_s: float = START_S
    limits: Limits = field(default_factory=Limits)
    command: list[str] = field(default_factory=lambda: [sys.executable, str(WORKER)])

    def evaluate(self, extension: Path, work: Sequence[TargetJobs], record: Record) -> None:
        """Run all jobs; each one's result is recorded as soon as it is known. Raises EvaluationError."""
        pending = [list(work)]
        while pending:
            batch = pending.pop()
            done: set[tuple[str, str]] = set()
            end = self._attempt(extension, batch, record, done)
            if end is None:
                continue
            if end.guilty is not None:
                self._blame(batch, end.guilty, end.reason, record)
                done.add(end.guilty)
            left = _without(batch, done)
            count = sum(len(one.jobs) for one in left)
            if end.guilty is None and count == 1:
                self._blame(left, (left[0].target.name, left[0].jobs[0].candidate.tag), end.reason, record)
            elif end.guilty is None and count > 1:  # who it was is seen when they run apart
                pending += _halves(left)
            elif count:
                pending.append(left)

    def _blame(
        self, work: Sequence[TargetJobs], guilty: tuple[str, str], reason: str, record: Record
    ) -> None:
        for one in work:
            for job in one.jobs:
                if (one.target.name, job.candidate.tag) == guilty:
                    record(one.target, job.candidate, "crash", reason)

    def _attempt(
        self, extension: Path, work: Sequence[TargetJobs], record: Record, done: set[tuple[str, str]]
    ) -> _End | None:
        """One process for all jobs. None when it came to its end."""
        specification = self.directory / "work.json"
        specification.write_text(json.dumps(self._specification(extension, work)))
        log = self.directory / "worker.log"
        reading, writing = os.pipe()
        ready, guilty, complaint, finished = False, None, "", False
        with log.open("w") as out:
            process = subprocess.Popen(
                [*self.command, str(specification), str(writing)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[writing],
                start_new_session=True,  # an interrupt is for us, who then end it
            )
            os.close(writing)
            try:
                for event in self._events(reading):
                    kind = event["event"]
                    if kind == "ready":
                        ready = True
                    elif kind == "begin":
                        guilty = (event["target"], event["tag"]) if event["tag"] else None
                    elif kind == "failed":
                        complaint = event["reason"]
                    elif kind == "hang":
                        complaint = f"no answer within {event['seconds']:.0f} s"
                        break
                    elif kind in ("gate", "times"):
                        self._record(event, work, record, done)
                    finished = kind == "done"
                if not complaint:
                    process.wait(timeout=self.hang_s)
            except subprocess.TimeoutExpired:
                complaint = "the process did not end"
            finally:
                os.close(reading)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        if finished:
            return None
        if not ready or (not complaint and status >= 0):
            raise EvaluationError(f"the worker failed: {complaint or _last_line(log)} (its log: {log})")
        reason = complaint or f"ended by signal {-status} ({signal.Signals(-status).name})"
        return _End(reason, guilty)

    def _events(self, reading: int) -> Iterator[dict[str, Any]]:
        """The worker's lines until it closes its end; an event "hang" after a silence."""
        buffer, patience = b"", self.start_s
        while True:
            if not select.select([reading], [], [], patience)[0]:
                yield {"event": "hang", "seconds": patience}
                return
            chunk = os.read(reading, 65536)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            patience = self.hang_s
            for event in map(json.loads, lines):
                patience = self.hang_s + event.get("seconds", 0.0)  # a step that takes long says so
                yield event

    def _record(
        self, event: dict[str, Any], work: Sequence[TargetJobs], record: Record, done: set[tuple[str, str]]
    ) -> None:
        one = next(one for one in work if one.target.name == event["target"])
        candidate = next(job.candidate for job in one.jobs if job.candidate.tag == event["tag"])
        if event["event"] == "gate":
            if event["reason"] is None:
                return
            record(one.target, candidate, event["fate"], event["reason"])
        else:
            keys = {incumbent.tag: incumbent.key for incumbent in one.incumbents}
            incumbents_us = {
                case: {keys[tag]: us for tag, us in times.items()}
                for case, times in event["incumbents_us"].items()
            }
            judgement = judge(event["us"], incumbents_us)
            sighting = Sighting(
                event["us"], incumbents_us, judgement.geomean, judgement.worst, event["quick"]
            )
            record(one.target, candidate, "times", sighting)
        done.add((one.target.name, candidate.tag))

    def _specification(self, extension: Path, work: Sequence[TargetJobs]) -> dict[str, Any]:
        targets = [
            {
                "name": one.target.name,
                "cases": [asdict(case) for case in one.target.cases],
                "incumbents": [incumbent.tag for incumbent in one.incumbents],
                "budget_s": one.budget_s,
                "candidates": [
                    {"tag": job.candidate.tag, "dtypes": job.dtypes, "full_gate": job.confirm}
                    for job in one.jobs
                ],
            }
            for one in work
        ]
        return {
            "extension": str(extension),
            "arch": self.arch,
            "device": self.device,
            "mma_passes": self.mma_passes,
            "shared_per_sm": self.limits.shared_per_sm,
            "targets": targets,
        }


def _without(work: Sequence[TargetJobs], done: set[tuple[str, str]]) -> list[TargetJobs]:
    left = [
        replace(one, jobs=tuple(job for job in one.jobs if (one.target.name, job.candidate.tag) not in done))
        for one in work
    ]
    return [one for one in left if one.jobs]


def _halves(work: Sequence[TargetJobs]) -> list[list[TargetJobs]]:
    """Two batches with half of the jobs each."""
    singles = [replace(one, jobs=(job,)) for one in work for job in one.jobs]
    middle = len(singles) // 2
    return [_joined(singles[:middle]), _joined(singles[middle:])]


def _joined(singles: Sequence[TargetJobs]) -> list[TargetJobs]:
    joined: dict[str, TargetJobs] = {}
    for one in singles:
        known = joined.get(one.target.name)
        joined[one.target.name] = replace(known, jobs=known.jobs + one.jobs) if known else one
    return list(joined.values())


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
