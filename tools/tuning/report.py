"""The leaderboard as text."""

from __future__ import annotations

import re
from collections import Counter

from tabulate import tabulate

from .candidate import Candidate
from .leaderboard import Entry, Leaderboard

ROWS = 12  # candidates of a target that are listed: the fastest
HEAD = ("fate", "candidate", "gain", "worst case", "seen", "registers", "times (us)")
NOTE = (
    "gain: geometric mean of the incumbents' best time over the candidate's, the least of its timing runs; "
    "times: candidate/incumbent. *: given up early, far behind on the cases that are shown."
)


def render(board: Leaderboard, everything: bool = False) -> str:
    """What was searched for, where, and what came of it: a table per target, and why others are not in it."""
    about = board.about
    passes = about.get("mma_passes", 1)
    emulated = f", an emulation: each mma {passes} times" if passes != 1 else ""
    fates = ", ".join(f"{count} {fate}" for fate, count in board.counts().items()) or "none yet"
    lines = [
        f"sm_{about.get('arch')} rows on {about.get('gpu')}{emulated}; nvcc {about.get('nvcc')}, "
        f"up to {about.get('shared_kib')} KiB of shared memory, kernels {str(about.get('kernel_hash'))[:12]}",
        f"{len(board.entries)} candidates in {board.rounds} rounds and {board.seconds:.0f} s: {fates}",
    ]
    for target, cases in board.targets.items():
        ran = board.best(target)
        listed = ran if everything else ran[:ROWS]
        lines += ["", f"{target}: {', '.join(cases)}"]
        lines += [f"  incumbent  {Candidate.of_key(key).label}" for key in board.incumbents[target]]
        lines.append(
            tabulate(map(_row, listed), HEAD, showindex=range(1, len(listed) + 1), disable_numparse=True)
        )
        if len(ran) > len(listed):
            lines.append(f"  and {len(ran) - len(listed)} slower ones")
        dropped = [e for e in board.of(target) if not e.sightings and e.fate != "drawn"]
        if everything:
            lines += [f"  {e.fate:10} {e.candidate.label}: {e.reason}" for e in dropped]
        else:  # without their numbers, so that equal ones are counted together
            reasons = Counter((e.fate, re.sub(r"\d[\d.e+-]*", "N", e.reason)[:120]) for e in dropped)
            lines += [f"  {count:4} x {fate}: {reason}" for (fate, reason), count in reasons.most_common()]
    return "\n".join([*lines, NOTE])


def _row(entry: Entry) -> tuple[str, ...]:
    seen = min(entry.sightings, key=lambda s: s.geomean)
    times = [f"{us:.1f}/{min(seen.incumbents_us[case].values()):.1f}" for case, us in seen.us.items()]
    gain, worst = f"{seen.geomean:.3f}x{'*' * seen.quick}", f"{seen.worst:.3f}x"
    runs, registers = str(len(entry.sightings)), str(entry.registers or "")
    return entry.fate, entry.candidate.label, gain, worst, runs, registers, " ".join(times)
