"""Ranks tiles for a GPU that is not at hand, on an H100 or H200 made as slow at mma (docs/emulation.md).

It is tools/tune.py with that GPU's rows and its balance: all other options, --json too, are those of it. --families:
which share of the slowed mma's rate rows of all families reach.
"""

import argparse
import ctypes
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import tune
from building import ROOT, BuildError, Tree, run, tail
from cubin import ToolMissingError, run_tool
from profile_row import MMA_CLOCKS, mma_clocks

from cutlass_fmha import _C
from cutlass_fmha.bench import lineup, machine, runner, timing
from cutlass_fmha.bench.cases import Case, drawn
from cutlass_fmha.cli import output
from cutlass_fmha.dispatch import device as devices

#: Whose tensor pipe is known, and slower than an H200's: capability -> whose rows it takes.
ARCHITECTURES = {(8, 9): 89, (12, 0): 120}
TARGETS = {name: gpu for name, gpu in devices.PRESETS.items() if gpu.capability in ARCHITECTURES}
TUNING = Path(__file__).with_name("tuning")
_MANY = r"^fwd_.*_bf16_d(64|128)_m[0-9]+n[0-9]+w[0-9]+(_tma)?%s(_fa2)?$"
#: Family -> names of the rows that are built for it: of bfloat16, aligned, for the head dims below.
ROWS = {
    "plain": _MANY % "",
    "ranged": _MANY % "_ranged",
    "score_mod": _MANY % "_score_mod",
    "masked": _MANY % "_(masked|scored)",
    "backward": r"^bwd_.*_bf16_d(64|128)_m[0-9]+n[0-9]+w[0-9]+(_groups)?(_tma)?(_fa2)?$",
    "few_query": r"^fwd_.*_bf16_d(64|96|128|256)_m[0-9]+n[0-9]+w[0-9]+k[0-9]+(_tma)?(_pdl)?(_scored)?(_small)?$",
    "wide": r"^wide_.*_bf16_",
}
#: Batch, heads and length by head dim: tiles of 256, 128 and 64 queries make whole waves on 132 SMs.
SIZES = {64: (12, 11, 4096), 128: (3, 11, 8192)}
#: Of few queries: group, batch, heads, heads of keys, queries, keys, head dim.
FEW = (
    *(("decode", 8, 32, 8, 1, 8192, 128), ("decode", 1, 32, 8, 1, 4096, 128), ("decode", 8, 64, 8, 1, 8192, 64)),
    *(("decode", 8, 16, 16, 1, 4096, 96), ("decode", 1, 8, 1, 1, 16384, 256), ("latency", 1, 8, 8, 512, 512, 128)),
    *(("latency", 1, 8, 8, seqlen, seqlen, 64) for seqlen in (256, 512, 1024)),
)
MEASURE = "measure"  # what the process that measures is told
BUDGET_S = 0.06  # GPU time of a row's replays on one case
MMA_ROUNDS = 20000  # of the ceiling's kernel: 4 ms
NOTE = (
    "A MODEL, made of {gpu}. share: useful operations over those of mma alone, in turns with it, divided by {passes} "
    "passes; of plain: points more or less than the best plain row at that head dim and mask."
)


def balance(name: str) -> tuple[int, int]:
    """(architecture, how often each pass of mma runs: the odd number closest to its time there over an H200's)."""
    gpu = TARGETS[name]
    arch = ARCHITECTURES[gpu.capability]
    return arch, 2 * round((mma_clocks(arch, gpu.name) / MMA_CLOCKS[90] - 1) / 2) + 1


def cases() -> Iterator[tuple[tuple[str, ...], Case]]:
    """Each with the families whose rows run it."""
    features = dict.fromkeys(("alibi", "softcap", "dropout"), ("score_mod",))
    features |= dict.fromkeys(("mask", "head_bias"), ("masked", "scored"))
    for head_dim, (batch, heads, seqlen) in SIZES.items():
        full = Case("dense", batch, heads, heads, seqlen, seqlen, head_dim, "bfloat16")
        for case in (full, replace(full, causal=True)):
            yield ("plain",), case
            for lengths in ("lengths", "used"):
                yield ("ranged",), replace(case, group="ranges", **{lengths: (seqlen,) * batch})
            for feature, names in features.items():
                yield names, replace(case, group="scores", feature=feature)
            yield ("backward",), replace(case, group="backward")
        sizes = (24, heads, heads, 2900, 2900, head_dim)
        yield ("ranged",), Case("packed", *sizes, "bfloat16", causal=True, lengths=drawn(24, 37, 2900))
    for group, batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim in FEW:
        case = Case(group, batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, "bfloat16")
        yield ("few_query", "few_query_scored", "plain"), case
    wide = Case("wide", 4, 33, 33, 2048, 2048, 512, "bfloat16")
    yield from ((("wide", "wide_scored"), case) for case in (wide, replace(wide, causal=True)))


def rows_of(families: Sequence[str]) -> str:
    """Pattern of the rows that cases of these families need: plain ones, too, for what comes before gradients."""
    return "|".join(ROWS[name] for name in dict.fromkeys(("plain", *families)))


def rows_for(families: Sequence[str], case: Case, rows: Sequence[Any]) -> list[str]:
    fit = [row for row in rows if row.family in families and row.dtype == case.dtype and row.head_dim >= case.head_dim]
    return [row.name for row in fit if "wide" in row.family or row.head_dim == case.head_dim]


def measure(case: Case, rows: Sequence[str], mma_alone: Callable[[int], object]) -> dict[str, dict[str, Any]]:
    inputs, feature, check = runner.problem(case, 0)
    found: dict[str, dict[str, Any]] = {"mma": {}}
    timers = {"mma": timing.GraphTimer(mma_alone, 1)}
    for row in rows:
        contender = lineup.line_up(case, inputs, [], row, feature)[lineup.OURS]
        found[row], timer = runner.prepare(lineup.OURS, contender, inputs.sets, check)
        if timer is not None:
            timers[row] = timer
    for name, times in timing.time_interleaved(timers, BUDGET_S).items():
        found[name] |= {"us": times.p50_us}
    return found


def require(found: Mapping[str, Collection[Any]], what: str) -> None:
    if names := [case for case, some in found.items() if not some]:
        raise SystemExit(f"no {what} of {len(names)} cases: {', '.join(names)}")


def measure_all(ceiling: str, result: str, families: str) -> None:
    """In a process in whose environment the package is an emulation build's."""
    launch = ctypes.CDLL(ceiling).launch_mma_alone
    launch.restype, launch.argtypes = ctypes.c_double, (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def mma_alone(_: int) -> float:
        return float(launch(MMA_ROUNDS, sms, torch.cuda.current_stream().cuda_stream))

    arch, passes, flop = devices.forced_arch(), int(_C.build_info()["mma_passes"]), mma_alone(0)
    of_arch = [row for row in (*_C.rows(), *_C.backward_rows()) if row.arch == arch]
    wanted = [(names, case) for names, case in cases() if names[0] in families.split(",")]
    asked = [(names[0], case, rows_for(names, case, of_arch)) for names, case in wanted]
    require({case.name: rows for _, case, rows in asked}, f"row of sm_{arch}")
    head = {"passes": passes, "arch": arch, "machine": machine.describe(0), "clocks": machine.read_smi(0)}
    entries: list[dict[str, Any]] = []
    for family, case, rows in asked:
        with torch.inference_mode():
            found = measure(case, rows, mma_alone)
        torch.cuda.empty_cache()
        rate = flop / found.pop("mma")["us"]
        about = {"family": family, "case": case.name, "plain": case.plain.name if case.featured else None}
        for row, one in found.items():
            entries.append({**about, "row": row, **one})
            if us := one.get("us"):
                entries[-1] |= {"tflops": case.flop / us * 1e-6, "share": case.flop / us / (rate / passes)}
        Path(result).write_text(json.dumps({**head, "entries": entries}, indent=1))
        print(f"{case.name}: {len(found)} rows", file=sys.stderr, flush=True)
    timed = {one["case"] for one in entries if "us" in one}
    require({case.name: timed & {case.name} for _, case in wanted}, "row's time")


def tables(result: Mapping[str, Any]) -> list[str | output.Table]:
    lines, entries = [], result["entries"]
    stack = result.get("stack", {})  # which rows have for the passes' four registers, and not on their own architecture
    plain = sorted((x for x in entries if x["family"] == "plain" and "us" in x), key=lambda x: x["share"])
    best = {one["case"]: one["share"] for one in plain}
    places = list(dict.fromkeys(one["case"] for one in entries))
    for one in sorted(entries, key=lambda one: (places.index(one["case"]), float(one.get("us", "inf")))):
        if "us" not in one:
            lines.append([one["case"], one["row"], *"---", "", one["reason"]])
            continue
        points = f"{100 * (one['share'] - best[one['plain']]):+.1f}" if one["plain"] in best else ""
        figures = f"{one['us']:.1f}", f"{one['tflops']:.1f}", f"{100 * one['share']:.1f} %"
        remarks = ["WRONG"] * (not one["error_ratio"] <= 1)
        remarks += [f"{stack[one['row']]} B of stack"] if one["row"] in stack else []
        lines.append([one["case"], one["row"], *figures, points, ", ".join(remarks)])
    note = NOTE.format(gpu=result["machine"]["gpu"], passes=result["passes"])
    return [note, output.Table(("case", "row", "us", "TFLOP/s", "share", "of plain", ""), lines, left=2, remarks=True)]


def measure_families(arch: int, passes: int, work: Path, asked: Sequence[str]) -> dict[str, Any]:
    """What ``measure_all`` says of the families asked for, of both architectures' build with so many passes. Raises
    BuildError, of a case without a row or a time, too."""
    variables: dict[str, object] = {
        "CMAKE_CUDA_ARCHITECTURES": sorted(ARCHITECTURES.values()),
        "CUTLASS_FMHA_EMULATION": "ON",
        "CUTLASS_FMHA_MMA_PASSES": passes,
        "CUTLASS_FMHA_MANIFEST": TUNING / "beside.cmake",
        "CUTLASS_FMHA_ROWS": rows_of(asked),
        "CUTLASS_FMHA_ROWS_PER_FILE": 2,
    }
    tree = Tree(work.resolve() / f"families-passes{passes}", variables)
    extension = tree.build("_C", "_C*.so")
    package, ceiling, result = (tree.directory / name for name in ("package", "ceiling.so", f"sm{arch}.json"))
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "cutlass_fmha", package / "cutlass_fmha", ignore=shutil.ignore_patterns("_C*.so"))
    shutil.copy(extension, package / "cutlass_fmha")
    flags = ("-std=c++20", "-O3", "-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90,code=sm_90", "-o", ceiling)
    run_tool("nvcc", *flags, TUNING / "ceiling.cu")
    result.unlink(missing_ok=True)
    environment = (f"PYTHONPATH={package}", f"{devices.FORCE_ARCH}={arch}", "CUTLASS_FMHA_CALIBRATION=off")
    command = ["env", *environment, sys.executable, __file__, MEASURE, str(ceiling), str(result), ",".join(asked)]
    status, told = run(command, tree.directory / "families.log")
    if status:
        raise BuildError(f"measuring failed:\n{tail(told)}")
    found: dict[str, Any] = json.loads(result.read_text())
    usage = re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", run_tool("cuobjdump", "-res-usage", extension))
    return {**found, "stack": {row: int(bytes_) for row, bytes_ in usage if bytes_ != "0"}}


def main(arguments: list[str]) -> int:
    if arguments[:1] == [MEASURE]:
        measure_all(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("gpu", choices=TARGETS, metavar="GPU", help=", ".join(TARGETS))
    told = "no search: these (none named: all) and plain rows, beside FlashAttention-2's tiles and mma alone"
    add("--families", nargs="*", choices=ROWS, help=told)
    options, rest = parser.parse_known_args(arguments)
    arch, passes = balance(options.gpu)
    if options.families is None:
        return tune.main(["--arch", str(arch), "--mma-passes", str(passes), *rest], name="emulate")
    asked = tune.parse(rest)
    try:
        found = measure_families(arch, passes, asked.work, options.families or tuple(ROWS))
    except (BuildError, ToolMissingError) as error:
        print(f"emulate: {error}", file=sys.stderr)
        return 1
    output.emit(found, tables(found), asked.json)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends, too
    raise SystemExit(main(sys.argv[1:]))
