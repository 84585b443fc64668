"""Ranks tiles for a GPU that is not at hand, on an H100 or H200 made as slow at mma (docs/emulation.md).

    python tools/emulate.py l4 --preset dense --head-dim 128
    python tools/emulate.py rtx5090 --report
    python tools/emulate.py l4 --families --json FILE       the manifest's rows of all families
    python tools/emulate.py l4 --family backward            or of one alone

It is tools/tune.py with that GPU's rows and its balance: all other options, --json too, are those of it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tune
from building import ROOT, BuildError, Tree, run, tail
from cubin import ToolMissingError, run_tool
from profile_row import MMA_CLOCKS, mma_clocks
from tuning import families

from cutlass_fmha.cli import output
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


def measure_families(arch: int, passes: int, work: Path, defines: list[str], asked: Sequence[str]) -> dict[str, Any]:
    """What tuning/families.py says of the families asked for, of both architectures' build with so many passes.

    Raises BuildError, of a case without a row or a time, too.
    """
    variables: dict[str, object] = {
        "CMAKE_CUDA_ARCHITECTURES": sorted(ARCHITECTURES.values()),
        "CUTLASS_FMHA_EMULATION": "ON",
        "CUTLASS_FMHA_MMA_PASSES": passes,
        "CUTLASS_FMHA_MANIFEST": Path(families.__file__).with_name("beside.cmake"),
        "CUTLASS_FMHA_ROWS": families.rows_of(asked),
        "CUTLASS_FMHA_ROWS_PER_FILE": 2,
        **dict(define.split("=", 1) for define in defines),
    }
    tree = Tree(work.resolve() / f"families-passes{passes}", variables)
    extension = tree.build("_C", "_C*.so")
    package, ceiling, result = (tree.directory / name for name in ("package", "ceiling.so", f"sm{arch}.json"))
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "cutlass_fmha", package / "cutlass_fmha", ignore=shutil.ignore_patterns("_C*.so"))
    shutil.copy(extension, package / "cutlass_fmha")
    flags = ("-std=c++20", "-O3", "-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90,code=sm_90", "-o", ceiling)
    run_tool("nvcc", *flags, Path(families.__file__).with_name("ceiling.cu"))
    result.unlink(missing_ok=True)
    environment = (f"PYTHONPATH={package}", f"{devices.FORCE_ARCH}={arch}", "CUTLASS_FMHA_CALIBRATION=off")
    command = ["env", *environment, sys.executable, families.__file__, str(ceiling), str(result), ",".join(asked)]
    status, told = run(command, tree.directory / "families.log")
    if status:
        raise BuildError(f"measuring failed:\n{tail(told)}")
    found: dict[str, Any] = json.loads(result.read_text())
    usage = re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", run_tool("cuobjdump", "-res-usage", extension))
    return {**found, "stack": {row: int(bytes_) for row, bytes_ in usage if bytes_ != "0"}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other options, --json too, are those of tools/tune.py: see its --help.",
    )
    parser.add_argument("gpu", choices=TARGETS, metavar="GPU", help=", ".join(TARGETS))
    add = parser.add_argument_group("the manifest's rows of all families, in place of a search").add_argument
    add("--families", action="store_true", help="time them beside FlashAttention-2's tiles and the mma alone")
    add("--family", action="append", choices=families.ROWS, help="these alone, and plain rows; may be repeated")
    add("-D", dest="defines", action="append", default=[], metavar="NAME=VALUE", help="for CMake")
    options, rest = parser.parse_known_args(arguments)
    arch, passes = balance(options.gpu)
    if not options.families and not options.family:
        return tune.main(["--arch", str(arch), "--mma-passes", str(passes), *rest], name="emulate")
    asked = tune.parse_arguments(tune.build_parser(), rest)
    try:
        found = measure_families(arch, passes, asked.work, options.defines, options.family or tuple(families.ROWS))
    except (BuildError, ToolMissingError) as error:
        print(f"emulate: {error}", file=sys.stderr)
        return 1
    output.emit(found, families.tables(found), asked.json)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends, too
    raise SystemExit(main())
