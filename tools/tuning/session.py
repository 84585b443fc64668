"""The search: rounds of draw, build, gates and timing.

Whatever is learnt is in the leaderboard at once, so that a search which is killed goes on where it was.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from building import run

from .build import SHORT, Builder
from .leaderboard import Entry, Leaderboard, Sighting
from .space import Candidate, Scored, Space, propose

if TYPE_CHECKING:
    from cutlass_fmha.bench.cases import Case

JUDGE = Path(__file__).with_name("judge.py")
HANG_S = 900.0  # what takes a candidate's process longer will never end
LOOK_S, CONFIRM_S = 0.05, 0.25  # of GPU time for each row and case: at first, and for acceptance
ALL_DTYPES = tuple(sorted(SHORT))


class EvaluationError(RuntimeError):
    """Candidates could not be run, and none of them is to blame."""


@dataclass(frozen=True)
class Target:
    """Cases of one head dim whose times count together, the candidates for them, and the rows to beat."""

    name: str
    cases: tuple[Case, ...]
    space: Space
    incumbents: tuple[Candidate, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({case.dtype for case in self.cases}))


@dataclass(frozen=True)
class Job:
    """A candidate to judge for a target: in which dtypes, and whether for acceptance or at first."""

    target: Target
    candidate: Candidate
    dtypes: tuple[str, ...]
    confirm: bool

    def specification(self, extension: Path, device: int) -> dict[str, Any]:
        return {
            "extension": str(extension),
            "device": device,
            "tag": self.candidate.tag,
            "dtypes": self.dtypes,
            "cases": [asdict(case) for case in self.target.cases],
            "incumbents": [row.tag for row in self.target.incumbents],
            "budget_s": CONFIRM_S if self.confirm else LOOK_S,
        }


Judge = Callable[[Path, Job], "Sighting | tuple[str, str]"]
"""An extension and a job -> a timing run, or (fate, reason)."""


def judge_in_a_process(
    directory: Path, device: int = 0, command: Sequence[str] = (sys.executable, str(JUDGE)), hang_s=HANG_S
) -> Judge:
    """Judges each job in a process of its own. ``directory``: for what it is told, tells and logs."""

    def judge(extension: Path, job: Job) -> Sighting | tuple[str, str]:
        specification, result = directory / "job.json", directory / "result.json"
        specification.write_text(json.dumps(job.specification(extension, device)))
        result.unlink(missing_ok=True)
        status, output = run([*command, str(specification), str(result)], directory / "judge.log", hang_s)
        if status is None:
            return "crash", f"no answer within {hang_s:.0f} s"
        if status < 0:
            return "crash", f"ended by signal {-status} ({signal.Signals(-status).name})"
        if status or not result.exists():
            last = ["it said nothing", *filter(None, map(str.strip, output.splitlines()))][-1]
            raise EvaluationError(f"the judge failed: {last} (its log: {directory / 'judge.log'})")
        found = json.loads(result.read_text())
        if (us := found.pop("us", None)) is None:
            return next(iter(found.items()))
        keys = {row.tag: row.key for row in job.target.incumbents}
        own = {case: times.pop(job.candidate.tag) for case, times in us.items()}
        others = {case: {keys[tag]: t for tag, t in times.items()} for case, times in us.items()}
        return Sighting(own, others)

    return judge


@dataclass
class Search:
    """A search for ``targets``.

    own_builder: compiles what is to be accepted for the architecture it is made for, when ``builder``
    compiles for another one to run it here (a proxy, an emulation): registers and spills differ.
    per_round: candidates drawn per target and round. limit, limit_s: candidates, and seconds after which none
    is drawn any more; what gained once is confirmed all the same.
    """

    board: Leaderboard
    targets: Sequence[Target]
    builder: Builder
    judge: Judge
    own_builder: Builder | None = None
    seed: int = 0
    per_round: int = 8
    limit: int | None = None
    limit_s: float | None = None
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic

    def run(self) -> None:
        """Search until a limit, or until nothing is left."""
        begin, left = self.clock(), math.inf if self.limit is None else self.limit
        going = True
        while going:
            self.board.rounds += 1
            going = False
            for target in self.targets:
                confirm = self.board.of(target.name, "promising")
                late = self.limit_s is not None and self.clock() - begin >= self.limit_s
                drawn = [] if late else self.draw(target, int(min(self.per_round, left)))
                left -= len(drawn)
                if confirm or drawn:
                    fates = ", ".join(f"{count} {fate}" for fate, count in self.board.counts().items())
                    self.say(f"round {self.board.rounds}, {target.name}: {len(drawn)} candidates | {fates}")
                    self.round(target, confirm, drawn)
                    going = True

    def draw(self, target: Target, count: int) -> list[Entry]:
        known = {*target.incumbents, *(entry.candidate for entry in self.board.of(target.name))}
        seed = f"{self.seed} {target.name} {self.board.rounds}"
        drawn = propose(target.space, known, self.parents(target), count, seed)
        return [Entry(target.name, candidate) for candidate in drawn]

    def parents(self, target: Target) -> list[Scored]:
        """Candidates that ran, and the manifest's rows by the latest times that there are of them."""
        ran = [entry for entry in self.board.of(target.name) if entry.sightings]
        latest = ran[-1].sightings[-1] if ran else None
        scored = [(entry.gain, entry.candidate) for entry in ran]
        return scored + [(standing(row, latest) if latest else 1.0, row) for row in target.incumbents]

    def round(self, target: Target, confirm: Sequence[Entry], drawn: Sequence[Entry]) -> None:
        """What gained once comes again, in all dtypes."""
        wanted = {entry.candidate: target.dtypes for entry in drawn}
        wanted |= {entry.candidate: ALL_DTYPES for entry in confirm}
        built = self.builder.build(wanted, dict.fromkeys(target.incumbents, target.dtypes))
        kept = {e.candidate: ALL_DTYPES for e in confirm if e.candidate not in built.failed}
        if self.own_builder is not None and kept:
            own = self.own_builder.build(kept, {})
            built.failed.update(own.failed)
            for candidate, complaints in own.complaints.items():
                built.complaints[candidate] = [*built.complaints.get(candidate, []), *complaints]
        for entry in (*confirm, *drawn):
            c, again = entry.candidate, bool(entry.fate)
            entry.registers = built.registers.get(c, entry.registers)
            if c in built.failed:
                entry.fate, entry.reason = "compile", built.failed[c]
            elif complaints := built.complaints.get(c):
                entry.fate, entry.reason = "resources", "; ".join(complaints)
            else:
                result = self.judge(built.extension, Job(target, c, wanted[c], again))
                if isinstance(result, Sighting):
                    entry.see(result)
                else:
                    entry.fate, entry.reason = result
            if not again:
                self.board.entries.append(entry)
            self.board.save()
            if entry.fate in ("promising", "accepted"):
                self.say(f"{entry.fate}: {target.name} {c.key}: {entry.reason}")


def standing(row: Candidate, sighting: Sighting) -> float:
    """How a row of the manifest did against the best of them."""
    return statistics.geometric_mean(
        min(times.values()) / times[row.key] for times in sighting.incumbents_us.values()
    )
