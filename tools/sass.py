"""What each row's main loop holds: the code for one block of keys; and what has grown since it was committed.

    python tools/sass.py --rows d128             the installed build, some rows
    python tools/sass.py --opcodes --rows NAME   every opcode of the loop, to see what a change added

Counts are those of mainloop.py, without the rows whose warps divide the keys. Needs cuobjdump and nvdisasm,
and no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cubin import Kernel, read_kernels
from mainloop import CLASSES, Loop, LoopNotFoundError, main_loop
from resources import UPDATE

from cutlass_fmha.cli import output


@dataclass(frozen=True)
class RowLoop:
    """A row of the table of kernels together with its machine code. ``row`` is a ``_C.Row``."""

    row: Any
    kernel: Kernel
    loop: Loop


def installed() -> tuple[Path, list[Any]]:
    """The extension and its rows. Raises ValueError for one of whose mma not all are useful."""
    from cutlass_fmha import _C

    if (passes := _C.build_info()["mma_passes"]) != 1:
        raise ValueError(
            f"this build runs each mma pass {passes} times, to emulate a GPU: take one that doesn't"
        )
    return Path(str(_C.__file__)), list(_C.rows())


def is_counted(row: Any) -> bool:
    """Whether a row's main loop is worth counting.

    Not where the warps of a block share the keys: such a loop loads straight into registers, runs a few times
    if at all (the first step stands before it), and is bound by latency.
    Nor in a scored row: most of its loop is branches that a problem takes or doesn't.
    """
    return bool(row.family == "plain")


def read_rows(file: Path, rows: Iterable[Any]) -> list[RowLoop]:
    """The main loop of every kernel in ``file`` that is a counted one of ``rows``, in the order of the rows.

    Raises LoopNotFoundError for a kernel without one.
    """
    return loops_of(read_kernels(file), rows)


def loops_of(kernels: Iterable[Kernel], rows: Iterable[Any]) -> list[RowLoop]:
    by_name = {row.name: row for row in rows if is_counted(row)}
    found = [RowLoop(by_name[x.name], x, main_loop(x)) for x in kernels if x.name in by_name]
    order = list(by_name)
    return sorted(found, key=lambda loop: order.index(loop.row.name))


# ---- what has grown since the committed counts (tests/data/resources.json) --------------------------------

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


# ---- tables ------------------------------------------------------------------------------------------------

SHOWN = ("mma", "mufu", "fp32", "convert", "imad", "alu", "ldsm", "copy", "barrier", "uniform", "nop")


def table(loops: list[RowLoop]) -> output.Table:
    head = ["row", "regs", "code", *SHOWN, "rest"]
    lines = []
    for loop in loops:
        found = entry(loop)
        sizes = [found["row"], found["registers"], found["code"]]
        lines.append([*map(str, sizes), *map(str, found["loop"].values())])
    return output.Table(head, lines)


def entry(loop: RowLoop) -> dict[str, Any]:
    """What the table has of a row, and the opcodes."""
    counts = {name: loop.loop.counts[name] for name in SHOWN}
    counts["rest"] = sum(loop.loop.counts.values()) - sum(counts.values())
    return {
        "row": loop.row.name,
        "registers": loop.kernel.registers,
        "code": len(loop.kernel.code),
        "loop": counts,
        "opcodes": dict(loop.loop.opcodes.most_common()),
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it is found in")
    parser.add_argument("--opcodes", action="store_true", help="list the loop's opcodes per row")
    output.add_json(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        file, rows = installed()
        loops = read_rows(file, [row for row in rows if re.search(options.rows, row.name)])
        if not loops:
            print(f"no row with a counted loop in {file} whose name holds {options.rows!r}", file=sys.stderr)
            return 1
    except (LoopNotFoundError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    parts: list[str | output.Table] = [table(loops)]
    for loop in loops if options.opcodes else ():
        listed = ", ".join(f"{name} {n}" for name, n in loop.loop.opcodes.most_common())
        parts.append(f"\n{loop.row.name}: {listed}")
    output.emit([entry(loop) for loop in loops], parts, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
