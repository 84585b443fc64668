"""What a parity run showed, as JSON: the machine, the versions, each row's worst errors."""

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


def write(directory: Path, content: dict[str, Any], tail: str = "") -> Path:
    """Writes <date>-<gpu>-<mode>-<arch><tail>.json into ``directory``; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", str(content["gpu"]).lower()).strip("-")
    path = directory / f"{str(content['date'])[:10]}-{gpu}-{content['mode']}-sm{content['arch']}{tail}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


@dataclass
class RowRecord:
    """What one row was shown to do. Ratios are to the tolerance: at most 1 passes."""

    problems: int = 0
    out_ratio: float = 0.0
    out_error: float = 0.0
    lse_ratio: float = 0.0
    lse_error: float = 0.0
    worst_problem: str = ""

    def merge(self, other: RowRecord) -> None:
        if not self.problems or max(other.out_ratio, other.lse_ratio) > max(self.out_ratio, self.lse_ratio):
            self.worst_problem = other.worst_problem
        self.problems += other.problems
        for name in ("out_ratio", "out_error", "lse_ratio", "lse_error"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


@dataclass
class ParityReport:
    """Errors of a test, or of all when they are done; a plugin of pytest, which takes those of each."""

    expected: list[str] = field(default_factory=list)
    rows: dict[str, RowRecord] = field(default_factory=dict)
    processes: int = 1

    def record(self, row: str, problem: object, errors: Errors) -> None:
        """Note the errors of one problem, then fail when they are beyond the tolerance. NaN, of which nothing is
        known to be the larger, is as bad as can be."""
        found = (errors.out_ratio, errors.out, errors.lse_ratio, errors.lse)
        told = RowRecord(1, *(math.inf if math.isnan(x) else x for x in found), str(problem))
        self.rows.setdefault(row, RowRecord()).merge(told)
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
        for name, rows in report.user_properties if report.when == "teardown" else ():
            for row, record in rows.items() if name == RECORDS else ():
                self.rows.setdefault(row, RowRecord()).merge(RowRecord(**record))

    @property
    def missing(self) -> list[str]:
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

    write = staticmethod(write)


def environment(arch: int, mode: str, source_hash: str) -> dict[str, object]:
    from cutlass_fmha import _C
    from cutlass_fmha.bench import machine  # not of a simulator's bare package

    gpus = {"gpus": torch.cuda.device_count(), "arch": arch, "mode": mode, "source_hash": source_hash}
    if mode.startswith("ptx"):
        gpus["ptx_compiler"] = _C.build_info()["ptx_compiler"]
    return {**machine.describe(0), **gpus}
