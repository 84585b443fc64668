"""The leaderboard: every candidate's fate, in a file that is whole at any moment and lets a search go on.

JSON, replaced atomically after each result. It says what it holds for: GPU, architecture, sources and tools;
a search on something else does not go on with it.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .space import Candidate

GAIN = 1.03  # a candidate must be this much faster than the incumbents, as a geometric mean
WORST = 0.99  # and on no case slower than this
SIGHTINGS = 2  # in so many timing runs, each in a process of its own
KIND = "cutlass_fmha tuning leaderboard 4"
#: Fates in the order of the gates (docs/tuning.md). "promising", a gain seen once, is not final.
FATES = ("compile", "resources", "parity", "crash", "slower", "promising", "unconfirmed", "accepted")
ROWS = 12  # candidates of a target that are listed: the fastest
HEAD = ("fate", "candidate", "gain", "worst case", "seen", "registers", "times (us)")
NOTE = (
    "gain: geometric mean of the incumbents' best time over the candidate's, the least of its timing runs; "
    "times: candidate/incumbent."
)


class LeaderboardError(ValueError):
    """A leaderboard can't be read, or is about something else."""


def gains(us: Mapping[str, float], incumbents_us: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """(geometric mean, worst case) of a candidate's speed relative to the fastest incumbent of each case.

    us: case -> microseconds; incumbents_us: case -> incumbent -> microseconds, of the same timing run.
    Raises ValueError when a case is missing on either side, or a time is not a positive number.
    """
    if not us or us.keys() != incumbents_us.keys() or not all(incumbents_us.values()):
        raise ValueError(f"times of {sorted(us)} can't be compared with {dict(incumbents_us)}")
    pairs = [(min(incumbents_us[case].values()), time) for case, time in us.items()]
    if not all(0.0 < time < math.inf for pair in pairs for time in pair):
        raise ValueError(f"a time is no positive number: {dict(us)}, {dict(incumbents_us)}")
    speeds = [best / time for best, time in pairs]
    return statistics.geometric_mean(speeds), min(speeds)


@dataclass
class Sighting:
    """One timing run of a candidate: microseconds per case, its own and the incumbents'."""

    us: dict[str, float]
    incumbents_us: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        self.geomean, self.worst = gains(self.us, self.incumbents_us)

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
        """The least of its timing runs' geometric means; 0 before it ran."""
        return min((sighting.geomean for sighting in self.sightings), default=0.0)

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
        gain, worst = f"{seen.geomean:.3f}x", f"{seen.worst:.3f}x"
        runs, registers = str(len(self.sightings)), str(self.registers or "")
        return self.fate, self.candidate.key, gain, worst, runs, registers, " ".join(times)


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

    def counts(self) -> dict[str, int]:
        counted = Counter(entry.fate for entry in self.entries)
        return {fate: counted[fate] for fate in FATES if counted[fate]}

    def best(self, target: str) -> list[Entry]:
        """A target's entries that ran: accepted ones first, then the fastest."""
        ran = [entry for entry in self.of(target) if entry.sightings]
        return sorted(ran, key=lambda entry: (entry.fate != "accepted", -entry.gain, entry.candidate))

    def save(self) -> None:
        """Write it, so that the file holds either the old state or the new one whatever happens."""
        content = {"kind": KIND, **asdict(self), "path": None}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)

    @classmethod
    def load(cls, path: Path) -> Leaderboard:
        """Raises LeaderboardError, with one sentence, unless the file is a leaderboard of this version."""
        try:
            content = json.loads(path.read_text())
            if content.pop("kind") != KIND:
                raise ValueError("of another kind or version")
            for raw in (entries := content.pop("entries")):
                raw["candidate"] = Candidate(**raw["candidate"])
                raw["sightings"] = [Sighting(**sighting) for sighting in raw["sightings"]]
            return cls(**{**content, "path": path, "entries": [Entry(**raw) for raw in entries]})
        except OSError as error:
            raise LeaderboardError(f"{path} can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            sentence = f"{path} is no leaderboard of this version ({error}): move it away"
            raise LeaderboardError(sentence) from error

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any], targets: dict[str, list[str]]) -> Leaderboard:
        """The one at ``path`` to go on with, or a new one. LeaderboardError: it is about something else."""
        board = cls.load(path) if path.exists() else cls(path, about)
        known = {**board.about, **{name: board.targets.get(name, cases) for name, cases in targets.items()}}
        for name, value in {**about, **targets}.items():
            if known.get(name) != value:
                raise LeaderboardError(
                    f"{path} is about {name} {known.get(name)}, this search about {value}: "
                    "give another --leaderboard"
                )
        board.targets |= targets
        return board

    def render(self) -> str:
        """What was searched for, where, and what came of it: a table per target, and what was dropped."""
        fates = ", ".join(f"{count} {fate}" for fate, count in self.counts().items()) or "none yet"
        lines = [
            ", ".join(f"{name} {str(value)[:20]}" for name, value in self.about.items()),
            f"{len(self.entries)} candidates in {self.rounds} rounds: {fates}",
        ]
        for target, cases in self.targets.items():
            rows = [entry.row() for entry in self.best(target)]
            numbers = range(1, min(ROWS, len(rows)) + 1)
            listed = tabulate(rows[:ROWS], HEAD, showindex=numbers, disable_numparse=True)
            # Without their numbers, so that equal ones are counted together.
            dropped = Counter(
                f"{entry.fate}: {re.sub(r'[0-9][0-9.e+-]*', 'N', entry.reason)[:120]}"
                for entry in self.of(target)
                if not entry.sightings
            )
            lines += ["", f"{target}: {', '.join(cases)}", listed, f"  and {len(rows[ROWS:])} slower ones"]
            lines += [f"  {count:4} x {reason}" for reason, count in dropped.most_common()]
        return "\n".join([*lines, NOTE])
