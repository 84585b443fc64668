"""An emulation's result as Markdown: what each emulated GPU's best rows reach, and every row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 2
KIND = "emulation"
MASKS = {False: "full", True: "causal"}

#: kind, schema, machine, ceilings (passes -> head dimension -> TFLOP/s), cases and results: per row, case and
#: number of passes its tflops, its share of the mma's rate at the same clock, and error_ratio; a row without
#: an arch is a tile of FlashAttention-2's.
Result = dict[str, Any]


class InvalidResultError(ValueError):
    """A file that is no emulation's result."""


@dataclass(frozen=True)
class Target:
    """GPUs that rows of ``arch`` stand for when each mma pass runs ``passes`` times."""

    gpus: str
    arch: int
    passes: int


TARGETS = (
    Target("L4, L40S", 89, 3),
    Target("RTX 4090", 89, 5),
    Target("RTX PRO 6000", 120, 3),
    Target("RTX 5080, RTX 5090", 120, 5),
)


@dataclass(frozen=True)
class Entry:
    """One measurement, with its share of the ceiling of its number of passes."""

    row: str
    arch: int | None
    head_dim: int
    causal: bool
    passes: int
    tflops: float
    share: float


def read_result(path: Path) -> Result:
    """Raises InvalidResultError when the file holds something else, OSError when it can't be read."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidResultError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("kind") != KIND or result.get("schema") != SCHEMA:
        raise InvalidResultError(f"{path} is no result of tools/emulate.py of schema {SCHEMA}")
    return result


def merge(parts: list[dict[str, Any]], case_list: list[dict[str, Any]]) -> Result:
    """One result of what was measured for each number of passes."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "machine": parts[0]["machine"],
        "ceilings": {str(part["passes"]): part["ceiling"] for part in parts},
        "clocks_after": {str(part["passes"]): part["machine"].get("clocks_after") for part in parts},
        "cases": case_list,
        "results": [entry for part in parts for entry in part["results"]],
    }


def ceiling(result: Result, passes: int) -> float:
    """Useful TFLOP/s of the mma alone: the higher of its shapes."""
    return float(max(result["ceilings"][str(passes)].values()))


def entries(result: Result) -> list[Entry]:
    return [
        Entry(
            *(found["row"], found["arch"], found["head_dim"], found["causal"], found["passes"]),
            tflops=found["tflops"],
            share=found["share"],
        )
        for found in result["results"]
    ]


def wrong_results(result: Result) -> list[str]:
    """One line for each kernel that computed something else than attention."""
    return [
        f"{found['row']} D{found['head_dim']} {MASKS[found['causal']]}, {found['passes']} passes: "
        f"error {found['error_ratio']:.2f} of the tolerance"
        for found in result["results"]
        if not found["error_ratio"] <= 1.0
    ]


def ranking(result: Result, target: Target, head_dim: int, causal: bool) -> list[Entry]:
    """A target's rows for a head dimension and mask, best first."""
    found = [
        entry
        for entry in entries(result)
        if (entry.arch, entry.passes, entry.head_dim, entry.causal)
        == (target.arch, target.passes, head_dim, causal)
    ]
    return sorted(found, key=lambda entry: -entry.share)


def standard(result: Result, passes: int, head_dim: int, causal: bool) -> Entry | None:
    """The better of FlashAttention-2's tiles with as many passes."""
    wanted = (None, passes, head_dim, causal)
    found = [e for e in entries(result) if (e.arch, e.passes, e.head_dim, e.causal) == wanted]
    return max(found, key=lambda entry: entry.share, default=None)


def problems(result: Result) -> list[tuple[int, bool]]:
    """(head dimension, causal) of what was measured."""
    return sorted({(entry.head_dim, entry.causal) for entry in entries(result)})


def covered(result: Result) -> list[Target]:
    """Targets of which something was measured."""
    known = {(entry.arch, entry.passes) for entry in entries(result)}
    return [target for target in TARGETS if (target.arch, target.passes) in known]


# ---- text --------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(head: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    """Markdown; the first ``left`` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def target_table(result: Result, target: Target) -> list[str]:
    """Best row, runner-up and FlashAttention-2's tile per head dimension and mask."""
    rows = []
    for head_dim, causal in problems(result):
        ranked = ranking(result, target, head_dim, causal)
        if not ranked:
            continue
        best, theirs = ranked[0], standard(result, target.passes, head_dim, causal)
        line = [f"D{head_dim} {MASKS[causal]}", best.row, f"{best.tflops:.1f}", percent(best.share)]
        line += [f"{ranked[1].row} {percent(ranked[1].share)}" if len(ranked) > 1 else "-"]
        if theirs is None:
            line += ["-", "-", "-", "-"]
        else:
            line += [theirs.row, f"{theirs.tflops:.1f}", percent(theirs.share)]
            line += [f"{best.share / theirs.share:.2f}x"]
        rows.append(line)
    head = ["problem", "best row", "TFLOP/s", "share", "second", "FA2's tile", "TFLOP/s", "share", "ours is"]
    return table(head, rows, 2)


def all_rows_table(result: Result) -> list[str]:
    """Shares of every kernel by mask and number of passes."""
    passes = sorted(int(n) for n in result["ceilings"])
    found = {(e.row, e.head_dim, e.causal, e.passes): e for e in entries(result)}
    names = list(dict.fromkeys((entry.row, entry.head_dim) for entry in entries(result)))
    columns = [(causal, n) for causal in MASKS for n in passes]
    rows = [
        [
            name,
            f"D{head_dim}",
            *(
                percent(found[name, head_dim, causal, n].share)
                if (name, head_dim, causal, n) in found
                else "-"
                for causal, n in columns
            ),
        ]
        for name, head_dim in sorted(names, key=lambda pair: (pair[1], pair[0]))
    ]
    return table(["kernel", "head dim", *(f"{MASKS[causal]} x{n}" for causal, n in columns)], rows, 2)


def statement(result: Result) -> str:
    machine = result["machine"]
    return (
        f"A MODEL, measured on {machine['gpu']}: no figure here was measured on a GPU that is named as a "
        "target. Every mma pass over the accumulators runs 3 or 5 times, the repetitions with zero "
        "operands, so that the GPU takes the balance of one whose tensor pipe is that much slower per "
        "clock; blocks per SM are what 100 KB of shared memory and 48 warps allow. Clocks, caches, memory "
        "and launches are those of the GPU measured on. TFLOP/s count useful operations; shares are of "
        "the mma alone with as many passes, in turns with it. Shares and ranks are what to read, not rates."
    )


def notes(result: Result) -> list[str]:
    machine = result["machine"]
    shapes = ", ".join(case["label"] for case in result["cases"] if not case["causal"])
    lines = [
        f"Problems: {shapes}; causal likewise.",
        "FA2's tile: the better of those that FlashAttention-2 launches on sm_8x, with its schedule and the "
        "standard softmax, written with this project's building blocks and built the same way "
        "(tools/emulation/standard_tile.cuh).",
        "A sub-core takes 6 to 6.7 clocks per mma m16n8k16 on an H200, 16 on L4, L40S and RTX PRO 6000, "
        "32 on GeForce with fp32 accumulation (datasheets): 3 and 5 passes are the odd numbers next to "
        "that.",
        f"torch {machine['torch']}, driver {machine['driver']}, commit {machine['commit'] or 'unknown'}, "
        f"{machine['date']}.",
    ]
    return [*lines, *(f"WRONG: {line}" for line in wrong_results(result))]


def markdown(result: Result) -> str:
    """The whole report."""
    passes = sorted(int(n) for n in result["ceilings"])
    one = ceiling(result, passes[0]) * passes[0]
    ceilings = [[str(n), f"{ceiling(result, n):.1f}", f"{ceiling(result, n) * n / one:.3f}"] for n in passes]
    lines = [f"# Emulated GPUs on {result['machine']['gpu']}", "", statement(result), ""]
    lines += table(["passes", "ceiling, TFLOP/s", f"times passes, over x{passes[0]}"], ceilings)
    for target in covered(result):
        title = f"## {target.gpus}: sm_{target.arch} rows, {target.passes} passes"
        lines += ["", title, "", *target_table(result, target)]
    lines += ["", "## Every kernel, share of the ceiling", "", *all_rows_table(result), ""]
    lines += [f"- {note}" for note in notes(result)]
    return "\n".join(lines) + "\n"
