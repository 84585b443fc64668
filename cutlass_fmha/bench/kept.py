"""A benchmark's result as a file: written, read again, told as Markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import machine, report


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the table")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", metavar="PATH", help="the tables of kept results, joined to one"
    )


def run(
    arguments: argparse.Namespace,
    measure: Callable[[torch.device], Iterator[dict[str, Any]]],
    text: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """What was kept, or what ``measure`` finds on the GPU, if there is one; printed and written as asked.

    ``measure`` yields all that it has found so far, after each case, which is written: of a run that is cut
    the cases before it are left, as ``unfinished``.
    """
    result: dict[str, Any] = {}
    if arguments.from_json:
        try:
            result = report.joined([json.loads(path.read_text()) for path in arguments.from_json])
        except report.InvalidReport as error:
            raise SystemExit(str(error)) from None
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        cuda = device.type == "cuda"
        about = machine.describe(0) if cuda else {"gpu": None}
        found: dict[str, Any] = {}
        for found in measure(device):
            _write({"machine": about, "unfinished": True, **found}, arguments.json)
        result = {"machine": about | ({"clocks_after": machine.read_smi(0)} if cuda else {}), **found}
    print(text(result))
    if arguments.markdown:
        arguments.markdown.write_text(text(result))
    _write(result, arguments.json)
    return result


def _write(result: dict[str, Any], path: Path | None) -> None:
    """Whoever ends this leaves the file before or this one, not half of it."""
    if path is not None:
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(path)
