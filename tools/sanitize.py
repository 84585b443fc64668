"""Small problems for every row of this GPU under NVIDIA's compute-sanitizer.

    python tools/sanitize.py --tool racecheck               or memcheck, synccheck, initcheck, all
    python tools/sanitize.py --tool racecheck --rows d128   only rows with d128 in their name
    python tools/sanitize.py                                the problems alone, against the dense fp64 oracle

Exit status 1 when a tool reports an error or a hazard, or when it could not look. Inputs are made and
results checked on the CPU, so that no kernel but ours runs; CUTLASS_FMHA_FORCE_ARCH picks the rows as
it does elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

#: mbarrier objects per block that racecheck and synccheck follow; left to themselves they may count too few.
BARRIERS = 32
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def check_rows(patterns: list[str]) -> int:
    """Run each row whose name contains one of ``patterns`` (all without any). Returns how many."""
    import torch

    import cutlass_fmha
    from cutlass_fmha import _C
    from cutlass_fmha import device as devices

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import oracle

    built = frozenset(row.arch for row in _C.templates())
    arch = devices.rows_arch(devices.of_index(0), built)
    rows = [row for row in _C.templates() if row.arch == arch and matches(row.name, patterns)]
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        # More than one tile of queries and four of keys, both ragged: every buffer is used again, every mask
        # is met.
        lengths = (row.tile_m + 9, 4 * row.tile_n * row.kv_warps + 5)
        for causal, (seqlen_q, seqlen_k) in (("none", lengths), ("bottom-right", (lengths[1], lengths[0]))):
            shapes = [(1, seqlen_q, 2), (1, seqlen_k, 1), (1, seqlen_k, 1)]
            dtype = getattr(torch, row.dtype)
            q, k, v = (torch.randn(*s, row.head_dim, generator=generator).to(dtype) for s in shapes)
            k *= torch.linspace(0.5, 4.0, seqlen_k).to(dtype).reshape(1, -1, 1, 1)  # the softmax must rescale
            out, lse = cutlass_fmha.attention(
                *(x.cuda() for x in (q, k, v)), causal=causal, return_lse=True, template=row.name
            )
            errors = oracle.assert_close(out.cpu(), q, k, v, causal=causal, lse=lse.cpu())
            print(
                f"{row.name} q{seqlen_q} k{seqlen_k} {causal}: {errors.worst:.3f} of the tolerance",
                flush=True,
            )
    return len(rows)


def matches(name: str, patterns: list[str]) -> bool:
    return not patterns or any(pattern in name for pattern in patterns)


def verdict(tool: str, status: int, output: str) -> str | None:
    """What is wrong with a run of compute-sanitizer, in one sentence; None when it found nothing."""
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    if not summaries:
        return f"{tool} printed no summary (exit status {status}): it did not run to the end"
    if any(summaries):
        return f"{tool} reports {sum(summaries)} errors or hazards"
    if status != 0:
        return f"{tool} found nothing, and the problems failed with exit status {status}"
    return None


def run_tool(tool: str, patterns: list[str]) -> str | None:
    """This script's problems under one tool; its output goes to the terminal. Returns the verdict."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "compute-sanitizer was not found on PATH: install the CUDA toolkit's sanitizer"
    limit = [f"--num-cuda-barriers={BARRIERS}"] if tool in ("racecheck", "synccheck") else []
    command = [program, "--tool", tool, *limit, sys.executable, __file__, "--rows", *patterns]
    # An allocation of its own for every tensor: inside the allocator's pool an access beyond one end would
    # hit another.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
    )
    print(result.stdout, flush=True)
    return verdict(tool, result.returncode, result.stdout)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", choices=(*TOOLS, "all"), help="run under this tool of compute-sanitizer")
    parser.add_argument(
        "--rows", nargs="*", default=[], metavar="PART", help="only rows with PART in their name"
    )
    options = parser.parse_args(arguments)
    if options.tool is None:
        count = check_rows(options.rows)
        print(f"{count} rows")
        return 0 if count else 1
    failed = False
    for tool in TOOLS if options.tool == "all" else (options.tool,):
        problem = run_tool(tool, options.rows)
        print(f"sanitize: {problem or f'{tool} found nothing'}", flush=True)
        failed |= problem is not None
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
