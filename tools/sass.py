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
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cubin import Kernel, read_kernels
from mainloop import CLASSES, Loop, main_loop
from resources import UPDATE

from cutlass_fmha.cli import output


class RowLoop(NamedTuple):
    """A row of the table of kernels together with its machine code. ``row`` is a ``_C.Row``."""

    row: Any
    kernel: Kernel
    loop: Loop


def loops_of(kernels: Iterable[Kernel], rows: Iterable[Any]) -> list[RowLoop]:
    """The main loop of every kernel that is a counted one of ``rows``, in the order of the rows.

    Not where the warps of a block share the keys: such a loop loads straight into registers, runs a few times
    if at all (the first step stands before it), and is bound by latency. Nor in a scored row: most of its
    loop is branches that a problem takes or doesn't. Raises LoopNotFoundError for a kernel without one.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    wanted = [row for row in rows if row.family == "plain" and row.name in by_name]
    return [RowLoop(row, by_name[row.name], main_loop(by_name[row.name])) for row in wanted]


# ---- what has grown since the committed counts (tests/data/resources.json) --------------------------------

ALLOWED_SHARE, ALLOWED_COUNT = 0.02, 4  # a class may grow by either, whichever is more
ALLOWED_REGISTERS = 8  # registers are given out in eights


def loop_entry(loop: Loop) -> dict[str, int]:
    """What the report holds of a main loop: its counts by class, without the classes not used."""
    return {name: count for name, count in loop.counts.items() if count}


def changes(committed: dict[str, Any], built: dict[str, Any]) -> list[str]:
    """A sentence for each count that has grown too far; of mma, for each that changed. Both: row -> its registers
    and its loop.

    Of rows that both have: ``make release-check`` tells whether the committed ones are all there are.
    """
    lines = []
    for name in filter(committed.__contains__, built):
        advice = f"look for the cause (python tools/sass.py --opcodes --rows {name}), or accept it: {UPDATE}"
        old, new = committed[name], built[name]
        if new["registers"] > old["registers"] + ALLOWED_REGISTERS:
            lines.append(f"{name}: registers grew from {old['registers']} to {new['registers']}; {advice}")
        before, after = (each["loop"] | {"all classes": sum(each["loop"].values())} for each in (old, new))
        for kind in (*CLASSES, "all classes"):
            was, now = before.get(kind, 0), after.get(kind, 0)
            if kind == "mma" and was != now:
                lines.append(f"{name}: mma in the main loop went from {was} to {now}; {advice}")
            elif now > was + max(ALLOWED_COUNT, ALLOWED_SHARE * was):
                lines.append(f"{name}: {kind} in the main loop grew from {was} to {now}; {advice}")
    return lines


# ---- the command -------------------------------------------------------------------------------------------


def entry(row: Any, kernel: Kernel, loop: Loop) -> dict[str, Any]:
    """What is told of a row, and its opcodes."""
    sizes = {"row": row.name, "registers": kernel.registers, "code": len(kernel.code)}
    return {**sizes, "loop": loop_entry(loop), "opcodes": dict(loop.opcodes.most_common())}


def main(arguments: list[str] | None = None) -> int:
    from cutlass_fmha import _C

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it is found in")
    parser.add_argument("--opcodes", action="store_true", help="list the loop's opcodes per row")
    output.add_json(parser)
    options = parser.parse_args(arguments)
    if (passes := _C.build_info()["mma_passes"]) != 1:
        print(f"this build runs each mma pass {passes} times, to emulate a GPU", file=sys.stderr)
        return 1
    rows = [row for row in _C.rows() if re.search(options.rows, row.name)]
    try:
        entries = [entry(*found) for found in loops_of(read_kernels(Path(str(_C.__file__))), rows)]
    except (OSError, RuntimeError, ValueError) as error:  # a missing tool, a kernel without a loop
        print(error, file=sys.stderr)
        return 1
    if not entries:
        print(f"no row with a counted loop whose name holds {options.rows!r}", file=sys.stderr)
        return 1
    kinds = [kind for kind in CLASSES if any(kind in each["loop"] for each in entries)]
    lines = [[*map(str, (*list(x.values())[:3], *(x["loop"].get(kind, 0) for kind in kinds)))] for x in entries]
    parts: list[str | output.Table] = [output.Table(["row", "regs", "code", *kinds], lines)]
    if options.opcodes:
        parts += [f"\n{x['row']}: {', '.join(f'{name} {n}' for name, n in x['opcodes'].items())}" for x in entries]
    output.emit(entries, parts, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
