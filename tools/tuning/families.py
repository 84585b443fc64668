"""Rows of all families on an emulated GPU (docs/emulation.md): which share of the slowed mma's rate each reaches.

    python tools/tuning/families.py CEILING RESULT FAMILY,...      as tools/emulate.py --families starts it

A process of its own, in whose environment the package is an emulation build's.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cutlass_fmha.bench.cases import Case, drawn
from cutlass_fmha.cli.output import Table

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
BUDGET_S = 0.06  # GPU time of a row's replays on one case
MMA_ROUNDS = 20000  # of the ceiling's kernel: 4 ms
NOTE = (
    "A MODEL, made of {gpu}. share: useful operations over those of mma alone, in turns with it, divided by {passes} "
    "passes; of plain: points more or less than the best plain row at that head dim and mask."
)


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
    """Names of those that may run it."""
    fit = [row for row in rows if row.family in families and row.dtype == case.dtype and row.head_dim >= case.head_dim]
    return [row.name for row in fit if "wide" in row.family or row.head_dim == case.head_dim]


def measure(case: Case, rows: Sequence[str], mma_alone: Callable[[int], object]) -> dict[str, dict[str, Any]]:
    """What the benchmark tells of each row, and of the mma alone, in turns."""
    from cutlass_fmha.bench import lineup, runner, timing

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


def unmet(asked: Sequence[tuple[Case, Sequence[str]]], what: str) -> str | None:
    """A sentence on the cases that have none of what they need."""
    names = [case.name for case, found in asked if not found]
    return f"no {what} of {len(names)} cases: {', '.join(names)}" if names else None


def main(ceiling: str, result: str, families: str) -> None:
    import torch

    from cutlass_fmha import _C
    from cutlass_fmha.bench import machine
    from cutlass_fmha.dispatch import device as devices

    launch = ctypes.CDLL(ceiling).launch_mma_alone
    launch.restype, launch.argtypes = ctypes.c_double, (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def mma_alone(_: int) -> float:
        return float(launch(MMA_ROUNDS, sms, torch.cuda.current_stream().cuda_stream))

    arch, passes, flop = devices.forced_arch(), int(_C.build_info()["mma_passes"]), mma_alone(0)
    of_arch = [row for row in (*_C.rows(), *_C.backward_rows()) if row.arch == arch]
    wanted = families.split(",")
    asked = [(case, rows_for(names, case, of_arch)) for names, case in cases() if names[0] in wanted]
    families_of = {case.name: names[0] for names, case in cases()}
    if sentence := unmet(asked, f"row of sm_{arch}"):
        raise SystemExit(sentence)
    shared = {row.name: row.smem_bytes for row in of_arch}
    head = {"passes": passes, "arch": arch, "machine": machine.describe(0), "clocks": machine.read_smi(0)}
    entries: list[dict[str, Any]] = []
    for case, rows in asked:
        with torch.inference_mode():
            found = measure(case, rows, mma_alone)
        torch.cuda.empty_cache()
        rate = flop / found.pop("mma")["us"]
        about = {
            "family": families_of[case.name],
            "case": case.name,
            "plain": case.plain.name if case.featured else None,
        }
        for row, one in found.items():
            entries.append({**about, "row": row, "smem_bytes": shared[row], **one})
            if us := one.get("us"):
                entries[-1] |= {"tflops": case.flop / us * 1e-6, "share": case.flop / us / (rate / passes)}
                entries[-1] |= {"tbytes_per_s": case.moved_bytes / us * 1e-6, "mma_tflops": rate * 1e-6}
        Path(result).write_text(json.dumps({**head, "entries": entries}, indent=1))
        print(f"{case.name}: {len(found)} rows", file=sys.stderr, flush=True)
    timed = [(case, [one for one in entries if one["case"] == case.name and "us" in one]) for case, _ in asked]
    if sentence := unmet(timed, "row's time"):
        raise SystemExit(sentence)


def tables(result: Mapping[str, Any]) -> list[str | Table]:
    """Each case's rows, the fastest first."""
    best: dict[str, float] = {}
    stack = result.get("stack", {})  # which rows have for the passes' four registers, and not on their own architecture
    for one in result["entries"]:
        if one["family"] == "plain" and "us" in one:
            best[one["case"]] = max(one["share"], best.get(one["case"], 0.0))
    places = {case: place for place, case in enumerate(dict.fromkeys(one["case"] for one in result["entries"]))}
    lines = []
    for one in sorted(result["entries"], key=lambda one: (places[one["case"]], float(one.get("us", "inf")))):
        if "us" not in one:
            lines.append([one["case"], one["row"], *"----", "", one["reason"]])
            continue
        points = f"{100 * (one['share'] - best[one['plain']]):+.1f}" if one["plain"] in best else ""
        figures = f"{one['us']:.1f}", f"{one['tflops']:.1f}", f"{one['tbytes_per_s']:.2f}"
        remarks = ["WRONG"] * (not one["error_ratio"] <= 1)
        remarks += [f"{stack[one['row']]} B of stack"] if one["row"] in stack else []
        lines.append([one["case"], one["row"], *figures, f"{100 * one['share']:.1f} %", points, ", ".join(remarks)])
    note = NOTE.format(gpu=result["machine"]["gpu"], passes=result["passes"])
    return [note, Table(("case", "row", "us", "TFLOP/s", "TB/s", "share", "of plain", ""), lines, left=2, remarks=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
