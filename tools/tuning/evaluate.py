"""Runs a scratch extension's candidates in a worker process, and goes on without the one that ended it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .candidate import Candidate
from .leaderboard import Sighting
from .space import Limits
from .targets import Target

WORKER = Path(__file__).with_name("worker.py")
START_S = 180.0  # importing torch and making a context, on a cold machine
HANG_S = 60.0  # no step of the worker takes that much longer than it says
LOOK_S, CONFIRM_S = 0.05, 0.25  # of GPU time for each row and case: at first, and for acceptance


class EvaluationError(RuntimeError):
    """Candidates could not be run, and none of them is to blame."""


@dataclass(frozen=True)
class Job:
    """A candidate to run for a target: in which dtypes, and whether for acceptance or a first look."""

    target: Target
    candidate: Candidate
    dtypes: tuple[str, ...]
    incumbents: tuple[Candidate, ...]
    confirm: bool = False

    def specification(self) -> dict[str, Any]:
        return {
            "tag": self.candidate.tag,
            "dtypes": self.dtypes,
            "full_gate": self.confirm,
            "cases": [asdict(case) for case in self.target.cases],
            "incumbents": {incumbent.tag: incumbent.key for incumbent in self.incumbents},
            "budget_s": CONFIRM_S if self.confirm else LOOK_S,
        }


Record = Callable[[Job, "str", "Sighting | str"], None]
"""Called with a job and what is known: ("parity", reason) and so on, or ("times", Sighting)."""


@dataclass
class Evaluator:
    """Runs extensions on one GPU. ``directory``: for the worker's specification and its log."""

    directory: Path
    arch: int
    device: int = 0
    mma_passes: int = 1
    limits: Limits = field(default_factory=Limits)
    hang_s: float = HANG_S
    start_s: float = START_S
    command: list[str] = field(default_factory=lambda: [sys.executable, str(WORKER)])

    def evaluate(self, extension: Path, jobs: Sequence[Job], record: Record) -> None:
        """Run all jobs; each one's result is recorded as soon as it is known. Raises EvaluationError."""
        left = list(jobs)
        while left:
            left = left[self._attempt(extension, left, record) :]

    def _attempt(self, extension: Path, jobs: Sequence[Job], record: Record) -> int:
        """One process for all jobs. How many are done when it ends; the last of them may have ended it."""
        specification, log = self.directory / "work.json", self.directory / "worker.log"
        settings = {name: getattr(self, name) for name in ("arch", "device", "mma_passes")}
        settings |= {"extension": str(extension), "shared_per_sm": self.limits.shared_per_sm}
        specification.write_text(json.dumps({**settings, "jobs": [job.specification() for job in jobs]}))
        done, begun, complaint = 0, False, ""
        with (
            log.open("w") as out,
            subprocess.Popen(
                [*self.command, str(specification)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                bufsize=0,
                start_new_session=True,  # an interrupt is for us, who then end it
            ) as process,
        ):
            try:
                for event in self._events(process):
                    kind = event.pop("event")
                    begun = begun or kind == "begin"
                    if kind == "failed":
                        complaint = event["reason"]
                    elif kind == "dropped":
                        record(jobs[done], event["fate"], event["reason"])
                    elif kind == "times":
                        record(jobs[done], "times", Sighting(**event))
                    done += kind in ("dropped", "times")
                if not complaint:
                    process.wait(self.hang_s)
            except subprocess.TimeoutExpired:
                complaint = "the process did not end"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        status = process.returncode
        if done < len(jobs):
            if not begun or (not complaint and status >= 0):
                raise EvaluationError(f"the worker failed: {complaint or _last_line(log)} (its log: {log})")
            reason = complaint or f"ended by signal {-status} ({signal.Signals(-status).name})"
            record(jobs[done], "crash", reason)
        return done + 1

    def _events(self, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        """The worker's lines until it closes its end; "failed" after a silence."""
        assert process.stdout is not None
        patience = self.start_s
        while select.select([process.stdout], [], [], max(0.0, patience))[0]:
            if not (line := process.stdout.readline()):
                return
            event = json.loads(line)
            patience = self.hang_s + event.pop("seconds", 0.0)  # a step that takes long says so
            yield event
        yield {"event": "failed", "reason": f"no answer within {patience:.0f} s"}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
