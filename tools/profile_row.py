"""What bounds a kernel: Nsight Compute on one call of a problem, with the metrics that docs/profiling.md explains.

    python tools/profile_row.py b2_h16_s8192_d128_bf16         a case of the benchmark (`bench --list`)
    python tools/profile_row.py --shape 1,8192,32,128 --causal --row NAME
    python tools/profile_row.py CASE -- --csv --page raw       what follows -- is ncu's

Needs a GPU whose counters it may read, and ncu (of the CUDA toolkit, or with --ncu). It isn't called profile, as a
module is that cProfile imports.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cutlass_fmha.bench.cases import Case, select_cases
from cutlass_fmha.cli import output

ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: Nsight Compute's names (those of 2025.3), in the order of docs/profiling.md.
METRICS = (
    "gpu__time_duration.sum", f"sm__pipe_tensor_cycles_active.{ACTIVE}",
    f"sm__pipe_tensor_op_hmma_cycles_active.{ACTIVE}", f"smsp__issue_active.{ACTIVE}",
    f"sm__inst_executed_pipe_xu.{ACTIVE}", f"sm__pipe_fma_cycles_active.{ACTIVE}",
    f"sm__pipe_alu_cycles_active.{ACTIVE}", f"sm__throughput.{ELAPSED}", f"gpu__dram_throughput.{ELAPSED}",
    "lts__t_sector_hit_rate.pct", f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{ELAPSED}",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    f"sm__warps_active.{ACTIVE}", "sm__maximum_warps_per_active_cycle_pct", "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic", "launch__waves_per_multiprocessor",
    *map(STALL.format, (
        "mio_throttle", "math_pipe_throttle", "long_scoreboard", "short_scoreboard", "barrier", "wait", "not_selected",
        "no_instruction", "lg_throttle", "branch_resolving", "dispatch_stall", "membar",
    )),
)  # fmt: skip


def launch_once(case: Case, row: str | None, device: int) -> None:
    """In the process under ncu: warm up, then one call between the marks that it listens to."""
    import torch

    from cutlass_fmha.bench import lineup, runner

    runner.require_gpu(device)
    with torch.cuda.device(device), torch.inference_mode():
        inputs, feature, _ = runner.problem(case, device)
        contender = lineup.line_up(case, inputs, [], row, feature)[lineup.OURS]
        for _ in range(3):
            contender.call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        contender.call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("case", nargs="?", help="a case of the benchmark")
    add("--shape", type=output.sizes, metavar="B,S,H,D", help="batch, seqlen, num_heads, head_dim")
    add = parser.add_argument
    add("--seqlen-k", type=int, metavar="S", help="number of keys (default: seqlen)")
    add("--kv-heads", type=int, metavar="H", help="heads of key and value (default: num_heads)")
    add("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32"))
    add("--causal", action="store_true", help="a causal mask, bottom-right")
    add("--row", metavar="NAME", help="force one row of _C.rows() instead of selecting")
    add("--device", type=int, default=0, metavar="N", help="CUDA device number; default: 0")
    add("--ncu", metavar="PATH", help="Nsight Compute's program; default: ncu on PATH")
    add("--without", default="$^", metavar="REGEX", help="leave out metrics that this GPU or this ncu lacks")
    add("--once", action="store_true", help=argparse.SUPPRESS)
    return parser


def problem(options: argparse.Namespace) -> Case:
    """The case that was asked for. Raises ValueError for one that the benchmark doesn't have."""
    if options.shape is None:
        cases = select_cases([options.case])
        if len(cases) != 1:
            said = f"{options.case} is a group of {len(cases)} cases"
            raise ValueError(f"{said}: name one, as bench --list does")
        return cases[0]
    batch, seqlen, heads, head_dim = options.shape
    sizes = (batch, heads, options.kv_heads or heads, seqlen, options.seqlen_k or seqlen, head_dim)
    return Case("profile", *sizes, options.dtype, options.causal)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    own = given[: given.index("--")] if "--" in given else given
    parser = build_parser()
    options = parser.parse_args(own)
    try:
        case = problem(options)
        if options.once:
            launch_once(case, options.row, options.device)
            return 0
        ncu = options.ncu or shutil.which("ncu")
        if ncu is None:
            raise RuntimeError("ncu is not on PATH: install Nsight Compute, or name it with --ncu")
        metrics = [name for name in METRICS if not re.search(options.without, name)]
        command = [ncu, "--profile-from-start", "off", "--target-processes", "all", "--metrics", ",".join(metrics)]
        command += [*given[len(own) + 1 :], sys.executable, str(Path(__file__).resolve()), *own, "--once"]
        return subprocess.run(command, check=False).returncode
    except ValueError as error:
        parser.error(str(error))
    except (OSError, RuntimeError) as error:  # CannotMeasure is one
        print(f"profile_row: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
