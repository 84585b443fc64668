"""What commands share: how they take sizes, and answer: as text, or with ``--json`` as one JSON document."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

STDOUT = "-"


class Table(NamedTuple):
    """Cells as text; the first ``left`` columns begin where their heading does, and the last of ``remarks``;
    the others end there."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    remarks: bool = False

    def begins(self, column: int) -> bool:
        return column < self.left or (self.remarks and column == len(self.headings) - 1)

    @property
    def wraps(self) -> int:
        """The column whose text may take several lines; numbers and names stay whole."""
        return len(self.headings) - 1 if self.remarks else self.left - 1

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        lines = [self.headings, ["-" * width for width in widths], *self.rows]
        return "\n".join(self._line(cells, widths) for cells in lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = (
            cell.ljust(width) if self.begins(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write JSON to FILE besides, or to stdout in place of the text when no FILE is named",
    )


def sizes(text: str) -> tuple[int, ...]:
    """The type of an argument ``--shape B,S,H,D``."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != 4 or min(found) < 0:
        raise argparse.ArgumentTypeError(f"four sizes batch,seqlen_q,num_heads,head_dim are needed, got {text!r}")
    return found


def one_line(error: Exception) -> str:
    """What an error says; of a torch that is missing, what to do."""
    said = " ".join(str(error).split()) or type(error).__name__
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    return said + (": pip install 'torch>=2.6'" if missing else "")


def to_json(content: Any) -> str:
    return json.dumps(finite(content), indent=1, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_text(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def emit(content: Any, parts: Iterable[str | Table], where: str | None) -> None:
    """Prints text, or writes JSON where ``--json`` said."""
    if where == STDOUT:
        sys.stdout.write(to_json(content))
        return
    show(parts)
    if where is not None:
        write_text(to_json(content), Path(where))


class Told(Protocol):
    """What prints itself for a pipe, and has a table for a terminal: headings and rows among lines."""

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]: ...


def told(found: Told) -> list[str | Table]:
    before, table, after = found.parts()
    if not (table and draws()):
        return [str(found)]
    return [*before, Table(table[0], table[1:], remarks=True), *after]


def draws() -> bool:
    """Whether tables are drawn: by rich where it is installed and somebody looks."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def show(parts: Iterable[str | Table]) -> None:
    """Tables by rich where it draws them; what goes to a file or a pipe is plain."""
    if not draws():
        for part in parts:
            print(part)
        return
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    console = rich.console.Console(highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False)
            continue
        drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for column, cells in enumerate(zip(part.headings, *part.rows, strict=True)):
            wraps = column == part.wraps
            drawn.add_column(
                rich.text.Text(cells[0]),
                justify="left" if part.begins(column) else "right",
                no_wrap=not wraps,
                min_width=max((len(x) for cell in cells for x in (cell.split() if wraps else [cell])), default=0),
            )
        for row in part.rows:
            drawn.add_row(*map(rich.text.Text, row))
        least = console.measure(drawn, options=console.options.update(max_width=sys.maxsize)).minimum
        if least > console.width:  # rich would cut cells
            print(part)
        else:
            console.print(drawn)
