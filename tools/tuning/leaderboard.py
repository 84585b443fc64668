"""The leaderboard: every candidate's fate, in a file that is whole at any moment and lets a search go on.

JSON, replaced atomically after each change. It says what it holds for: GPU, architecture, sources and tools;
a search on something else does not go on with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from source_hash import SOURCES, source_files

from .candidate import Candidate
from .manifest import MANIFEST
from .verdict import SIGHTINGS, Judgement

SCHEMA = 1
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


@dataclass
class Sighting:
    """One timing run of a candidate: microseconds per case, its own and the incumbents'."""

    us: dict[str, float]
    incumbents_us: dict[str, dict[str, float]]
    geomean: float
    worst: float
    quick: bool = False  # a look that was enough to see that it is slower

    @property
    def judgement(self) -> Judgement:
        return Judgement(self.geomean, self.worst)


@dataclass
class Entry:
    """A candidate of one target."""

    target: str
    key: str
    fate: str = "drawn"
    reason: str = ""
    round: int = 0
    registers: int = 0
    sightings: list[Sighting] = field(default_factory=list)

    @property
    def candidate(self) -> Candidate:
        return Candidate.of_key(self.key)

    @property
    def gain(self) -> float | None:
        """The least of its timing runs' geometric means; None before it ran."""
        return min((sighting.geomean for sighting in self.sightings), default=None)

    def see(self, sighting: Sighting) -> None:
        """Decide by one more timing run: a gain is believed once it was seen ``SIGHTINGS`` times in a row."""
        self.sightings.append(sighting)
        judgement = sighting.judgement
        if not judgement.is_gain:
            self.fate = "slower" if len(self.sightings) == 1 else "unconfirmed"
        else:
            self.fate = "accepted" if len(self.sightings) >= SIGHTINGS else "promising"
        self.reason = judgement.sentence()


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

    # ---- what is in it -------------------------------------------------------------------------------------

    def of(self, target: str, *fates: str) -> list[Entry]:
        """A target's entries, those of the given fates, in the order in which they were drawn."""
        return [e for e in self.entries.values() if e.target == target and (not fates or e.fate in fates)]

    def counts(self) -> dict[str, int]:
        counted = Counter(entry.fate for entry in self.entries.values())
        return {fate: counted[fate] for fate in FATES if counted[fate]}

    def best(self, target: str) -> list[Entry]:
        """A target's accepted entries, the fastest first."""
        return sorted(self.of(target, "accepted"), key=lambda entry: (-(entry.gain or 0.0), entry.key))

    def draw(self, target: str, candidates: Iterable[Candidate]) -> list[Entry]:
        drawn = []
        for candidate in candidates:
            entry = Entry(target, candidate.key, round=self.rounds + 1)
            drawn.append(self.entries.setdefault((target, candidate.key), entry))
        return drawn

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

    # ---- the file ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write it, so that the file holds either the old state or the new one whatever happens."""
        content = {
            "kind": KIND,
            "schema": SCHEMA,
            "about": {**self.about, "updated": datetime.now(timezone.utc).isoformat(timespec="seconds")},
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "targets": self.targets,
            "incumbents": self.incumbents,
            "entries": [asdict(entry) for entry in self.entries.values()],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".new")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise

    @classmethod
    def load(cls, path: Path) -> Leaderboard:
        """Raises LeaderboardError, with one sentence, unless the file is a leaderboard of this version."""
        try:
            content = json.loads(path.read_text())
            if content["kind"] != KIND or content["schema"] != SCHEMA:
                raise ValueError("of another kind or version")
            board = cls(
                path, *(content[name] for name in ("about", "targets", "incumbents", "rounds", "seconds"))
            )
            for raw in content["entries"]:
                sightings = [Sighting(**sighting) for sighting in raw.pop("sightings")]
                entry = Entry(**raw, sightings=sightings)
                if entry.fate not in FATES:
                    raise ValueError(f"no fate {entry.fate!r}")
                entry.candidate  # noqa: B018 - raises when the key is none
                board.entries[entry.target, entry.key] = entry
        except OSError as error:
            raise LeaderboardError(f"{path} can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LeaderboardError(
                f"{path} is no leaderboard of this version ({error}): move it away"
            ) from error
        return board

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any]) -> Leaderboard:
        """The one at ``path`` to go on with, or a new one. LeaderboardError: it is about something else."""
        for left in path.parent.glob(f"{path.name}*.new"):  # by a search that was killed while it saved
            left.unlink(missing_ok=True)
        if not path.exists():
            return cls(path, about)
        board = cls.load(path)
        for name in MATCHED:
            if board.about.get(name) != about.get(name):
                raise LeaderboardError(
                    f"{path} is about {name} {board.about.get(name)}, this search about {about.get(name)}: "
                    "give another --leaderboard"
                )
        board.about = {**about, "started": board.about.get("started", about.get("started"))}
        return board
