"""What rows reached in benchmark results, for the tools that hold a model against it."""

from __future__ import annotations

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

    A result counts when its rows are compiled for that GPU: neither forced to another architecture nor a
    proxy.
    ``build.mma_passes`` of its machine, 1 where absent, tells how often the build runs each mma.
    Raises ValueError for a file that is no benchmark result.
    """
    best: dict[tuple[str, int], Measurement] = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        from cutlass_fmha.bench.report import read_json  # only here: without results, no package is needed

        result = read_json(file)
        machine = result["machine"]
        build = machine.get("build") or {}
        if gpu not in str(machine["gpu"]) or machine.get("forced_arch"):
            continue
        own = f"_sm{str(machine['capability']).replace('.', '')}_"
        for case in result["cases"]:
            row = case["results"]["ours"].get("row")
            if not row or own not in row or not is_long(case):
                continue
            found = measurement(case, file.name)
            key = row, int(build.get("mma_passes", 1))
            if key not in best or found.rank > best[key].rank:
                best[key] = found
    return best


def is_long(case: dict[str, Any]) -> bool:
    """Whether the main loop is most of the case."""
    return bool(case["group"] == "dense" and min(case["seqlen_q"], case["seqlen_k"]) >= SHORTEST)


def measurement(case: dict[str, Any], file: str) -> Measurement:
    return Measurement(float(case["results"]["ours"]["tflops"]), case["label"], bool(case["causal"]), file)
