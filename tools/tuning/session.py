"""The search itself: rounds of draw, build, gates and timing.

Whatever is learnt is in the leaderboard at once, so that a search which is killed goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from . import search
from .build import Built, Wanted
from .candidate import DTYPES, Candidate
from .evaluate import Job, Record
from .leaderboard import FINAL, Entry, Leaderboard, Sighting
from .search import Scored
from .space import Space
from .targets import Target

ALL_DTYPES = tuple(sorted(DTYPES.values()))


class Builds(Protocol):
    """What compiles candidates: build.Builder."""

    def build(self, name: str, wanted: Wanted, incumbents: Wanted) -> Built: ...


class Evaluates(Protocol):
    """What runs them: evaluate.Evaluator."""

    def evaluate(self, extension: Path, jobs: Sequence[Job], record: Record) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How to search. ``per_round``: candidates drawn per target and round; limits: whichever comes first."""

    strategy: str = "evolve"
    seed: int = 0
    per_round: int = 8
    limit_s: float | None = None
    limit: int | None = None


@dataclass
class Session:
    """A search for ``targets``, each in its space and against the manifest's rows ``incumbents``.

    own_builder: compiles what is to be accepted for the architecture it is made for, when ``builder``
    compiles for another one to run it here (a proxy, an emulation): registers and spills differ.
    say: is told a line for each phase and each gain.
    """

    board: Leaderboard
    targets: Sequence[Target]
    spaces: Mapping[str, Space]
    incumbents: Mapping[str, Sequence[Candidate]]
    builder: Builds
    evaluator: Evaluates
    plan: Plan
    say: Callable[[str], None]
    own_builder: Builds | None = None
    clock: Callable[[], float] = time.monotonic
    _begin: float = 0.0
    _round_s: float = 0.0  # the longest round so far
    _looked: int = 0  # candidates of this run that were built for a first look
    _confirmed: set[int] = field(default_factory=set)  # entries of the round that gained before

    def run(self) -> None:
        """Search until a limit, or until nothing is left. On an interrupt, what is known is saved."""
        self._begin, before = self.clock(), self.board.seconds
        for target in self.targets:
            cases = [case.name for case in target.cases]
            self.board.set_target(target.name, cases, [c.key for c in self.incumbents[target.name]])
        try:
            while entries := self._draw():
                begin = self.clock()
                self._round(entries)
                self._round_s = max(self._round_s, self.clock() - begin)
        finally:
            self.board.seconds = before + self.clock() - self._begin
            self.board.save()

    def _round(self, entries: Sequence[Entry]) -> None:
        """What gained once comes again, in all dtypes."""
        self.board.rounds += 1
        self.board.save()
        self._tell(f"building {len(entries)} candidates")
        entries = self._sort_out(entries, self._build(entries))
        if entries:
            self._tell(f"running {len(entries)} of them")
            self.evaluator.evaluate(self._extension, [self._job(entry) for entry in entries], self._record)

    def _tell(self, phase: str) -> None:
        elapsed = self.clock() - self._begin
        limit = "" if self.plan.limit_s is None else f" of {clock(self.plan.limit_s)}"
        fates = ", ".join(f"{count} {fate}" for fate, count in self.board.counts().items())
        self.say(f"{clock(elapsed)}{limit} | {fates} | round {self.board.rounds}: {phase}")

    # ---- what to try ---------------------------------------------------------------------------------------

    def _draw(self) -> list[Entry]:
        confirm = [entry for target in self.targets for entry in self.board.of(target.name, "promising")]
        self._confirmed = {id(entry) for entry in confirm}
        return confirm + [entry for target in self.targets for entry in self._look(target)]

    def _look(self, target: Target) -> list[Entry]:
        """Candidates without a fate that an interrupted search left, then new ones."""
        count, limit_s = self.plan.per_round, self.plan.limit_s
        if self.plan.limit is not None:
            count = min(count, self.plan.limit - self._looked)
        # A round of new candidates takes as long as one after it that confirms them.
        if count <= 0 or (limit_s is not None and self.clock() - self._begin + 2 * self._round_s >= limit_s):
            return []
        left = self.board.of(target.name, "drawn")[:count]
        known = {entry.key for entry in self.board.of(target.name)}
        known |= {candidate.key for candidate in self.incumbents[target.name]}
        seed = f"{self.plan.seed} {target.name} {self.board.rounds + 1}"
        new = search.propose(
            self.spaces[target.name],
            known,
            self._parents(target),
            count - len(left),
            self.plan.strategy,
            seed,
        )
        self._looked += len(left) + len(new)
        return left + self.board.draw(target.name, new)

    def _parents(self, target: Target) -> list[Scored]:
        """Candidates that ran, and the manifest's rows by the latest times that there are of them."""
        ran = [entry for entry in self.board.of(target.name) if entry.sightings]
        scored = [Scored(entry.candidate, entry.gain) for entry in ran]
        whole = [entry.sightings[-1] for entry in ran if not entry.sightings[-1].quick]
        for incumbent in self.incumbents[target.name]:
            gain = _standing(incumbent.key, whole[-1]) if whole else search.prior(incumbent, target)
            scored.append(Scored(incumbent, gain))
        return scored

    # ---- building ------------------------------------------------------------------------------------------

    def _build(self, entries: Sequence[Entry]) -> Built:
        """One extension with the round's candidates and the manifest's rows."""
        wanted: dict[Candidate, set[str]] = {}
        rows: dict[Candidate, set[str]] = {}
        for entry in entries:
            wanted.setdefault(entry.candidate, set()).update(self._dtypes(entry))
            for row in self.incumbents[entry.target]:
                rows.setdefault(row, set()).update(self._target(entry.target).dtypes)
        for row, dtypes in rows.items():  # a row that serves one problem set can be a candidate for another
            dtypes |= wanted.pop(row, set())
        built = self.builder.build("extension", _sorted(wanted), _sorted(rows))
        self._extension = built.extension
        confirmed = {e.candidate for e in entries if id(e) in self._confirmed} - built.failed.keys()
        if self.own_builder is not None and confirmed:
            own = self.own_builder.build("extension", dict.fromkeys(confirmed, ALL_DTYPES), {})
            built.failed.update(own.failed)
            for candidate, complaints in own.complaints.items():
                built.complaints[candidate] = [*built.complaints.get(candidate, []), *complaints]
        return built

    def _dtypes(self, entry: Entry) -> tuple[str, ...]:
        return ALL_DTYPES if id(entry) in self._confirmed else self._target(entry.target).dtypes

    # ---- results -------------------------------------------------------------------------------------------

    def _sort_out(self, entries: Sequence[Entry], built: Built) -> list[Entry]:
        """Give the candidates that were not compiled, or not well, their fate; the others."""
        for entry in entries:
            candidate = entry.candidate
            entry.registers = built.registers.get(candidate, entry.registers)
            if candidate in built.failed:
                entry.fate, entry.reason = "compile", built.failed[candidate]
            elif complaints := built.complaints.get(candidate):
                entry.fate, entry.reason = "resources", "; ".join(complaints)
        self.board.save()
        return [entry for entry in entries if entry.fate not in FINAL]

    def _job(self, entry: Entry) -> Job:
        target, confirm = self._target(entry.target), id(entry) in self._confirmed
        rows = tuple(self.incumbents[target.name])
        return Job(target, entry.candidate, self._dtypes(entry), rows, confirm)

    def _record(self, job: Job, what: str, result: Sighting | str) -> None:
        entry = self.board.entries[job.target.name, job.candidate.key]
        if isinstance(result, Sighting):
            entry.see(result)
        else:
            entry.fate, entry.reason = what, result
        self.board.save()
        if entry.fate in ("promising", "accepted"):
            self.say(f"{entry.fate}: {job.target.name} {job.candidate.label}: {entry.reason}")

    def _target(self, name: str) -> Target:
        return next(target for target in self.targets if target.name == name)


def clock(seconds: float) -> str:
    """Minutes and seconds: 3:05."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


def _sorted(wanted: Mapping[Candidate, set[str]]) -> dict[Candidate, tuple[str, ...]]:
    return {candidate: tuple(sorted(dtypes)) for candidate, dtypes in wanted.items()}


def _standing(key: str, sighting: Sighting) -> float:
    """How a row of the manifest did against the best of them; 0.8 for a case that it was too slow for."""
    shares = [
        min(times.values()) / times[key] if key in times else 0.8 for times in sighting.incumbents_us.values()
    ]
    return math.exp(sum(map(math.log, shares)) / len(shares))
