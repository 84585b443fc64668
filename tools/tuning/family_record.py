"""The record of what tools/emulate.py --families measured: all runs in one file, and their best rows as a table.

    python tools/tuning/family_record.py RECORD.json RECORD.md [LABEL=]RESULT.json ...

A later result of the same build adds its cases to an earlier one's. A label says what is another way in a build.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cutlass_fmha.bench.report import table

Run = Mapping[str, Any]
KIND = "emulated families"
METHOD = (
    "A MODEL, measured on an H200: no figure was measured on sm_89 or sm_120. Each pass of mma runs 3 or 5 times, the "
    "repetitions with zero operands; blocks per SM are what 100 KB of shared memory and 48 warps allow "
    "(docs/emulation.md). Useful operations over those of mma alone, in turns with it, divided by the passes, are the "
    "share; 'of plain' is in points of it, from the best plain row at that head dim and mask. 3 and 5 are passes; "
    "microseconds are of one call, gradients' with the kernels before and after. 'B of stack': the row spills in the "
    "emulation build, for the registers of the repeated passes, which those of the manifest do nowhere else: its "
    "share is too low. FlashAttention-2's tiles are made of this project's parts, of sm_89's rows, and are the same "
    "in both tables. All cases were checked against fp64; an error above 1 is wrong."
)
#: FlashAttention-2's forward tile for 99 KB at head dim 64, which is a row of the manifest.
FA2_TILE = "fwd_sm89_bf16_d64_m128n64w4"
HEADINGS = ("case", *(f"{text}, {n}" for n in (3, 5) for text in ("best row", "us", "share", "of plain")))
HEADINGS += ("FA2's tile", "its share, 3", "5")


def of_results(results: Sequence[tuple[str, Run]]) -> dict[str, Any]:
    """The record of results with their labels."""
    runs: dict[tuple[int, int, str], dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {}
    for label, result in results:
        machine, stack = result["machine"], result.get("stack", {})
        about = {"passes": result["passes"], "arch": result["arch"], "label": label}
        about |= {name: machine[name] for name in ("commit", "date")} | {"clocks": result["clocks"], "entries": []}
        entries = runs.setdefault((result["passes"], result["arch"], label), about)["entries"]
        for one in result["entries"]:
            cases[one["case"]] = {"family": one["family"], "plain": one["plain"]}
            told: dict[str, Any] = {"case": one["case"], "row": one["row"]}
            if "us" in one:
                told |= {"us": round(one["us"], 2), "tflops": round(one["tflops"], 2), "share": round(one["share"], 5)}
                told |= {"error": round(one["error_ratio"], 3), "stack": stack.get(one["row"], 0)}
            else:
                told |= {"reason": one["reason"]}
            entries.append(told)
    machine = dict(results[0][1]["machine"])
    machine["build"] = {name: x for name, x in machine["build"].items() if name not in ("mma_passes", "source_hash")}
    ordered = [runs[key] for key in sorted(runs)]
    return {"kind": KIND, "method": METHOD, "machine": machine, "cases": cases, "runs": ordered}


def to_json(record: Mapping[str, Any]) -> str:
    """With a line for each case and each entry."""
    lines = [f' "{name}": {json.dumps(record[name])},' for name in ("kind", "method", "machine")]
    cases = ",\n".join(f'  "{name}": {json.dumps(one)}' for name, one in record["cases"].items())
    runs = []
    for run in record["runs"]:
        head = json.dumps({name: x for name, x in run.items() if name != "entries"})
        entries = ",\n".join(f"   {json.dumps(one)}" for one in run["entries"])
        runs.append(f'  {head[:-1]}, "entries": [\n{entries}\n  ]}}')
    return "\n".join(["{", *lines, f' "cases": {{\n{cases}\n }},', ' "runs": [', ",\n".join(runs), " ]", "}", ""])


class Times:
    """A run's entries by case, the fastest first."""

    def __init__(self, record: Mapping[str, Any], run: Run | None) -> None:
        self.cases: Mapping[str, Any] = record["cases"]
        self.by_case: dict[str, list[dict[str, Any]]] = {}
        for one in sorted((x for x in (run["entries"] if run else ()) if "us" in x), key=lambda x: float(x["us"])):
            self.by_case.setdefault(one["case"], []).append(one)

    def best(self, case: str) -> list[str]:
        """Row, microseconds, share, and points from the best plain row."""
        found = self.by_case.get(case)
        if not found:
            return ["-"] * 4
        one, plain = found[0], self.by_case.get(self.cases[case]["plain"] or "")
        remarks = [f"{one['stack']} B of stack"] * bool(one["stack"]) + ["WRONG"] * (not one["error"] <= 1)
        name = one["row"].partition("_bf16_")[2] + (f" ({', '.join(remarks)})" if remarks else "")
        points = f"{100 * (one['share'] - plain[0]['share']):+.1f}" if plain else ""
        return [name, f"{one['us']:.1f}", f"{100 * one['share']:.1f} %", points]

    def of_flash(self, case: str) -> dict[str, Any] | None:
        """That of FlashAttention-2's tile."""
        names = (FA2_TILE,) if self.cases[case]["family"] == "plain" else ()
        found = [one for one in self.by_case.get(case, ()) if one["row"].endswith("_fa2") or one["row"] in names]
        return found[0] if found and self.cases[case]["family"] != "few_query" else None


def markdown(record: Mapping[str, Any]) -> str:
    """A table for each architecture and label, without columns that have nothing."""
    lines = ["# Rows of all families on emulated GPUs", "", record["method"], ""]
    labels = dict.fromkeys((run["arch"], run["label"]) for run in record["runs"])
    for arch, label in sorted(labels, key=lambda one: (one[1], one[0])):
        lines += [f"## sm_{arch}" + (f", {label}" if label else ""), ""]
        columns = list(zip(HEADINGS, *rows_of(record, arch, label), strict=True))
        headings, *rows = zip(*(x for x in columns if any(cell not in ("", "-") for cell in x[1:])), strict=True)
        lines += [*table(headings, rows), ""]
    machine = record["machine"]
    commits = ", ".join(dict.fromkeys(run["commit"][:12] for run in record["runs"]))
    versions = f"driver {machine['driver']}, torch {machine['torch']}, nvcc {machine['build']['nvcc_version']}"
    return "\n".join([*lines, f"{machine['gpu']}, {versions}, {machine['date'][:10]}, commit {commits}.", ""])


def rows_of(record: Mapping[str, Any], arch: int, label: str) -> Iterator[list[str]]:
    def run(passes: int, arch: int) -> Times:
        asked = {"passes": passes, "arch": arch, "label": label}
        return Times(record, next((x for x in record["runs"] if asked.items() <= x.items()), None))

    own, flash = ([run(passes, of) for passes in (3, 5)] for of in (arch, 89))
    for case in record["cases"]:
        other_way = bool(label) and record["cases"][case]["family"] == "few_query"  # of rows that are not for it
        if other_way or not any(case in times.by_case for times in own):
            continue
        tiles = [times.of_flash(case) for times in flash]
        name = next((one["row"].partition("_bf16_")[2].removesuffix("_fa2") for one in tiles if one), "")
        shares = [f"{100 * one['share']:.1f} %" if one else "" for one in tiles]
        yield [case, *own[0].best(case), *own[1].best(case), name, *shares]


def main(arguments: Sequence[str]) -> None:
    record, text, *named = arguments
    pairs = [(label, name) for label, _, name in (one.rpartition("=") for one in named)]
    found = of_results([(label, json.loads(Path(name).read_text())) for label, name in pairs])
    Path(record).write_text(to_json(found))
    Path(text).write_text(markdown(found))


if __name__ == "__main__":
    main(sys.argv[1:])
