"""What a parity run showed, as JSON and Markdown: the machine, the versions, each row's worst errors."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Errors

#: The name of a test's records among its properties.
RECORDS = "parity"


@dataclass
class RowRecord:
    """What one row was shown to do. Ratios are to the tolerance: at most 1 passes."""

    problems: int = 0
    out_ratio: float = 0.0
    out_error: float = 0.0
    lse_ratio: float = 0.0
    lse_error: float = 0.0
    worst_problem: str = ""

    def add(self, problem: str, errors: Errors) -> None:
        """NaN, of which nothing is known to be the larger, is as bad as can be."""
        found = (errors.out_ratio, errors.out, errors.lse_ratio, errors.lse)
        self.merge(RowRecord(1, *(math.inf if math.isnan(x) else x for x in found), problem))

    def merge(self, other: RowRecord) -> None:
        if not self.problems or other.worst > self.worst:
            self.worst_problem = other.worst_problem
        self.problems += other.problems
        for name in ("out_ratio", "out_error", "lse_ratio", "lse_error"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @property
    def worst(self) -> float:
        return max(self.out_ratio, self.lse_ratio)


@dataclass
class ParityReport:
    """Errors of a test, or of all when they are done; a plugin of pytest, which takes those of each."""

    expected: list[str] = field(default_factory=list)
    rows: dict[str, RowRecord] = field(default_factory=dict)
    processes: int = 1

    def record(self, row: str, problem: object, errors: Errors) -> None:
        """Note the errors of one problem, then fail when they are beyond the tolerance."""
        self.rows.setdefault(row, RowRecord()).add(str(problem), errors)
        try:
            errors.check()
        except AssertionError as failure:
            raise AssertionError(f"{row}: {problem}: {failure}") from None

    def check(self, launch: Any, problem: object) -> None:
        """Note the errors of a launch that was made, and fail for them, or for what it wrote elsewhere."""
        self.record(launch.row.name, problem, launch.errors())
        assert launch.intact(), f"{launch.row.name}: {problem}: wrote outside its outputs"

    def data(self) -> dict[str, dict[str, Any]]:
        """What a test's report has: builtin types only."""
        return {name: asdict(row) for name, row in self.rows.items()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test's records to those of all, once."""
        for name, rows in report.user_properties if report.when == "teardown" else ():
            for row, record in rows.items() if name == RECORDS else ():
                self.rows.setdefault(row, RowRecord()).merge(RowRecord(**record))

    @property
    def missing(self) -> list[str]:
        """Rows that no problem was compared on."""
        return [name for name in self.expected if name not in self.rows]

    def content(self, passed: bool, tests: dict[str, int], environment: dict[str, object]) -> dict[str, object]:
        """The report as JSON data. It passes only when every row was covered."""
        return {
            "kind": "cutlass_fmha parity report",
            "passed": passed and not self.missing and bool(self.expected),
            "tests": tests, "processes": self.processes, **environment,
            "rows_expected": self.expected, "rows_missing": self.missing,
            "rows": dict(sorted(self.data().items())),
        }  # fmt: skip

    def write(self, directory: Path, content: dict[str, object]) -> Path:
        path = write(directory, content)
        path.with_suffix(".md").write_text(markdown(content))
        return path


def write(directory: Path, content: dict[str, object], tail: str = "") -> Path:
    """Writes <date>-<gpu>-<mode>-<arch><tail>.json into ``directory``; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", str(content["gpu"]).lower()).strip("-")
    name = f"{str(content['date'])[:10]}-{gpu}-{content['mode']}-sm{content['arch']}{tail}"
    path = directory / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def environment(arch: int, mode: str, source_hash: str) -> dict[str, object]:
    """The machine and the versions of a run on the first GPU."""
    from cutlass_fmha import _C
    from cutlass_fmha.bench import machine  # not of a simulator's bare package

    gpus = {"gpus": torch.cuda.device_count(), "arch": arch, "mode": mode, "source_hash": source_hash}
    if mode.startswith("ptx"):
        gpus["ptx_compiler"] = _C.build_info()["ptx_compiler"]
    return {**machine.describe(0), **gpus}


MODES = {
    "native": "compiled for this GPU's architecture",
    "ptx": "the sm_89 rows, through their PTX",
    "ptx80": "the sm_89 rows compiled for sm_80, through their PTX",
    "ptx86": "the sm_89 rows compiled for sm_86, through their PTX",
    "native80": "the sm_89 rows, compiled for sm_80",
    "native86": "the sm_89 rows, compiled for sm_86",
    "proxy": "the sm_120 rows' source and configuration, compiled for this GPU",
}


def markdown(content: dict[str, Any]) -> str:
    """The report for people: a paragraph, then a table of rows."""
    c, rows = content, content["rows"]
    mode, missing = MODES[c["mode"]], ""
    if compiler := c.get("ptx_compiler"):
        mode += f", of which {compiler} made the GPU's code"
    if c["rows_missing"]:
        missing = f"; missing: {', '.join(c['rows_missing'])}"
    tests = ", ".join(f"{count} {outcome}" for outcome, count in c["tests"].items())
    covered = f"{len(rows)} of {len(c['rows_expected'])} rows covered{missing}"
    lines = [
        f"# Parity of the sm_{c['arch']} rows on {c['gpu']}: {'passed' if c['passed'] else 'FAILED'}",
        "",
        f"{c['date']}, mode {c['mode']} ({mode}), compute capability {c['capability']}, driver {c['driver']}, "
        f"Python {c['python']}, torch {c['torch']} (CUDA {c['cuda']}), cutlass_fmha {c['package']}.",
        f"Hash of src/: `{c['source_hash']}`.",
        "",
        f"{covered}. Tests: {tests}, in {c['processes']} process(es).",
        "",
        "Errors are against dense fp64 attention; ratios are to the tolerance of tests/oracle.py: 1 at most.",
        "",
        "| row | problems | output: worst ratio | absolute | LSE: worst ratio | absolute | worst problem |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['problems']} | {row['out_ratio']:.3f} | {row['out_error']:.2e} "
            f"| {row['lse_ratio']:.3f} | {row['lse_error']:.2e} | {row['worst_problem']} |"
        )
    return "\n".join(lines) + "\n"
