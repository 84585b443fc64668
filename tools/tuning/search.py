"""The search: rounds of draw, build, gates and timing; and the leaderboard, which has every candidate's fate.

The leaderboard's file is whole at any moment and holds what is learnt at once, so that a search which is
killed goes on where it was. It says what it is about: GPU, architecture, sources and tools; a search on
something else does not go on with it.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from building import BuildError, run

from cutlass_fmha.cli import output

from .build import SHORT, Builder
from .space import Candidate, Scored, fits, propose

if TYPE_CHECKING:
    from cutlass_fmha.bench.cases import Case

GAIN = 1.03  # a candidate must be this much faster than the incumbents, as a geometric mean
WORST = 0.99  # and on no case slower than this
SIGHTINGS = 2  # in so many timing runs, each in a process of its own
KIND = "cutlass_fmha tuning leaderboard 6"
#: Fates in the order of the gates (docs/tuning.md). "promising", a gain seen once, is not final.
FATES = ("compile", "resources", "parity", "crash", "slower", "promising", "unconfirmed", "accepted")
ROWS = 12  # candidates of a target that are listed: the fastest
HEAD = ("fate", "candidate", "gain", "worst case", "seen", "registers", "times (us)")
NOTE = (
    "gain: geometric mean of the incumbents' best time over the candidate's, the least of its timing runs; "
    "times: candidate/incumbent."
)
JUDGE = Path(__file__).with_name("judge.py")
HANG_S = 900.0  # what takes a candidate's process longer will never end
LOOKS, CONFIRMING_LOOKS = 1, 5  # at the times of a case's rows: at first, and for acceptance
ALL_DTYPES = tuple(sorted(SHORT))


@dataclass
class Sighting:
    """One timing run of a candidate: microseconds per case, its own, and the incumbents' by their keys.

    ValueError when a case is missing on either side, or a time is not a positive number.
    """

    us: dict[str, float]
    incumbents_us: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        us, others = self.us, self.incumbents_us
        times = [*us.values(), *(x for rows in others.values() for x in rows.values())]
        whole = us and us.keys() == others.keys() and all(others.values())
        if not whole or not all(0.0 < x < math.inf for x in times):
            raise ValueError(f"times {us} can't be compared with {others}")
        speeds = [min(others[case].values()) / time for case, time in us.items()]
        self.geomean, self.worst = statistics.geometric_mean(speeds), min(speeds)

    @property
    def is_gain(self) -> bool:
        return self.geomean >= GAIN and self.worst >= WORST


@dataclass
class Entry:
    """A candidate of one target."""

    target: str
    candidate: Candidate
    fate: str = ""
    reason: str = ""
    registers: int = 0
    sightings: list[Sighting] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """The least of its timing runs' geometric means."""
        return min(sighting.geomean for sighting in self.sightings)

    def see(self, sighting: Sighting) -> None:
        """Decide by one more timing run: a gain is believed once it was seen ``SIGHTINGS`` times in a row."""
        self.sightings.append(sighting)
        if not sighting.is_gain:
            self.fate = "slower" if len(self.sightings) == 1 else "unconfirmed"
        else:
            self.fate = "accepted" if len(self.sightings) >= SIGHTINGS else "promising"
        self.reason = f"{sighting.geomean:.3f}x the incumbent's speed ({GAIN:.2f}x is asked for), "
        self.reason += f"worst case {sighting.worst:.3f}x ({WORST:.2f}x)"

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        seen = min(self.sightings, key=lambda s: s.geomean)
        times = [f"{us:.1f}/{min(seen.incumbents_us[case].values()):.1f}" for case, us in seen.us.items()]
        figures = f"{seen.geomean:.3f}x", f"{seen.worst:.3f}x", str(len(self.sightings)), str(self.registers or "")
        return self.fate, self.candidate.key, *figures, " ".join(times)


@dataclass
class Leaderboard:
    """``about``: what it holds for; ``targets``: the names of each one's cases."""

    path: Path
    about: dict[str, Any]
    targets: dict[str, list[str]] = field(default_factory=dict)
    rounds: int = 0
    entries: list[Entry] = field(default_factory=list)

    def of(self, target: str, *fates: str) -> list[Entry]:
        """A target's entries, those of the given fates, in the order in which they were drawn."""
        return [e for e in self.entries if e.target == target and (not fates or e.fate in fates)]

    def fates(self) -> str:
        counted = Counter(entry.fate for entry in self.entries)
        return ", ".join(f"{counted[fate]} {fate}" for fate in FATES if counted[fate]) or "none yet"

    def best(self, target: str, *fates: str) -> list[Entry]:
        """A target's entries that ran: accepted ones first, then the fastest."""
        ran = [entry for entry in self.of(target, *fates) if entry.sightings]
        return sorted(ran, key=lambda entry: (entry.fate != "accepted", -entry.gain, entry.candidate))

    def content(self) -> dict[str, Any]:
        """What is kept of it."""
        return {"kind": KIND, **asdict(self), "path": None}

    def save(self) -> None:
        """Write it, so that the file holds either the old state or the new one whatever happens."""
        new = self.path.with_name(f"{self.path.name}.new")
        output.write_text(output.to_json(self.content()), new)
        os.replace(new, self.path)

    @classmethod
    def load(cls, path: Path) -> Leaderboard:
        """Raises ValueError, with one sentence, unless the file is a leaderboard of this version."""
        try:
            content = json.loads(path.read_text())
            if content.pop("kind") != KIND:
                raise ValueError("of another kind or version")
            for raw in (entries := content.pop("entries")):
                raw["candidate"] = Candidate(**raw["candidate"])
                raw["sightings"] = [Sighting(**sighting) for sighting in raw["sightings"]]
            return cls(**{**content, "path": path, "entries": [Entry(**raw) for raw in entries]})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} can't be read as a leaderboard of this version: {error}") from error

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any], targets: dict[str, list[str]]) -> Leaderboard:
        """The one at ``path`` to go on with, or a new one. ValueError: it is about something else."""
        board = cls.load(path) if path.exists() else cls(path, about)
        known = {**targets, **board.about, **board.targets}
        for name, value in {**about, **targets}.items():
            if (other := known.get(name)) != value:
                raise ValueError(
                    f"{path} is about {name} {other}, this search about {value}: give another --leaderboard"
                )
        board.targets |= targets
        return board

    def render(self) -> list[str | output.Table]:
        """What was searched for, where, and what came of it: a table per target, and what was dropped."""
        parts: list[str | output.Table] = [
            ", ".join(f"{name} {str(value)[:20]}" for name, value in self.about.items()),
            f"{len(self.entries)} candidates in {self.rounds} rounds: {self.fates()}",
        ]
        for target, cases in self.targets.items():
            rows = [entry.row() for entry in self.best(target)]
            # Reasons without their numbers, so that equal ones are counted together.
            dropped = Counter(
                f"{entry.fate}: {re.sub(r'[0-9][0-9.e+-]*', 'N', entry.reason)[:120]}"
                for entry in self.of(target)
                if not entry.sightings
            )
            parts += [f"\n{target}: {', '.join(cases)}", output.Table(HEAD, rows[:ROWS], left=2)]
            parts += [f"  and {len(rows[ROWS:])} slower ones"]
            parts += [f"  {count:4} x {reason}" for reason, count in dropped.most_common()]
        return [*parts, NOTE]


@dataclass(frozen=True)
class Target:
    """Cases of one head dim whose times count together, the rows to beat, and what a block may share."""

    name: str
    cases: tuple[Case, ...]
    arch: int
    shared_kib: int
    incumbents: tuple[Candidate, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({case.dtype for case in self.cases}))

    def allows(self, candidate: Candidate) -> bool:
        return candidate not in self.incumbents and fits(candidate, self.arch, self.shared_kib)


Judge = Callable[[Path, Target, Candidate, tuple[str, ...], int], "Sighting | tuple[str, str]"]
"""Of an extension a target's candidate, in these dtypes, at so many looks -> a timing run, or (fate, reason)."""


def judge_in_a_process(
    directory: Path, command: Sequence[str] = (sys.executable, str(JUDGE)), hang_s: float = HANG_S
) -> Judge:
    """Judges each candidate in a process of its own, so that one which dies or hangs takes no other along.

    ``directory``: for what it is told, tells and logs. BuildError when the process fails by no fault of a candidate.
    """

    def judge(extension: Path, target: Target, candidate: Candidate, dtypes: tuple[str, ...], looks: int):
        job = {"extension": str(extension), "tag": candidate.tag, "dtypes": dtypes, "looks": looks}
        job["incumbents"] = [row.tag for row in target.incumbents]
        job["cases"] = [asdict(case) for case in target.cases]
        files = directory / "job.json", directory / "result.json"
        output.write_text(json.dumps(job), files[0])
        files[1].unlink(missing_ok=True)
        status, told = run([*command, *map(str, files)], directory / "judge.log", hang_s)
        if status is None:
            return "crash", f"no answer within {hang_s:.0f} s"
        if status < 0:
            return "crash", f"ended by signal {-status} ({signal.Signals(-status).name})"
        if status or not files[1].exists():
            last = ["it said nothing", *filter(None, map(str.strip, told.splitlines()))][-1]
            raise BuildError(f"the judge failed: {last} (its log: {directory / 'judge.log'})")
        found = json.loads(files[1].read_text())
        if (us := found.pop("us", None)) is None:
            return next(iter(found.items()))
        keys = {row.tag: row.key for row in target.incumbents}
        own = {case: times.pop(candidate.tag) for case, times in us.items()}
        return Sighting(own, {case: {keys[tag]: t for tag, t in times.items()} for case, times in us.items()})

    return judge


@dataclass
class Search:
    """A search for ``targets``.

    per_round: candidates drawn per target and round. limit_s: seconds after which none is drawn any more;
    what gained once is confirmed all the same.
    """

    board: Leaderboard
    targets: Sequence[Target]
    builder: Builder
    judge: Judge
    seed: int = 0
    per_round: int = 8
    limit_s: float = math.inf
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic

    def run(self) -> None:
        """Search until a limit, or until nothing is left."""
        begin, going = self.clock(), True
        while going:
            self.board.rounds += 1
            going = False
            for target in self.targets:
                confirm = self.board.of(target.name, "promising")
                late = self.clock() - begin >= self.limit_s
                drawn = [] if late else self.draw(target)
                if confirm or drawn:
                    about = f"round {self.board.rounds}, {target.name}: {len(drawn)} candidates"
                    self.say(f"{about} | {self.board.fates()}")
                    self.round(target, confirm, drawn)
                    going = True

    def draw(self, target: Target) -> list[Entry]:
        """Children of what ran, and of the manifest's rows by the latest times that there are of them."""
        entries = self.board.of(target.name)
        ran = [entry for entry in entries if entry.sightings]
        latest = ran[-1].sightings[-1].incumbents_us.values() if ran else ()
        parents: list[Scored] = [(entry.gain, entry.candidate) for entry in ran]
        for row in target.incumbents:
            standing = [min(times.values()) / times[row.key] for times in latest]
            parents.append((statistics.geometric_mean(standing or [1.0]), row))
        known = {entry.candidate for entry in entries}
        seed = f"{self.seed} {target.name} {self.board.rounds}"
        drawn = propose(lambda c: c not in known and target.allows(c), parents, self.per_round, seed)
        return [Entry(target.name, candidate) for candidate in drawn]

    def round(self, target: Target, confirm: Sequence[Entry], drawn: Sequence[Entry]) -> None:
        """What gained once comes again, in all dtypes."""
        wanted = {entry.candidate: target.dtypes for entry in drawn}
        wanted |= {entry.candidate: ALL_DTYPES for entry in confirm}
        built = self.builder.build(wanted, dict.fromkeys(target.incumbents, target.dtypes))
        for entry in (*confirm, *drawn):
            c, looks = entry.candidate, CONFIRMING_LOOKS if entry.fate else LOOKS
            entry.registers = built.registers.get(c, entry.registers)
            result = built.dropped.get(c) or self.judge(built.extension, target, c, wanted[c], looks)
            if not entry.fate:
                self.board.entries.append(entry)
            if isinstance(result, Sighting):
                entry.see(result)
            else:
                entry.fate, entry.reason = result
            self.board.save()
            if entry.fate in ("promising", "accepted"):
                self.say(f"{entry.fate}: {target.name} {c.key}: {entry.reason}")
