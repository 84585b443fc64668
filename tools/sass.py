"""What each row's main loop holds: the code for one block of keys.

    python tools/sass.py                         the installed build
    python tools/sass.py FILE --rows d128        another extension, object file, fatbin or cubin; some rows
    python tools/sass.py --opcodes --rows NAME   every opcode of the loop, to see what a change added

Counts are those of mainloop.py, without the rows whose warps divide the keys. Needs cuobjdump and nvdisasm,
and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cubin import Kernel, read_kernels
from mainloop import Loop, LoopNotFoundError, main_loop
from tabulate import tabulate

#: A program that prints build_info() and the table of kernels of the extension that its argument names.
PRINT_ROWS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
names = [name for name in vars(module.Row) if not name.startswith("_")]
rows = [{name: getattr(row, name) for name in names if hasattr(row, name)} for row in module.rows()]
print(json.dumps([module.build_info(), rows]))
"""


@dataclass(frozen=True)
class RowLoop:
    """A row of the table of kernels together with its machine code. ``row`` is a ``_C.Row``."""

    row: Any
    kernel: Kernel
    loop: Loop


def rows_of(file: Path | None) -> tuple[Path, list[Any]]:
    """The file to read and its table of kernels: ``_C.rows()``, or the like of it.

    The installed extension's table serves for a file that this Python can't import. Raises ValueError for an
    extension whose table can't be had, and for one that repeats its mma.
    """
    if file is None or not any(file.name.endswith(suffix) for suffix in EXTENSION_SUFFIXES):
        from cutlass_fmha import _C

        refuse_repeated_mma(_C.build_info(), file or Path(str(_C.__file__)))
        return file or Path(str(_C.__file__)), list(_C.rows())
    # In a process of its own: one process holds one _C.
    command = [sys.executable, "-c", PRINT_ROWS, str(file.resolve())]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ValueError(f"{file} can't be imported: {answer.stderr.strip().splitlines()[-1]}")
    build, rows = json.loads(answer.stdout)
    refuse_repeated_mma(build, file)
    return file, [SimpleNamespace(**row) for row in rows]


def refuse_repeated_mma(build: dict[str, Any], file: Path) -> None:
    """Raises ValueError for an emulation build, of whose loops the mma are not all useful."""
    passes = build.get("mma_passes", 1)
    if passes != 1:
        raise ValueError(
            f"{file} runs each mma pass {passes} times (an emulation build): take one that doesn't"
        )


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


# ---- tables ------------------------------------------------------------------------------------------------

SHOWN = ("mma", "mufu", "fp32", "convert", "imad", "alu", "ldsm", "copy", "barrier", "uniform", "nop")


def table(loops: list[RowLoop]) -> str:
    head = ["row", "regs", "code", *SHOWN, "rest"]
    lines = []
    for loop in loops:
        counts = loop.loop.counts
        shown = [counts[name] for name in SHOWN]
        sizes = [loop.row.name, loop.kernel.registers, len(loop.kernel.code)]
        lines.append([*sizes, *shown, sum(counts.values()) - sum(shown)])
    return tabulate(lines, head)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="extension, object file, fatbin or cubin (default: the installed one)",
    )
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it is found in")
    parser.add_argument("--opcodes", action="store_true", help="list the loop's opcodes per row")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        file, rows = rows_of(options.file)
        loops = read_rows(file, [row for row in rows if re.search(options.rows, row.name)])
        if not loops:
            print(f"no row with a counted loop in {file} whose name holds {options.rows!r}", file=sys.stderr)
            return 1
    except (LoopNotFoundError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(loops))
    if options.opcodes:
        for loop in loops:
            listed = ", ".join(f"{name} {n}" for name, n in loop.loop.opcodes.most_common())
            print(f"\n{loop.row.name}: {listed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
