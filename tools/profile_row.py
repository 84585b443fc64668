"""What bounds a kernel: Nsight Compute's figures of a problem, beside what the machine code lets expect.

    python tools/profile_row.py b2_h16_s8192_d128_bf16         a case of the benchmark (`bench --list`)
    python tools/profile_row.py --shape 1,8192,32,128 --causal --row NAME
    python tools/profile_row.py --csv FILE                     what ncu wrote elsewhere, rendered here

Needs a GPU whose counters it may read, and ncu (of the CUDA toolkit, or with --ncu). docs/profiling.md says
what each figure means and what to do about it. It isn't called profile, as a module is that cProfile imports.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cubin import RESERVED_SHARED
from resources import REGISTERS_PER_SM, REPORT, SHARED_PER_SM, SHARED_PER_SM_90, WARPS_PER_SM

from cutlass_fmha.bench.cases import Case, select_cases
from cutlass_fmha.cli import output

ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
TIME = "gpu__time_duration.sum"
TENSOR = f"sm__pipe_tensor_cycles_active.{ACTIVE}"
ISSUE = f"smsp__issue_active.{ACTIVE}"
MUFU = f"sm__inst_executed_pipe_xu.{ACTIVE}"
SHARED = f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{ELAPSED}"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WARPS, POSSIBLE_WARPS = f"sm__warps_active.{ACTIVE}", "sm__maximum_warps_per_active_cycle_pct"
REGISTERS, DYNAMIC = "launch__registers_per_thread", "launch__shared_mem_per_block_dynamic"
#: Nsight Compute's names (those of 2025.3) -> what the table calls them, in its order.
FIGURES = {
    TIME: "time under ncu, us",
    TENSOR: "tensor pipe active, %",
    f"sm__pipe_tensor_op_hmma_cycles_active.{ACTIVE}": "tensor ops (HMMA) active, %",
    ISSUE: "issue slots busy, %",
    MUFU: "MUFU (XU pipe) busy, %",
    f"sm__pipe_fma_cycles_active.{ACTIVE}": "FMA pipe active, %",
    f"sm__pipe_alu_cycles_active.{ACTIVE}": "ALU pipe active, %",
    f"sm__throughput.{ELAPSED}": "SM throughput, %",
    f"gpu__dram_throughput.{ELAPSED}": "DRAM throughput, %",
    "lts__t_sector_hit_rate.pct": "L2 hit rate, %",
    SHARED: "shared-memory bandwidth, %",
    WAVEFRONTS: "shared-memory wavefronts",
    CONFLICTS: "of these by bank conflicts",
    WARPS: "warps active (occupancy), %",
    POSSIBLE_WARPS: "occupancy possible, %",
    REGISTERS: "registers per thread",
    DYNAMIC: "shared memory per block, bytes",
    "launch__waves_per_multiprocessor": "waves of blocks",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("mio_throttle", "math_pipe_throttle", "long_scoreboard", "short_scoreboard", "barrier", "wait"),
    *("not_selected", "no_instruction", "lg_throttle", "branch_resolving", "dispatch_stall", "membar"),
)
TOP_STALLS = 4
METRICS = (*FIGURES, *(STALL.format(name) for name in STALLS))

# Clocks that one of an SM's four quarters is busy with a warp's instruction. MUFU: 4 lanes of 16 a clock and
# SM; ldmatrix.x4: 512 bytes of the 128 a clock that the quarters share (CUDA C++ Programming Guide).
CLOCKS = {MUFU: 8.0, SHARED: 16.0}
#: Of mma.sync m16n8k16 with fp32 accumulation: datasheets (docs/emulation.md); measured on an H200.
MMA_CLOCKS = {89: 16.0, 90: 6.5, 120: 16.0}
MMA_CLOCKS_GEFORCE = 32.0


def mma_clocks(arch: int, gpu: str) -> float:
    return MMA_CLOCKS_GEFORCE if "GeForce" in gpu else MMA_CLOCKS[arch]


class NcuError(RuntimeError):
    """Nsight Compute is missing, may not read the counters, or said nothing; the message says which."""


Profile = tuple[str, dict[str, "float | None"]]
"""A kernel and its launch's metrics; one that this GPU or this ncu doesn't have is None. Microseconds and bytes."""
_UNKNOWN = re.compile(r"Failed to find metric (?:regex:\^)?([\w.\\]+)")
#: Unit of a column -> what its values are multiplied by.
_UNITS = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
_UNITS |= {f"{prefix}byte/block": factor for prefix, factor in (("K", 1e3), ("M", 1e6))}


def parse(text: str) -> list[Profile]:
    """Launches from ``ncu --csv --page raw``: names, units, then a line each, among ncu's own remarks."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, units, *rows = csv.reader(lines) if len(lines) > 2 else ([], [])
    if "Kernel Name" not in names:
        raise NcuError("no kernel in it: is it the output of ncu --csv --page raw?")
    launches = [dict(zip(names, zip(row, units, strict=True), strict=True)) for row in rows]
    return [(x["Kernel Name"][0], {name: _number(*x.get(name, ("", ""))) for name in METRICS}) for x in launches]


def _number(cell: str, unit: str) -> float | None:
    try:
        return float(cell.replace(",", "")) * _UNITS.get(unit, 1.0)
    except ValueError:  # n/a, or nothing
        return None


def run_ncu(ncu: str, command: list[str]) -> list[Profile]:
    """Profiles what ``command`` launches between cudaProfilerStart and Stop, by the metrics that ncu has."""
    metrics = list(METRICS)
    environment = {**os.environ, "LC_ALL": "C"}  # numbers without a locale's separators
    while metrics:
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "ncu.csv"
            asked = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
            asked += ["--profile-from-start", "off", "--target-processes", "all", "--metrics", ",".join(metrics)]
            done = subprocess.run([ncu, *asked, *command], capture_output=True, text=True, env=environment, check=False)
            said = log.read_text(encoding="utf-8") if log.is_file() else ""
        unknown = {name.replace("\\", "") for name in _UNKNOWN.findall(said + done.stdout + done.stderr)}
        left = [name for name in metrics if not name.startswith(tuple(unknown))]
        if len(left) == len(metrics):
            break
        metrics = left
    if "ERR_NVGPUCTRPERM" in said:
        way = "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        raise NcuError(f"ncu may not read this GPU's counters: {way}")
    if done.returncode:
        words = (done.stderr or said).strip().splitlines() or ["nothing"]
        raise NcuError(f"ncu ended with status {done.returncode} and said: {words[-1]}")
    return parse(said)


def expected(row: str, gpu: str) -> dict[str, float]:
    """By the names of FIGURES, from the committed counts of tools/sass.py; empty for what is no row.

    A pipe's share is the most it can be: its clocks over those of the busiest, of a block of keys in the main
    loop. That holds what a step skips, too (masks, the second pass of an exact softmax): MUFU and issue slots
    are upper bounds, and with them the tensor pipe's a lower one.
    """
    entry = json.loads(REPORT.read_text(encoding="utf-8"))["rows"].get(row)
    if entry is None or "warps" not in entry["config"]:  # helpers have counts, too, and no warps of their own
        return {}
    arch, config = entry["arch"], entry["config"]
    registers = -(-entry["registers"] // 8) * 8 * config["threads"]
    shared = config["smem_bytes"] + entry["shared"] + RESERVED_SHARED
    shared_per_sm, warps = (SHARED_PER_SM_90, 64) if arch == 90 else (SHARED_PER_SM, WARPS_PER_SM)
    blocks = min(REGISTERS_PER_SM // registers, shared_per_sm // shared, warps // config["warps"])
    possible = 100.0 * blocks * config["warps"] / warps
    found = {REGISTERS: entry["registers"], DYNAMIC: config["smem_bytes"], POSSIBLE_WARPS: possible}
    if loop := entry.get("loop"):
        clocks = {
            TENSOR: mma_clocks(arch, gpu) * loop.get("mma", 0),
            MUFU: CLOCKS[MUFU] * loop.get("mufu", 0),
            SHARED: CLOCKS[SHARED] * loop.get("ldsm", 0),
            ISSUE: float(sum(loop.values())),
        }
        found |= {name: 100.0 * value / max(clocks.values()) for name, value in clocks.items()}
    return found


def launch_once(case: Case, row: str | None) -> None:
    """In the process under ncu: warm up, then one call between the marks that it listens to."""
    import torch

    from cutlass_fmha.bench import lineup, runner

    runner.require_gpu(0)
    with torch.inference_mode():
        inputs, feature, _ = runner.problem(case, 0)
        contender = lineup.line_up(case, inputs, [], row, feature)[lineup.OURS]
        for _ in range(3):
            contender.call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        contender.call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def measure(case: Case, row: str | None) -> dict[str, Any]:
    """What the benchmark has: the machine, p50, p90, rates, error and the row."""
    import torch

    from cutlass_fmha.bench import lineup, machine, runner

    runner.require_gpu(0)
    with torch.inference_mode():
        ours: Any = runner.measure_case(case, [], row, runner.BUDGET_S, 0)["results"][lineup.OURS]
    torch.cuda.empty_cache()  # the process under ncu has the same tensors
    if ours["status"] != "ok":
        raise NcuError(f"nothing runs it: {ours['reason']}")
    described = machine.describe(0)
    return {"machine": described, "gpu": described["gpu"], "case": case.name, **ours}


def content(profile: Profile, gpu: str) -> dict[str, Any]:
    """For programs: ncu's names as they are. Stalls: warps that wait for a reason while another one issues,
    the most first."""
    kernel, values = profile
    known = {name: x for name in STALLS if (x := values[STALL.format(name)]) is not None}
    stalls = dict(sorted(known.items(), key=lambda item: -item[1])[:TOP_STALLS])
    stalls |= {name: x for name, x in known.items() if name == "mio_throttle"}
    measured = {name: values[name] for name in FIGURES}
    return {"kernel": kernel, "measured": measured, "expected": expected(kernel, gpu), "stalls": stalls}


def parts(found: Iterable[dict[str, Any]], timed: dict[str, Any] | None) -> list[str | output.Table]:
    lines: list[str | output.Table] = []
    if timed is not None:
        lines.append(
            f"{timed['row']} on {timed['gpu']}: p50 {timed['p50_us']:.1f} us, p90 {timed['p90_us']:.1f} us, "
            f"{timed['tflops']:.0f} TFLOP/s, {timed['tbytes_per_s']:.2f} TB/s; mean error "
            f"{timed['mean_abs_error']:.2e}, worst {timed['error_ratio']:.2f} of what the dtype allows\n"
        )
    for each in found:
        cells = {name: map(_cell, (each["measured"][name], each["expected"].get(name))) for name in FIGURES}
        rows = [[title, *cells[name]] for name, title in FIGURES.items()]
        waiting = ", ".join(f"{name} {value:.2f}" for name, value in each["stalls"].items()) or "none known"
        stalls = f"\nstalls, in warps that wait at each issue: {waiting}\n"
        lines += [f"{each['kernel']}\n", output.Table(["figure", "measured", "expected"], rows), stalls]
    return [*lines, "expected: from the machine code, of pipes at most; docs/profiling.md says what to do"]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}"


def problem(options: argparse.Namespace) -> Case:
    """The case that was asked for. Raises ValueError for one that the benchmark doesn't have."""
    if options.shape is None:
        if len(cases := select_cases([options.case])) != 1:
            raise ValueError(f"{options.case} is a group of {len(cases)} cases: name one, as bench --list does")
        return cases[0]
    batch, seqlen, heads, head_dim = options.shape
    sizes = (batch, heads, options.kv_heads or heads, seqlen, seqlen, head_dim)
    return Case("profile", *sizes, "bfloat16", options.causal)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("case", nargs="?", help="a case of the benchmark")
    add("--shape", type=output.sizes, metavar="B,S,H,D", help="batch, seqlen, num_heads, head_dim; of bfloat16")
    add("--csv", type=Path, metavar="FILE", help="a recorded `ncu --csv --page raw`: run nothing")
    add = parser.add_argument
    add("--kv-heads", type=int, metavar="H", help="heads of key and value (default: num_heads)")
    add("--causal", action="store_true", help="a causal mask, bottom-right")
    add("--row", metavar="NAME", help="force one row of _C.rows() instead of selecting")
    add("--ncu", metavar="PATH", help="Nsight Compute's program; default: ncu on PATH")
    add("--once", action="store_true", help=argparse.SUPPRESS)
    output.add_json(parser)
    options = parser.parse_args(given)
    timed = None
    try:
        if options.csv is not None:
            profiles = parse(options.csv.read_text(encoding="utf-8"))
        elif options.once:
            launch_once(problem(options), options.row)
            return 0
        else:
            case = problem(options)
            if (ncu := options.ncu or shutil.which("ncu")) is None:
                raise NcuError("ncu is not on PATH: install Nsight Compute, or name it with --ncu")
            timed = measure(case, options.row)
            profiles = run_ncu(ncu, [sys.executable, str(Path(__file__).resolve()), *given, "--once"])
    except ValueError as error:
        parser.error(str(error))
    except (NcuError, OSError, RuntimeError) as error:  # CannotMeasure is one
        print(f"profile_row: {error}", file=sys.stderr)
        return 1
    found = [content(profile, timed["gpu"] if timed else "") for profile in profiles]
    output.emit({"timed": timed, "kernels": found}, parts(found, timed), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
