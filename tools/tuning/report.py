"""The leaderboard as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .candidate import Candidate
from .leaderboard import Entry, Leaderboard
from .progress import clock

ROWS = 12  # candidates of a target that are listed: the fastest


def render(board: Leaderboard, everything: bool = False) -> str:
    """What was searched for, where, and what came of it: a table per target, and why others are not in it."""
    about = board.about
    passes = about.get("mma_passes", 1)
    emulated = f", an emulation: each mma {passes} times" if passes != 1 else ""
    lines = [
        f"sm_{about.get('arch')} rows on {about.get('gpu')}{emulated}; nvcc {about.get('nvcc')}, "
        f"up to {about.get('shared_kib')} KiB of shared memory, kernels {str(about.get('kernel_hash'))[:12]}",
        f"{len(board.entries)} candidates in {board.rounds} rounds and {clock(board.seconds)}: "
        + (", ".join(f"{count} {fate}" for fate, count in board.counts().items()) or "none yet"),
    ]
    for target in board.targets:
        lines += ["", *_target(board, target, everything)]
    return "\n".join(lines) + "\n"


def _target(board: Leaderboard, target: str, everything: bool) -> list[str]:
    entries = board.of(target)
    ran = [entry for entry in entries if entry.gain is not None]
    ran.sort(key=lambda entry: (entry.fate != "accepted", -(entry.gain or 0.0), entry.key))
    listed = ran if everything else ran[:ROWS]
    lines = [f"{target}: {', '.join(board.targets[target])}"]
    lines += [f"  incumbent  {Candidate.of_key(key).label}" for key in board.incumbents.get(target, [])]
    if listed:
        lines += _table([_HEAD, *(_row(number, entry) for number, entry in enumerate(listed, 1))])
    if len(ran) > len(listed):
        lines.append(f"  and {len(ran) - len(listed)} slower ones")
    dropped = [entry for entry in entries if entry.gain is None and entry.fate != "drawn"]
    if everything:
        lines += [f"  {e.fate:10} {e.candidate.label}: {e.reason}" for e in dropped]
    else:
        reasons = Counter((e.fate, _kind(e.reason)) for e in dropped)
        lines += [f"  {count:4} x {fate}: {reason}" for (fate, reason), count in reasons.most_common()]
    return lines


_HEAD = ("", "fate", "candidate", "gain", "worst case", "seen", "registers", "times (us)")


def _row(number: int, entry: Entry) -> tuple[str, ...]:
    sighting = min(entry.sightings, key=lambda s: s.geomean)
    times = " ".join(
        f"{us:.1f}/{min(sighting.incumbents_us[case].values()):.1f}" for case, us in sighting.us.items()
    )
    return (
        str(number),
        entry.fate,
        entry.candidate.label,
        f"{sighting.geomean:.3f}x" + ("*" if sighting.quick else ""),
        f"{sighting.worst:.3f}x",
        str(len(entry.sightings)),
        str(entry.registers or ""),
        times,
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _kind(reason: str) -> str:
    """A reason without its numbers, so that equal ones are counted together."""
    return re.sub(r"\d[\d.e+-]*", "N", reason)[:120]


NOTE = (
    "gain: geometric mean of the incumbents' best time over the candidate's, the least of its timing runs; "
    "times: candidate/incumbent. *: given up early, far behind on the cases that are shown."
)
