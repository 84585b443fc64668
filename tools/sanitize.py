"""Small problems for every kernel of this GPU under NVIDIA's compute-sanitizer.

Exit status 1 when a tool reports an error or a hazard, or when it could not look at every kernel. The problems are in
small_problems.py; without a tool they run alone.
"""

import argparse
import collections
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: mbarrier objects per block that racecheck and synccheck follow; left to themselves they may count too few.
BARRIERS = ("--num-cuda-barriers=32",)
#: With what each is told; initcheck does not see what TMA writes, and can't judge such kernels.
TOOLS = {"memcheck": (), "racecheck": BARRIERS, "synccheck": BARRIERS, "initcheck": ()}
UNSEEN = {"initcheck": ("_tma",)}
#: Exit status where the time was over before every kernel had a problem.
CUT = 3
#: Kernels in which racecheck warns of two writes with nothing between them, which is harmless: CUTLASS's
#: example 41 asks for V of the next columns of O while zeros for keys that aren't there may still be on their
#: way to the same place, and both bring the same zeros. Its other warnings, and its errors, count.
SAME_ZEROS = r"wide_sm\d+_b?f16_dany_\w+"
_SAME_ZEROS = re.compile(
    rf"Warning: Race reported between Write access at {SAME_ZEROS}\+0x\w+\n"
    rf"=+ +and Write access at {SAME_ZEROS}\+0x\w+ \[\d+ hazards\]\n=+ *\n"
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def check_kernels(parts: Sequence[str], without: Sequence[str], seconds: float) -> int:
    """Runs problems of kernels with one of ``parts`` (any, where there are none) and none of ``without`` in their
    names, of each the first, then of each the second, until the time is over, and tells which were reached. Returns 0,
    CUT, or 1 where there is no kernel."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from small_problems import kernels

    found, ran, end = kernels(), 0, time.monotonic() + seconds
    left = (name for name in found if not any(part in name for part in without))
    names = [name for name in left if not parts or any(part in name for part in parts)]
    waiting, missed = collections.deque((name, found[name]()) for name in names), set(names)
    while waiting and time.monotonic() < end:
        name, problems = waiting.popleft()
        print(name, flush=True)
        missed.discard(name)
        if next(problems, waiting) is not waiting:
            ran += 1
            waiting.append((name, problems))
    whole = f"{len(names) - len(waiting)} with all of their problems: {ran}"
    told = [f"{len(names) - len(missed)} of {len(names)} kernels, {whole}"]
    print(*told, *(f"not reached: {name}" for name in sorted(missed)), sep="\n", flush=True)
    return CUT if missed else int(not names)


def verdict(tool: str, status: int, output: str) -> str | None:
    """What is wrong with a run of compute-sanitizer, in one sentence; None when it found nothing."""
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    if not summaries:
        return f"{tool} printed no summary (exit status {status}): it did not run to the end"
    if found := sum(summaries) - len(_SAME_ZEROS.findall(output)):
        return f"{tool} reports {found} errors or hazards"
    failed = f"the problems failed with exit status {status}"
    why = {0: None, CUT: "its time was over before every kernel had a problem"}.get(status, failed)
    return why and f"{tool} found nothing, and {why}"


def run_tool(tool: str, parts: Sequence[str], without: Sequence[str], seconds: float) -> str | None:
    """The problems of kernels under one tool; its output goes to the terminal. Returns the verdict."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "compute-sanitizer was not found on PATH: install the CUDA toolkit's sanitizer"
    command = [program, "--tool", tool, *TOOLS[tool], sys.executable, __file__]
    command += ["--seconds", str(seconds), "--without", *UNSEEN.get(tool, ()), *without, "--rows", *parts]
    # An allocation of its own for every tensor: inside the allocator's pool an access beyond one end would
    # hit another.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    output = ""
    with subprocess.Popen(command, env=environment, **streams) as process:
        for line in process.stdout:
            output += line
            print(line, end="", flush=True)
    return verdict(tool, process.returncode, output)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--tool", choices=(*TOOLS, "all"), help="run under this tool of compute-sanitizer")
    add("--rows", nargs="*", default=[], metavar="PART", help="only kernels with PART in their name")
    add("--without", nargs="*", default=[], metavar="PART", help="no kernel with PART in its name")
    add("--seconds", type=float, default=math.inf, metavar="N", help="of each tool: begin no problem after so long")
    options = parser.parse_args(arguments)
    if options.tool is None:
        return check_kernels(options.rows, options.without, options.seconds)
    problems = []
    for tool in TOOLS if options.tool == "all" else (options.tool,):
        problems.append(run_tool(tool, options.rows, options.without, options.seconds))
        print(f"sanitize: {problems[-1] or f'{tool} found nothing'}", flush=True)
    return int(any(problems))


if __name__ == "__main__":
    raise SystemExit(main())
