"""The leaderboard: every candidate's fate, in a file that is whole at any moment and lets a search go on.

JSON, replaced atomically after each change. It says what it holds for: GPU, architecture, sources and tools;
a search on something else does not go on with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from source_hash import SOURCES, source_files

from .candidate import Candidate
from .manifest import MANIFEST

GAIN = 1.03  # a candidate must be this much faster than the incumbents, as a geometric mean
WORST = 0.99  # and on no case slower than this
SIGHTINGS = 2  # in so many timing runs, each a process and a build of its own
SCHEMA = 2
KIND = "cutlass_fmha tuning leaderboard"
#: Fates in the order of the gates. "drawn" and "promising" are not final.
FATES = (
    "drawn",  # proposed, and nothing known yet
    "compile",  # nvcc refused it, or took too long
    "resources",  # spills, a stack, or more than an SM has
    "parity",  # wrong, or not the same twice
    "crash",  # took its process down, or hung
    "slower",  # correct, and no gain
    "promising",  # a gain seen once
    "unconfirmed",  # a gain that a second run did not see
    "accepted",
)
FINAL = frozenset(FATES) - {"drawn", "promising"}
MATCHED = ("gpu", "arch", "mma_passes", "shared_kib", "kernel_hash", "nvcc")


class LeaderboardError(ValueError):
    """A leaderboard can't be read, or is about something else."""


def kernel_hash(sources: Path = SOURCES) -> str:
    """SHA-256 over src/ without the manifest: what a candidate's times and machine code depend on."""
    digest = hashlib.sha256()
    for path in source_files(sources):
        if path.name != MANIFEST.name:
            content = (sources / path).read_bytes()
            digest.update(f"{path.as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


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
    shares = [best / time for best, time in pairs]
    return math.exp(sum(map(math.log, shares)) / len(shares)), min(shares)


@dataclass
class Sighting:
    """One timing run of a candidate: microseconds per case, its own and the incumbents'."""

    us: dict[str, float]
    incumbents_us: dict[str, dict[str, float]]
    quick: bool = False  # a look that was enough to see that it is slower

    def __post_init__(self) -> None:
        self.geomean, self.worst = gains(self.us, self.incumbents_us)

    @property
    def is_gain(self) -> bool:
        return self.geomean >= GAIN and self.worst >= WORST and not self.quick


@dataclass
class Entry:
    """A candidate of one target."""

    target: str
    key: str
    fate: str = "drawn"
    reason: str = ""
    registers: int = 0
    sightings: list[Sighting] = field(default_factory=list)

    @property
    def candidate(self) -> Candidate:
        return Candidate.of_key(self.key)

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


@dataclass
class Leaderboard:
    """``about``: what it holds for (MATCHED), and more. ``incumbents``: target -> keys to be beaten."""

    path: Path
    about: dict[str, Any]
    targets: dict[str, list[str]] = field(default_factory=dict)
    incumbents: dict[str, list[str]] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def of(self, target: str, *fates: str) -> list[Entry]:
        """A target's entries, those of the given fates, in the order in which they were drawn."""
        return [e for e in self.entries.values() if e.target == target and (not fates or e.fate in fates)]

    def counts(self) -> dict[str, int]:
        counted = Counter(entry.fate for entry in self.entries.values())
        return {fate: counted[fate] for fate in FATES if counted[fate]}

    def best(self, target: str) -> list[Entry]:
        """A target's entries that ran: accepted ones first, then the fastest."""
        ran = [entry for entry in self.of(target) if entry.sightings]
        return sorted(ran, key=lambda entry: (entry.fate != "accepted", -entry.gain, entry.key))

    def draw(self, target: str, candidates: Iterable[Candidate]) -> list[Entry]:
        new = [Entry(target, candidate.key) for candidate in candidates]
        return [self.entries.setdefault((target, entry.key), entry) for entry in new]

    def set_target(self, name: str, cases: list[str], incumbents: list[str]) -> None:
        """Tell what a target consists of, and which rows the manifest has for it.

        Gains hold against those incumbents: when there are others by now, what had gained is to be seen anew.
        Raises LeaderboardError when the target's cases have changed: its times would not be comparable.
        """
        if self.targets.setdefault(name, cases) != cases:
            raise LeaderboardError(
                f"{self.path} has times of other cases for {name}: give another --leaderboard"
            )
        if self.incumbents.get(name, incumbents) != incumbents:
            for entry in self.of(name, "promising", "accepted", "unconfirmed"):
                entry.fate, entry.reason, entry.sightings = "drawn", "the manifest has other rows by now", []
        self.incumbents[name] = incumbents

    def save(self) -> None:
        """Write it, so that the file holds either the old state or the new one whatever happens."""
        head = {name: getattr(self, name) for name in ("about", "targets", "incumbents", "rounds", "seconds")}
        entries = [asdict(entry) for entry in self.entries.values()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("w") as file:
            json.dump({"kind": KIND, "schema": SCHEMA, **head, "entries": entries}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)

    @classmethod
    def load(cls, path: Path) -> Leaderboard:
        """Raises LeaderboardError, with one sentence, unless the file is a leaderboard of this version."""
        try:
            content = json.loads(path.read_text())
            if (content.pop("kind"), content.pop("schema")) != (KIND, SCHEMA):
                raise ValueError("of another kind or version")
            entries = content.pop("entries")
            board = cls(path, **content)
            for raw in entries:
                sightings = [Sighting(**sighting) for sighting in raw.pop("sightings")]
                entry = Entry(**raw, sightings=sightings)
                board.entries[entry.target, entry.candidate.key] = entry
        except OSError as error:
            raise LeaderboardError(f"{path} can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LeaderboardError(
                f"{path} is no leaderboard of this version ({error}): move it away"
            ) from error
        return board

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any]) -> Leaderboard:
        """The one at ``path`` to go on with, or a new one. LeaderboardError: it is about something else."""
        if not path.exists():
            return cls(path, about)
        board = cls.load(path)
        for name in MATCHED:
            if board.about.get(name) != about.get(name):
                raise LeaderboardError(
                    f"{path} is about {name} {board.about.get(name)}, this search about {about.get(name)}: "
                    "give another --leaderboard"
                )
        board.about = about
        return board
