"""Ranks tiles for a GPU that is not at hand, on an H100 or H200 made as slow at mma (docs/emulation.md).

    python tools/emulate.py l4 --preset dense --head-dim 128
    python tools/emulate.py rtx5090 --report

It is tools/tune.py with that GPU's rows and its balance: all other options, --json too, are those of it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tune
from profile_row import MMA_CLOCKS, mma_clocks

from cutlass_fmha.dispatch import device as devices

#: Whose tensor pipe is known, and slower than an H200's: capability -> whose rows it takes.
ARCHITECTURES = {(8, 9): 89, (12, 0): 120}
TARGETS = {name: gpu for name, gpu in devices.PRESETS.items() if gpu.capability in ARCHITECTURES}


def balance(name: str) -> tuple[int, int]:
    """(architecture, how often each pass of mma runs: the odd number that is closest to what mma takes
    there over what it takes on an H200)."""
    gpu = TARGETS[name]
    arch = ARCHITECTURES[gpu.capability]
    return arch, 2 * round((mma_clocks(arch, gpu.name) / MMA_CLOCKS[90] - 1) / 2) + 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other options, --json too, are those of tools/tune.py: see its --help.",
    )
    parser.add_argument("gpu", choices=TARGETS, metavar="GPU", help=", ".join(TARGETS))
    options, rest = parser.parse_known_args(arguments)
    arch, passes = balance(options.gpu)
    return tune.main(["--arch", str(arch), "--mma-passes", str(passes), *rest])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends, too
    raise SystemExit(main())
