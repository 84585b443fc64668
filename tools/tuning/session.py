"""The search itself: rounds of draw, build, gates and timing, the next build beside the present timing.

Whatever is learnt is in the leaderboard at once, so that a search which is killed goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from . import search
from .build import Built, Wanted
from .candidate import DTYPES, Candidate
from .evaluate import Job, Record, TargetJobs
from .leaderboard import FINAL, Entry, Leaderboard, Sighting
from .progress import Progress
from .search import Scored
from .space import Space
from .targets import Target

ALL_DTYPES = tuple(sorted(DTYPES.values()))
LOOK_S, CONFIRM_S = (
    0.05,
    0.25,
)  # seconds of GPU time for each candidate and case: at first, and for acceptance


class Builds(Protocol):
    """What compiles candidates: build.Builder."""

    def build(self, name: str, wanted: Wanted, incumbents: Wanted | None = None) -> Built: ...
    def stop(self) -> None: ...


class Evaluates(Protocol):
    """What runs them: evaluate.Evaluator."""

    def evaluate(self, extension: Path, work: Sequence[TargetJobs], record: Record) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How to search. ``per_round``: candidates drawn per target and round; limits: whichever comes first."""

    strategy: str = "evolve"
    seed: int = 0
    per_round: int = 8
    limit_s: float | None = None
    limit: int | None = None


@dataclass
class Round:
    """What is built together. Entries that gained once come again, for all dtypes: ``confirm``."""

    number: int
    look: list[Entry] = field(default_factory=list)
    confirm: list[Entry] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        return [*self.confirm, *self.look]

    def without(self, entries: Sequence[Entry]) -> Round:
        gone = {id(entry) for entry in entries}
        look, confirm = ([e for e in part if id(e) not in gone] for part in (self.look, self.confirm))
        return Round(self.number, look, confirm)


@dataclass
class Session:
    """A search for ``targets``, each in its space and against the manifest's rows ``incumbents``.

    own_builder: compiles what is to be accepted for the architecture it is made for, when ``builder``
    compiles for another one to run it here (a proxy, an emulation): registers and spills differ.
    """

    board: Leaderboard
    targets: Sequence[Target]
    spaces: Mapping[str, Space]
    incumbents: Mapping[str, Sequence[Candidate]]
    builder: Builds
    evaluator: Evaluates
    plan: Plan
    progress: Progress
    own_builder: Builds | None = None
    clock: Callable[[], float] = time.monotonic
    _in_flight: set[int] = field(default_factory=set)
    _build_s: float = 0.0  # the longest build so far,
    _run_s: float = 0.0  # and the longest run of a round's candidates
    _begin: float = 0.0
    _looked: int = 0  # candidates of this run that were built for a first look
    _decided: int = 0  # that have a final fate
    _phase: str = "building"

    def run(self) -> None:
        """Search until a limit, or until nothing is left. On an interrupt, all is stopped and saved."""
        self._begin = self.clock()
        before = self.board.seconds
        for target in self.targets:
            self.board.set_target(
                target.name,
                [case.name for case in target.cases],
                [c.key for c in self.incumbents[target.name]],
            )
        self.board.save()
        try:
            with ThreadPoolExecutor(1) as executor:
                try:
                    self._rounds(executor)
                except BaseException:
                    self._stop()  # before the executor waits for its thread
                    raise
        finally:
            self.board.seconds = before + self.clock() - self._begin
            self.board.save()

    def _stop(self) -> None:
        for builder in (self.builder, self.own_builder):
            if builder is not None:
                builder.stop()

    def _rounds(self, executor: ThreadPoolExecutor) -> None:
        pending = self._start(executor)
        while pending is not None:
            this, future = pending
            built = self._wait(future, f"round {this.number}: building {len(this.entries)} candidates")
            begin = self.clock()
            this = self._sort_out(this, built)
            pending = self._start(executor)
            self._phase = f"round {this.number}: running {len(this.entries)} of its candidates"
            self._show()
            if this.entries:
                self.evaluator.evaluate(built.extension, self._work(this), self._record)
            self._in_flight -= {id(entry) for entry in this.entries}
            self._build_s = max(self._build_s, built.seconds)
            self._run_s = max(self._run_s, self.clock() - begin)
            if pending is None:  # what gained just now has not been confirmed
                pending = self._start(executor)

    # ---- what to try ---------------------------------------------------------------------------------------

    def _start(self, executor: ThreadPoolExecutor) -> tuple[Round, Future[Built]] | None:
        """Draw a round and begin to build it; None when there is nothing to do, or no time for it."""
        this = self._draw()
        if not this.entries:
            return None
        self.board.rounds = this.number
        self._in_flight |= {id(entry) for entry in this.entries}
        self.board.save()
        self._phase = f"round {this.number}: building {len(this.entries)} candidates"
        self._show()
        return this, executor.submit(self._build, this)

    def _draw(self) -> Round:
        this, first = Round(self.board.rounds + 1), self._looked == 0
        for target in self.targets:
            waiting = [e for e in self.board.of(target.name, "promising") if id(e) not in self._in_flight]
            this.confirm += waiting
            if self._may_look():
                drawn = self._draw_target(target, this.number, first)
                self._looked += len(drawn)
                this.look += drawn
        return this

    def _draw_target(self, target: Target, number: int, first: bool) -> list[Entry]:
        """Candidates without a fate that an interrupted search left, then new ones."""
        left = [e for e in self.board.of(target.name, "drawn") if id(e) not in self._in_flight]
        count = self.plan.per_round - len(left)
        if first:  # the manifest's rows are compiled along with the first round
            count -= min(count // 2, len(self.incumbents[target.name]))
        if self.plan.limit is not None:
            count = min(count, self.plan.limit - self._looked - len(left))
        if count <= 0:
            return left[: self.plan.per_round]
        known = {entry.key for entry in self.board.of(target.name)}
        known |= {candidate.key for candidate in self.incumbents[target.name]}
        try:
            new = search.propose(
                self.spaces[target.name],
                known,
                self._parents(target),
                count,
                self.plan.strategy,
                f"{self.plan.seed} {target.name} {number}",
            )
        except search.Exhausted:
            new = []
        return left + self.board.draw(target.name, new)

    def _may_look(self) -> bool:
        """Whether there is time for a round of new candidates, and one after it that confirms."""
        if self.plan.limit is not None and self._looked >= self.plan.limit:
            return False
        if self.plan.limit_s is None:
            return True
        # What runs now, beside the build of the round in question; that round; and one that confirms.
        now = self._run_s if self._in_flight else 0.0
        needed = max(now, self._build_s) + self._run_s + self._build_s + self._run_s
        return self.clock() - self._begin + needed < self.plan.limit_s

    def _parents(self, target: Target) -> list[Scored]:
        """Candidates that ran, and the manifest's rows by the latest times that there are of them."""
        ran = [entry for entry in self.board.of(target.name) if entry.gain is not None]
        scored = [Scored(entry.candidate, entry.gain or 0.0) for entry in ran]
        scored = [one for one in scored if one.candidate in self.spaces[target.name]]
        whole = [e.sightings[-1] for e in ran if not e.sightings[-1].quick]
        for incumbent in self.incumbents[target.name]:
            gain = _standing(incumbent.key, whole[-1]) if whole else search.prior(incumbent, target)
            scored.append(Scored(incumbent, gain))
        return scored

    # ---- building ------------------------------------------------------------------------------------------

    def _build(self, this: Round) -> Built:
        """In the thread that builds: one extension with the round's candidates and the manifest's rows."""
        wanted = self._wanted(this)
        incumbents: dict[Candidate, set[str]] = {}
        for target in self.targets:
            if any(entry.target == target.name for entry in this.entries):
                for candidate in self.incumbents[target.name]:
                    incumbents.setdefault(candidate, set()).update(target.dtypes)
        rows = {candidate: tuple(sorted(dtypes)) for candidate, dtypes in incumbents.items()}
        # A row that serves one problem set can be a candidate for another.
        rows = {c: tuple(sorted({*dtypes, *wanted.pop(c, ())})) for c, dtypes in rows.items()}
        built = self.builder.build("extension-" + "ab"[this.number % 2], wanted, rows)
        if self.own_builder is not None and this.confirm:
            confirmed = {entry.candidate: ALL_DTYPES for entry in this.confirm}
            own = self.own_builder.build(
                "extension", {c: d for c, d in confirmed.items() if c not in built.failed}
            )
            built.failed.update(own.failed)
            for candidate, complaints in own.complaints.items():
                built.complaints[candidate] = [*built.complaints.get(candidate, []), *complaints]
        return built

    def _wanted(self, this: Round) -> dict[Candidate, tuple[str, ...]]:
        dtypes: dict[Candidate, set[str]] = {}
        for entry in this.entries:
            dtypes.setdefault(entry.candidate, set()).update(self._dtypes(entry, this))
        return {candidate: tuple(sorted(found)) for candidate, found in dtypes.items()}

    def _dtypes(self, entry: Entry, this: Round) -> tuple[str, ...]:
        return ALL_DTYPES if any(e is entry for e in this.confirm) else self._target(entry.target).dtypes

    def _wait(self, future: Future[Built], phase: str) -> Built:
        self._phase = phase
        while not wait([future], timeout=1.0).done:
            self._show()
        return future.result()

    # ---- results -------------------------------------------------------------------------------------------

    def _sort_out(self, this: Round, built: Built) -> Round:
        """Give the candidates that were not compiled, or not well, their fate; the round of the others."""
        out = []
        for entry in this.entries:
            candidate = entry.candidate
            entry.registers = built.registers.get(candidate, entry.registers)
            if candidate in built.failed:
                entry.fate, entry.reason = "compile", built.failed[candidate]
            elif complaints := built.complaints.get(candidate):
                entry.fate, entry.reason = "resources", "; ".join(complaints)
            else:
                continue
            out.append(entry)
            self._decided += 1
        self._in_flight -= {id(entry) for entry in out}
        self.board.save()
        return this.without(out)

    def _work(self, this: Round) -> list[TargetJobs]:
        work = []
        for target in self.targets:
            jobs = tuple(
                Job(entry.candidate, self._dtypes(entry, this), any(e is entry for e in this.confirm))
                for entry in this.entries
                if entry.target == target.name
            )
            budget = CONFIRM_S if any(job.confirm for job in jobs) else LOOK_S
            if jobs:
                work.append(TargetJobs(target, tuple(self.incumbents[target.name]), jobs, budget))
        return work

    def _record(self, target: Target, candidate: Candidate, what: str, result: Sighting | str) -> None:
        entry = self.board.entries[target.name, candidate.key]
        if isinstance(result, Sighting):
            entry.see(result)
        else:
            entry.fate, entry.reason = what, result
        self._decided += entry.fate in FINAL
        self.board.save()
        if entry.fate in ("promising", "accepted"):
            self.progress.say(f"{entry.fate}: {target.name} {candidate.label}: {entry.reason}")
        self._show()

    def _target(self, name: str) -> Target:
        return next(target for target in self.targets if target.name == name)

    def _show(self) -> None:
        self.progress.show(self.board.counts(), self._decided, self._phase)


def _standing(key: str, sighting: Sighting) -> float:
    """How a row of the manifest did against the best of them; 0.8 for a case that it was too slow for."""
    shares = [
        min(times.values()) / times[key] if key in times else 0.8 for times in sighting.incumbents_us.values()
    ]
    return math.exp(sum(map(math.log, shares)) / len(shares))
