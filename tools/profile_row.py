"""What bounds a kernel: Nsight Compute's figures of a problem, beside what the machine code lets expect.

    python tools/profile_row.py b2_h16_s8192_d128_bf16         a case of the benchmark (`bench --list`)
    python tools/profile_row.py --csv FILE                     what ncu wrote elsewhere, rendered here

Needs a GPU whose counters it may read, and ncu on PATH. docs/profiling.md says what each figure means and what to
do about it. It isn't called profile, as a module is that cProfile imports.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cubin import RESERVED_SHARED
from resources import REGISTERS_PER_SM, REPORT, SHARED_PER_SM, SHARED_PER_SM_90, WARPS_PER_SM

from cutlass_fmha.bench.cases import Case, select_cases
from cutlass_fmha.cli import output

ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
TENSOR, ISSUE = f"sm__pipe_tensor_cycles_active.{ACTIVE}", f"smsp__issue_active.{ACTIVE}"
MUFU = f"sm__inst_executed_pipe_xu.{ACTIVE}"
SHARED = f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{ELAPSED}"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
POSSIBLE_WARPS = "sm__maximum_warps_per_active_cycle_pct"
REGISTERS, DYNAMIC = "launch__registers_per_thread", "launch__shared_mem_per_block_dynamic"
#: Nsight Compute's names (those of 2025.3) -> what the table calls them, in its order.
FIGURES = {
    "gpu__time_duration.sum": "time under ncu, us",
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
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "of these by bank conflicts",
    f"sm__warps_active.{ACTIVE}": "warps active (occupancy), %",
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
METRICS = (*FIGURES, *(STALL.format(name) for name in STALLS))

# Clocks that one of an SM's four quarters is busy with a warp's instruction. MUFU: 4 lanes of 16 a clock and
# SM; ldmatrix.x4: 512 bytes of the 128 a clock that the quarters share (CUDA C++ Programming Guide).
MUFU_CLOCKS, LDSM_CLOCKS = 8.0, 16.0
#: Of mma.sync m16n8k16 with fp32 accumulation: datasheets (docs/emulation.md); measured on an H200.
MMA_CLOCKS = {89: 16.0, 90: 6.5, 120: 16.0}


def mma_clocks(arch: int, gpu: str) -> float:
    return 32.0 if "GeForce" in gpu else MMA_CLOCKS[arch]


class NcuError(RuntimeError):
    """Nsight Compute is missing or failed; the message says which, in its words."""


Profile = tuple[str, dict[str, "float | None"]]
"""A kernel and its launch's metrics; one that this GPU or this ncu doesn't have is None. Microseconds and bytes."""
_UNKNOWN = re.compile(r"Failed to find metric (?:regex:\^)?([\w.\\]+)")


def parse(text: str) -> list[Profile]:
    """Launches from ``ncu --csv --page raw --print-units base``: names, units, a line each, among ncu's remarks."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, units, *rows = csv.reader(lines) if len(lines) > 2 else ([], [])
    if "Kernel Name" not in names:
        raise NcuError("no kernel in it: is it the output of ncu --csv --page raw?")
    launches = [dict(zip(names, zip(row, units, strict=True), strict=True)) for row in rows]
    return [(x["Kernel Name"][0], {name: _number(*x.get(name, ("", ""))) for name in METRICS}) for x in launches]


def _number(cell: str, unit: str) -> float | None:
    try:
        return float(cell.replace(",", "")) * (1e-3 if unit in ("ns", "nsecond") else 1.0)
    except ValueError:  # n/a, or nothing
        return None


def run_ncu(command: list[str]) -> list[Profile]:
    """Profiles what ``command`` launches between cudaProfilerStart and Stop, by the metrics that ncu has."""
    if (ncu := shutil.which("ncu")) is None:
        raise NcuError("ncu is not on PATH: install Nsight Compute")
    left, metrics = list(METRICS), []
    environment = {**os.environ, "LC_ALL": "C"}  # numbers without a locale's separators
    while left != metrics:
        metrics = left
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "ncu.csv"
            asked = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
            asked += ["--profile-from-start", "off", "--target-processes", "all", "--metrics", ",".join(metrics)]
            done = subprocess.run([ncu, *asked, *command], capture_output=True, text=True, env=environment, check=False)
            said = log.read_text(encoding="utf-8") if log.is_file() else ""
        unknown = tuple(name.replace("\\", "") for name in _UNKNOWN.findall(said + done.stdout + done.stderr))
        left = [name for name in metrics if not name.startswith(unknown)]
    if done.returncode:
        words = [line for line in said.splitlines() if "ERROR" in line] or [done.stderr.strip()]
        raise NcuError(f"ncu ended with status {done.returncode} and said: {words[-1]}")
    return parse(said)


def expected(row: str, gpu: str) -> dict[str, float]:
    """By the names of FIGURES, from the committed counts (tools/resources.py); empty for what is no row.

    A pipe's share is the most it can be: its clocks over those of the busiest, of a block of keys in the main
    loop. That holds what a step skips, too (masks, the second pass of an exact softmax): MUFU and issue slots
    are upper bounds, and with them the tensor pipe's a lower one.
    """
    entry = json.loads(REPORT.read_text(encoding="utf-8"))["rows"].get(row)
    if entry is None or "warps" not in entry["config"]:  # which helpers don't have
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
            MUFU: MUFU_CLOCKS * loop.get("mufu", 0),
            SHARED: LDSM_CLOCKS * loop.get("ldsm", 0),
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


def content(profile: Profile, gpu: str) -> dict[str, Any]:
    """For programs: ncu's names as they are. Stalls: warps that wait for a reason while another one issues, the four
    with most and mio_throttle."""
    kernel, values = profile
    known = {name: x for name in STALLS if (x := values[STALL.format(name)]) is not None}
    most = sorted(known, key=lambda name: -known[name])
    stalls = {name: known[name] for name in most if name in (*most[:4], "mio_throttle")}
    measured = {name: values[name] for name in FIGURES}
    return {"kernel": kernel, "measured": measured, "expected": expected(kernel, gpu), "stalls": stalls}


def parts(each: dict[str, Any]) -> list[str | output.Table]:
    columns = (each["measured"].get, each["expected"].get)
    rows = [
        [title, *("-" if (x := get(name)) is None else f"{x:,.1f}" for get in columns)]
        for name, title in FIGURES.items()
    ]
    waiting = ", ".join(f"{name} {value:.2f}" for name, value in each["stalls"].items())
    stalls = f"\nstalls, in warps that wait at each issue: {waiting}\n"
    return [f"{each['kernel']}\n", output.Table(["figure", "measured", "expected"], rows), stalls]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("case", nargs="?", help="a case of the benchmark")
    add("--csv", type=Path, metavar="FILE", help="a recorded `ncu --csv --page raw --print-units base`: run nothing")
    parser.add_argument("--row", metavar="NAME", help="force one row of _C.rows() instead of selecting")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    output.add_json(parser)
    options = parser.parse_args(given)
    gpu = ""
    try:
        if options.csv is not None:
            profiles = parse(options.csv.read_text(encoding="utf-8"))
        else:
            if len(cases := select_cases([options.case])) != 1:
                raise ValueError(f"{options.case} is a group of {len(cases)} cases: name one, as bench --list does")
            if options.once:
                launch_once(cases[0], options.row)
                return 0
            profiles = run_ncu([sys.executable, str(Path(__file__).resolve()), *given, "--once"])
            import torch

            gpu = torch.cuda.get_device_name(0)
    except ValueError as error:
        parser.error(str(error))
    except (NcuError, OSError, RuntimeError) as error:  # CannotMeasure is one
        print(f"profile_row: {error}", file=sys.stderr)
        return 1
    found = [content(profile, gpu) for profile in profiles]
    output.emit({"gpu": gpu, "kernels": found}, [part for each in found for part in parts(each)], options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
