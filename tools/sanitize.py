"""Small problems for every kernel of this GPU under NVIDIA's compute-sanitizer.

    python tools/sanitize.py --tool racecheck               or memcheck, synccheck, initcheck, all
    python tools/sanitize.py --tool racecheck --rows d128   only kernels with d128 in their name
    python tools/sanitize.py                                the problems alone, against the dense fp64 oracle

Exit status 1 when a tool reports an error or a hazard, or when it could not look. The problems are in
small_problems.py; CUTLASS_FMHA_FORCE_ARCH picks the kernels as it does elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

#: mbarrier objects per block that racecheck and synccheck follow; left to themselves they may count too few.
BARRIERS = 32
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Kernels that a tool can't judge: initcheck does not see what TMA writes.
UNSEEN = {"initcheck": ("_tma",)}
#: Kernels in which racecheck warns of two writes with nothing between them, which is harmless: CUTLASS's
#: example 41 asks for V of the next columns of O while zeros for keys that aren't there may still be on their
#: way to the same place, and both bring the same zeros. Its other warnings, and its errors, count.
SAME_ZEROS = r"wide_sm\d+_b?f16_dany_\w+"
_SAME_ZEROS = re.compile(
    rf"Warning: Race reported between Write access at {SAME_ZEROS}\+0x\w+\n"
    rf"=+ +and Write access at {SAME_ZEROS}\+0x\w+ \[\d+ hazards\]\n=+ *\n"
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def take(names: Iterable[str], parts: Sequence[str], without: Sequence[str]) -> list[str]:
    """The names with one of ``parts`` (any, where there are none) and none of ``without`` in them."""
    return [
        name
        for name in names
        if (not parts or any(part in name for part in parts)) and not any(part in name for part in without)
    ]


def check_kernels(parts: Sequence[str], without: Sequence[str]) -> int:
    """Run the problems of these kernels. Returns how many kernels they were of."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from small_problems import kernels

    found = kernels()
    names = take(found, parts, without)
    for name in names:
        print(name, flush=True)
        found[name]()
    return len(names)


def verdict(tool: str, status: int, output: str) -> str | None:
    """What is wrong with a run of compute-sanitizer, in one sentence; None when it found nothing."""
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    if not summaries:
        return f"{tool} printed no summary (exit status {status}): it did not run to the end"
    found = sum(summaries) - len(_SAME_ZEROS.findall(output))
    if found:
        return f"{tool} reports {found} errors or hazards"
    if status != 0:
        return f"{tool} found nothing, and the problems failed with exit status {status}"
    return None


def run_tool(tool: str, parts: Sequence[str]) -> str | None:
    """The problems of kernels under one tool; its output goes to the terminal. Returns the verdict."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "compute-sanitizer was not found on PATH: install the CUDA toolkit's sanitizer"
    limit = [f"--num-cuda-barriers={BARRIERS}"] if tool in ("racecheck", "synccheck") else []
    command = [program, "--tool", tool, *limit, sys.executable, __file__]
    command += ["--without", *UNSEEN.get(tool, ()), "--rows", *parts]
    # An allocation of its own for every tensor: inside the allocator's pool an access beyond one end would
    # hit another.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            print(line, end="", flush=True)
    return verdict(tool, process.returncode, "".join(output))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--tool", choices=(*TOOLS, "all"), help="run under this tool of compute-sanitizer")
    add("--rows", nargs="*", default=[], metavar="PART", help="only kernels with PART in their name")
    add("--without", nargs="*", default=[], metavar="PART", help="no kernel with PART in its name")
    options = parser.parse_args(arguments)
    if options.tool is None:
        count = check_kernels(options.rows, options.without)
        print(f"{count} kernels")
        return 0 if count else 1
    clean = True
    for tool in TOOLS if options.tool == "all" else (options.tool,):
        problem = run_tool(tool, options.rows)
        print(f"sanitize: {problem or f'{tool} found nothing'}", flush=True)
        clean &= problem is None
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
