"""What rows reached in results of the benchmark and of emulations, to hold a model against."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORTEST = 2048  # keys: below, a launch's start and end weigh more than its main loop


@dataclass(frozen=True)
class Measurement:
    """The best rate of a row over the cases of one kind: full attention before causal."""

    tflops: float
    case: str
    causal: bool
    file: str

    @property
    def rank(self) -> tuple[bool, float]:
        return not self.causal, self.tflops


def best_measurements(folder: Path, gpu: str = "H200") -> dict[tuple[str, int], Measurement]:
    """(row, times each mma was run) -> its best measurement in the results of a GPU under ``folder``.

    A benchmark counts when its rows are compiled for that GPU: neither forced to another architecture nor a
    proxy. ``build.mma_passes`` of its machine, 1 where absent, tells how often the build runs each mma. An
    emulation has rows of every architecture and says it for each.
    Another tool's result names its kind and is passed over. Raises ValueError for a file that is none.
    """
    best: dict[tuple[str, int], Measurement] = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        for key, found in measurements(file, gpu):
            if key not in best or found.rank > best[key].rank:
                best[key] = found
    return best


def measurements(file: Path, gpu: str) -> Iterator[tuple[tuple[str, int], Measurement]]:
    """Those of one file, if it is of the GPU."""
    from cutlass_fmha.bench.report import read_json  # only here: without results, no package is needed

    kind, result = kind_of(file)
    if kind not in (None, "emulation"):
        return
    result = result if kind else read_json(file)
    machine = result["machine"]
    if gpu not in str(machine["gpu"]) or machine.get("forced_arch"):
        return
    if kind == "emulation":
        labels = {(case["head_dim"], case["causal"]): case["label"] for case in result["cases"]}
        for entry in result["results"]:
            if entry["arch"] is not None:
                label = labels[entry["head_dim"], entry["causal"]]
                found = Measurement(float(entry["tflops"]), label, bool(entry["causal"]), file.name)
                yield (entry["row"], int(entry["passes"])), found
        return
    passes = int((machine.get("build") or {}).get("mma_passes", 1))
    own = f"_sm{str(machine['capability']).replace('.', '')}_"
    for case in result["cases"]:
        row = case["results"]["ours"].get("row")
        if row and own in row and is_long(case):
            yield (row, passes), measurement(case, file.name)


def kind_of(file: Path) -> tuple[str | None, dict[str, Any]]:
    """What wrote the result, as it says itself, and the result: a benchmark's names no kind."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None, {}
    return (result.get("kind"), result) if isinstance(result, dict) else (None, {})


def is_long(case: dict[str, Any]) -> bool:
    """Whether the main loop is most of the case."""
    return bool(case["group"] == "dense" and min(case["seqlen_q"], case["seqlen_k"]) >= SHORTEST)


def measurement(case: dict[str, Any], file: str) -> Measurement:
    return Measurement(float(case["results"]["ours"]["tflops"]), case["label"], bool(case["causal"]), file)
