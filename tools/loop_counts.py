"""The committed counts of every main loop, and what has grown since."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from cubin import Kernel, read_compilers
from mainloop import CLASSES, Loop

COUNTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "sass_counts.json"
UPDATE = "python tools/sass.py --write-counts"
ALLOWED_SHARE, ALLOWED_COUNT = 0.02, 4  # a class may grow by either, whichever is more
ALLOWED_REGISTERS = 8  # registers are given out in eights


class Counted(Protocol):
    """A row with its machine code: ``sass.RowLoop``."""

    @property
    def row(self) -> Any: ...
    @property
    def kernel(self) -> Kernel: ...
    @property
    def loop(self) -> Loop: ...


def plain(count: float) -> int | float:
    """A whole number without its ``.0``."""
    return int(count) if count == int(count) else round(count, 2)


def counts_of(loops: Iterable[Counted], nvcc: str) -> dict[str, Any]:
    """What the file holds: per row its registers and its loop by class, without the classes not used."""
    return {
        "nvcc": nvcc,
        "update": UPDATE,
        "rows": {
            loop.row.name: {
                "registers": loop.kernel.registers,
                "loop": {name: plain(count) for name, count in loop.loop.counts.items() if count},
            }
            for loop in loops
        },
    }


def build_counts(loops: Iterable[Counted], file: Path) -> dict[str, Any]:
    """The counts of the build in ``file``. Raises ValueError for a build that they must not be taken from."""
    loops = list(loops)
    foreign = [loop.row.name for loop in loops if loop.kernel.arch != loop.row.arch]
    if foreign:
        raise ValueError(f"{foreign[0]} is compiled for another architecture: take a build without a proxy")
    compilers = set(read_compilers(file).values())
    if len(compilers) != 1:
        raise ValueError(f"code of {len(compilers)} compilers in {file}: {', '.join(sorted(compilers))}")
    return counts_of(loops, compilers.pop())


def write_counts(counts: dict[str, Any], path: Path = COUNTS) -> None:
    """JSON with one line per row, so that a changed row is a changed line in a diff.

    Raises ValueError for a main loop with spills: no row may have any, so there is nothing to hold others to.
    """
    spills = [name for name, row in counts["rows"].items() if "spill" in row["loop"]]
    if spills:
        raise ValueError(f"{', '.join(spills)}: spills in the main loop, nothing was written")
    rows = ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in counts["rows"].items())
    head = "".join(f' "{key}": {json.dumps(counts[key])},\n' for key in ("nvcc", "update"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head} "rows": {{\n{rows}\n }}\n}}\n', encoding="utf-8")


def read_counts(path: Path = COUNTS) -> dict[str, Any]:
    """Raises FileNotFoundError with the command that makes the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing: {UPDATE}")
    counts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return counts


def changes(committed: dict[str, Any], built: dict[str, Any]) -> list[str]:
    """A sentence for each row that only one side has, and for each count that has grown too far.

    A row is only missed in a build that has others of its architecture.
    """
    old, new = committed["rows"], built["rows"]
    architectures = {architecture(name) for name in new}
    lines = [f"{name} has no committed counts: {UPDATE}" for name in new if name not in old]
    lines += [
        f"{name} has committed counts and is not in the build: {UPDATE}"
        for name in old
        if name not in new and architecture(name) in architectures
    ]
    for name in new:
        if name in old:
            lines += grown(name, old[name], new[name])
    return lines


def architecture(row: str) -> str:
    """The part of a row's name that says it: ``sm90``."""
    return row.split("_")[1]


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
            lines.append(f"{name}: mma per iteration of the main loop went from {was} to {now}; {advice}")
        elif now > was + max(ALLOWED_COUNT, ALLOWED_SHARE * was):
            lines.append(f"{name}: {kind} in the main loop grew from {plain(was)} to {plain(now)}; {advice}")
    return lines
