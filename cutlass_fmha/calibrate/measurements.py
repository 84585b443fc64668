"""Timings of many problems on one GPU, and the file that keeps them.

Raw timings outlive the model that is fitted to them: ``calibrate --from-timings`` fits again, and
``tools/holdout.py --evaluate`` judges the selection again, both without a GPU.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cutlass_fmha import _C
from cutlass_fmha.calibrate.problems import Limits
from cutlass_fmha.calibrate.progress import Progress
from cutlass_fmha.calibrate.timing import RowTime, RowTimer
from cutlass_fmha.dispatch import choose, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table

SCHEMA = "cutlass_fmha-timings-1"
GIVE_UP = 5.0
"""In a calibration, a row this much slower than the best one at first sight is left out."""


class InvalidTimings(ValueError):
    """A file that holds no timings; the message says where it goes wrong."""


@dataclass(frozen=True)
class Sample:
    """One problem and the time of each row that was tried, by name."""

    problem: Problem
    rows: dict[str, RowTime]

    @property
    def times(self) -> dict[str, float]:
        """Microseconds of the rows that were timed in earnest."""
        return {name: time.us for name, time in self.rows.items() if not time.skipped}


@dataclass(frozen=True)
class Machine:
    """The GPU and the package that timings were taken with."""

    gpu: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block: int
    memory_bytes: int
    package: str
    source_hash: str
    torch: str
    date: str

    @property
    def device(self) -> Device:
        return Device(self.gpu, self.capability, self.sm_count, self.smem_per_block)

    @property
    def limits(self) -> Limits:
        return Limits.of_device(self.sm_count, self.memory_bytes)


@dataclass
class Measurements:
    """Samples of one machine. ``holdout`` has none of the problems of ``calibration``. ``gradients``: of rows that
    compute them."""

    machine: Machine
    calibration: list[Sample] = field(default_factory=list)
    holdout: list[Sample] = field(default_factory=list)
    gradients: list[Sample] = field(default_factory=list)
    #: The draw that holdout came from, for the record.
    seed: int | None = None
    #: GPU seconds that the run took, host included.
    wall_s: float = 0.0


def this_machine(index: int) -> Machine:
    """The machine's CUDA device ``index`` with this package."""
    import torch

    from cutlass_fmha import __version__
    from cutlass_fmha.dispatch import device as devices

    device = devices.of_index(index)
    return Machine(
        gpu=device.name,
        capability=device.capability,
        sm_count=device.sm_count,
        smem_per_block=device.smem_per_block,
        memory_bytes=int(torch.cuda.get_device_properties(index).total_memory),
        package=__version__,
        source_hash=str(_C.build_info()["source_hash"]),
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def kinds(device: Device, build: Table) -> list[tuple[int, str]]:
    """The (head_dim, dtype) pairs that a device has plain rows for."""
    found = set()
    for row in build.rows:
        if row.family not in tables.PLAIN:
            continue
        problem = Problem(1, 1, 1, 1, 1, row.head_dim, row.dtype)
        if not eligibility.reasons(row, problem, device, build):
            found.add((row.head_dim, row.dtype))
    return sorted(found)


def collect(
    problems: Sequence[Problem],
    index: int,
    build: Table,
    label: str,
    give_up: float = 3.0,
) -> list[Sample]:
    """Times every eligible row of each problem on CUDA device ``index``, the likely fastest first.

    Scored rows are timed where they are in question (``choose.contenders``). So are ranged rows, and where a
    plain row takes the problem, too: what they are for, many queries whose lengths are on the device, costs
    what it costs without.

    ``give_up``: how many times slower than the best a row's first call may be.
    """
    from cutlass_fmha.dispatch import device as devices

    device = devices.of_index(index)
    timer = RowTimer(index, problems)
    progress = Progress(label, len(problems))
    samples = []
    for problem in problems:
        rows = _timed_rows(problem, device, build)
        rows.sort(key=lambda row: choose.predicted_us(row, problem, device))
        samples.append(Sample(problem, timer.time(problem, rows, give_up)))
        progress.step(str(problem.head_dim))
    return samples


def _timed_rows(problem: Problem, device: Device, build: Table) -> list[Row]:
    eligible = [row for row in build.rows if not eligibility.reasons(row, problem, device, build)]
    wanted = list(choose.contenders(eligible, problem))
    of_features = [row for row in eligible if row.takes_features]
    wanted += [row for row in choose.contenders(of_features, problem) if not row.scored]
    return [row for row in eligible if row in wanted or not row.takes_features]


def save(measurements: Measurements, path: Path, verdict: dict[str, object] | None = None) -> None:
    """Writes timings as JSON, a problem per line. ``verdict``: what follows from them, for the reader."""
    content: dict[str, object] = {
        "kind": "timings",  # what tools that read benchmark results pass over
        "schema": SCHEMA,
        "machine": asdict(measurements.machine),
        "seed": measurements.seed,
        "wall_s": round(measurements.wall_s, 1),
    }
    if verdict is not None:
        content["verdict"] = verdict
    head = json.dumps(content, indent=1)[:-2]
    parts = []
    for name in ("calibration", "holdout", "gradients"):
        samples = ",\n".join("  " + json.dumps(_packed(sample)) for sample in getattr(measurements, name))
        parts.append(f' "{name}": [\n{samples}\n ]' if samples else f' "{name}": []')
    path.write_text(",\n".join([head, *parts]) + "\n}\n")


def _packed(sample: Sample) -> dict[str, object]:
    return {
        "problem": asdict(sample.problem),
        "rows": {
            name: [round(time.us, 3), round(time.min_us, 3), 0 if time.skipped else time.rounds]
            for name, time in sample.rows.items()
        },
    }


def load(path: Path) -> Measurements:
    """Reads what ``save`` wrote. Raises InvalidTimings, in a sentence, for anything else."""
    try:
        content: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidTimings(f"{path} holds no timings: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InvalidTimings(f"{path} holds no timings: its schema is not {SCHEMA!r}")
    try:
        machine = dict(content["machine"])
        machine["capability"] = tuple(machine["capability"])
        return Measurements(
            machine=Machine(**machine),
            calibration=[_unpacked(sample) for sample in content["calibration"]],
            holdout=[_unpacked(sample) for sample in content["holdout"]],
            gradients=[_unpacked(sample) for sample in content.get("gradients", [])],  # older files have none
            seed=content["seed"],
            wall_s=content["wall_s"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidTimings(f"{path} holds damaged timings: {error!r}") from error


def _unpacked(sample: dict[str, Any]) -> Sample:
    rows = {
        name: RowTime(float(us), float(min_us), max(1, int(rounds)), skipped=rounds == 0)
        for name, (us, min_us, rounds) in sample["rows"].items()
    }
    if not all(0 < time.us < float("inf") for time in rows.values()):
        raise ValueError(f"a time that is none in {sample['problem']}")
    problem: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in sample["problem"].items()
    }
    return Sample(Problem(**problem), rows)
