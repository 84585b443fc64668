"""What has grown since the committed counts of every main loop (tests/data/resources.json)."""

from __future__ import annotations

from typing import Any

from mainloop import CLASSES, Loop
from resources import UPDATE

ALLOWED_SHARE, ALLOWED_COUNT = 0.02, 4  # a class may grow by either, whichever is more
ALLOWED_REGISTERS = 8  # registers are given out in eights


def loop_entry(loop: Loop) -> dict[str, int]:
    """What the report holds of a main loop: its counts by class, without the classes not used."""
    return {name: count for name, count in loop.counts.items() if count}


def changes(committed: dict[str, Any], built: dict[str, Any]) -> list[str]:
    """A sentence for each count that has grown too far. Both: row -> its registers and its loop.

    Of rows that both have: ``make release-check`` tells whether the committed ones are all there are.
    """
    return [line for name in built if name in committed for line in grown(name, committed[name], built[name])]


def grown(name: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a row has more of than its committed counts allow. The number of mma must not change at all."""
    advice = f"look for the cause (python tools/sass.py --opcodes --rows {name}), or accept it: {UPDATE}"
    lines = []
    if new["registers"] > old["registers"] + ALLOWED_REGISTERS:
        lines.append(f"{name}: registers grew from {old['registers']} to {new['registers']}; {advice}")
    before = {**old["loop"], "all classes": sum(old["loop"].values())}
    after = {**new["loop"], "all classes": sum(new["loop"].values())}
    for kind in (*CLASSES, "all classes"):
        was, now = before.get(kind, 0), after.get(kind, 0)
        if kind == "mma" and was != now:
            lines.append(f"{name}: mma in the main loop went from {was} to {now}; {advice}")
        elif now > was + max(ALLOWED_COUNT, ALLOWED_SHARE * was):
            lines.append(f"{name}: {kind} in the main loop grew from {was} to {now}; {advice}")
    return lines
