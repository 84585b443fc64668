"""``python -m cutlass_fmha.bench.host_time``: what a call costs the interpreter, in microseconds: repeated, through
each surface beside the direct call, and with a length that it never saw before. Needs a GPU; the benchmark's preset
``latency`` tells it, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import kept
from .host import new_lengths, repeated
from .report import table
from .surfaces import HEADINGS, measure_surfaces, rows


def text(result: dict[str, Any]) -> str:
    return "\n".join(table(HEADINGS, rows(result["host_us"]))) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Returns 1 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m cutlass_fmha.bench.host_time", description=__doc__)
    kept.add_options(parser)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() and not arguments.from_json:
        print("host_time: a GPU's calls are timed, and torch finds none", file=sys.stderr)
        return 1

    def found(device: torch.device) -> Iterator[dict[str, Any]]:
        result: dict[str, Any] = {"host_us": {}}
        for part in (repeated, new_lengths, measure_surfaces):  # after JAX's calls all others take longer
            result["host_us"] |= part()
            yield result

    kept.run(arguments, found, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
