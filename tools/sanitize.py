"""Small problems for every kernel of this GPU under NVIDIA's compute-sanitizer.

    python tools/sanitize.py --tool racecheck               or memcheck, synccheck, initcheck, all
    python tools/sanitize.py --tool racecheck --rows d128   only kernels with d128 in their name
    python tools/sanitize.py --tool all --jobs 2            in two processes, which share the kernels
    python tools/sanitize.py                                the problems alone, against the dense fp64 oracle

Exit status 1 when a tool reports an error or a hazard, or when it could not look. The problems are in
small_problems.py; CUTLASS_FMHA_FORCE_ARCH picks the kernels as it does elsewhere. Processes take turns on a
GPU, and changing from one to the next may cost more than they gain: on an H200 one is fastest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

#: mbarrier objects per block that racecheck and synccheck follow; left to themselves they may count too few.
BARRIERS = 32
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Kernels that a tool can't judge: initcheck does not see what TMA writes.
UNSEEN = {"initcheck": ("_tma",)}
#: Kernels in which racecheck warns of two writes with nothing between them, which is harmless: CUTLASS's
#: example 41 asks for V of the next columns of O while zeros for keys that aren't there may still be on their
#: way to the same place, and both bring the same zeros. Its other warnings, and its errors, count.
SAME_ZEROS = r"fallback_sm\d+_b?f16_dany_\w+"
_SAME_ZEROS = re.compile(
    rf"Warning: Race reported between Write access at {SAME_ZEROS}\+0x\w+\n"
    rf"=+ +and Write access at {SAME_ZEROS}\+0x\w+ \[\d+ hazards\]\n=+ *\n"
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


@dataclass(frozen=True)
class Share:
    """Which kernels a process takes: those with one of ``parts`` and none of ``without`` in their name, every
    ``of``-th of them."""

    parts: tuple[str, ...] = ()
    number: int = 0
    of: int = 1
    without: tuple[str, ...] = ()

    def take(self, names: list[str]) -> list[str]:
        taken = [name for name in names if matches(name, self.parts)]
        if self.without:
            taken = [name for name in taken if not matches(name, self.without)]
        return taken[self.number :: self.of]

    @property
    def arguments(self) -> list[str]:
        return ["--share", f"{self.number}/{self.of}", "--without", *self.without, "--rows", *self.parts]


def check_kernels(share: Share) -> int:
    """Run the problems of a share. Returns how many kernels they were of."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from small_problems import kernels

    found = kernels()
    names = share.take(list(found))
    for name in names:
        print(name, flush=True)
        found[name]()
    return len(names)


def matches(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in name for part in parts)


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


def run_tool(tool: str, share: Share) -> str | None:
    """The problems of a share under one tool; its output goes to the terminal. Returns the verdict."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "compute-sanitizer was not found on PATH: install the CUDA toolkit's sanitizer"
    limit = [f"--num-cuda-barriers={BARRIERS}"] if tool in ("racecheck", "synccheck") else []
    command = [program, "--tool", tool, *limit, sys.executable, __file__, *share.arguments]
    # An allocation of its own for every tensor: inside the allocator's pool an access beyond one end would
    # hit another.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    prefix = f"{share.number}| " if share.of > 1 else ""
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            print(f"{prefix}{line}", end="", flush=True)
    return verdict(tool, process.returncode, "".join(output))


def run_tools(tools: Sequence[str], parts: Sequence[str], jobs: int) -> bool:
    """Every tool over every share, ``jobs`` processes at a time. True: all is well."""
    shares = [Share(tuple(parts), number, jobs) for number in range(jobs)]
    work = [(tool, replace(share, without=UNSEEN.get(tool, ()))) for tool in tools for share in shares]
    clean = True
    with ThreadPoolExecutor(jobs) as pool:
        problems = pool.map(lambda each: run_tool(*each), work)
        for (tool, share), problem in zip(work, problems, strict=True):
            print(
                f"sanitize: {problem or f'{tool} found nothing'} ({share.number + 1}/{share.of})", flush=True
            )
            clean &= problem is None
    return clean


def parse_share(text: str) -> tuple[int, int]:
    number, of = map(int, text.split("/"))
    if not 0 <= number < of:
        raise ValueError(text)
    return number, of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", choices=(*TOOLS, "all"), help="run under this tool of compute-sanitizer")
    parser.add_argument(
        "--rows", nargs="*", default=[], metavar="PART", help="only kernels with PART in their name"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the kernels")
    parser.add_argument(
        "--share", type=parse_share, default=(0, 1), metavar="I/N", help="only every N-th, from number I on"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="PART", help="no kernel with PART in its name"
    )
    options = parser.parse_args(arguments)
    if options.tool is None:
        number, of = options.share
        count = check_kernels(Share(tuple(options.rows), number, of, tuple(options.without)))
        print(f"{count} kernels")
        return 0 if count else 1
    tools = TOOLS if options.tool == "all" else (options.tool,)
    return 0 if run_tools(tools, options.rows, options.jobs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
