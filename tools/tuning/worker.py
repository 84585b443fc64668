"""The process that runs candidates on a GPU: for each the parity gate, then its times beside the incumbents'.

    python tools/tuning/worker.py SPECIFICATION        as evaluate.py starts it

A process of its own for each extension: a process holds one ``_C``, and a kernel that reads where it must not
takes down the process that launched it. Each step is told before it is taken, as a JSON line on standard
output, so that whoever reads knows which candidate was at work when the lines end.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST_LOOK = 0.9  # a candidate that slow on one case can't be accepted: it is not timed further
INCUMBENT_LOOK = 0.85  # nor can a row that slow be the incumbent of the case
DROP = 0.96  # the same after proper timing
RESERVED_SHARED = 1024  # what CUDA keeps of an SM's shared memory for each block
Tell = Callable[..., None]


def main(specification: str) -> int:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to the log

    def tell(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        run(json.loads(Path(specification).read_text()), tell)
    except RuntimeError as error:  # CUDA's, which a kernel causes; all others are errors of this program
        if type(error).__name__ == "OutOfMemoryError":
            raise
        tell("failed", reason=(str(error).strip().splitlines() or [type(error).__name__])[0])
        return 3
    return 0


def load_extension(path: Path) -> Any:
    """Make a scratch extension this process's ``cutlass_fmha._C``, beside this repository's Python.

    The package is a bare one: importing it wants an installed distribution, and nothing of it is needed here
    but the benchmark's timing.
    """
    package = types.ModuleType("cutlass_fmha")
    package.__path__ = [str(ROOT / "cutlass_fmha")]
    sys.modules["cutlass_fmha"] = package
    spec = importlib.util.spec_from_file_location("cutlass_fmha._C", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cutlass_fmha._C"] = module
    spec.loader.exec_module(module)
    package._C = module  # type: ignore[attr-defined]
    for directory in (ROOT / "tests", ROOT / "tools"):
        sys.path.insert(0, str(directory))
    return module


def run(spec: dict[str, Any], tell: Tell) -> None:
    os.environ["CUTLASS_FMHA_FORCE_ARCH"] = str(spec["arch"])
    module = load_extension(Path(spec["extension"]))
    import torch

    device = torch.device("cuda", spec["device"])
    torch.cuda.set_device(device)
    passes = module.build_info().get("mma_passes", 1)
    if passes != spec["mma_passes"]:
        raise SystemExit(f"the extension was built for {passes} mma passes")
    rows = {(row.name.rpartition("_")[2], row.dtype): row for row in module.templates()}
    for job in spec["jobs"]:
        tell("begin")
        for fate, reason in objections(job, rows, spec, device, tell):
            tell("dropped", fate=fate, reason=reason)
            break
        else:
            tell("times", **time_job(job, rows, device, tell))


def objections(
    job: dict[str, Any], rows: dict[tuple[str, str], Any], spec: dict[str, Any], device: Any, tell: Tell
) -> Iterator[tuple[str, str]]:
    """(fate, reason) of all that is wrong with a candidate, in the order of the gates."""
    from tuning import gates

    row = rows[job["tag"], job["dtypes"][0]]
    # An emulation pads the shared memory that the kernels themselves ask for.
    padded = spec["mma_passes"] != 1 and spec["arch"] != 90
    if not padded and (row.smem_bytes + RESERVED_SHARED) * row.min_blocks > spec["shared_per_sm"]:
        limit = spec["shared_per_sm"]
        yield "resources", f"{row.min_blocks} blocks of {row.smem_bytes} bytes do not fit an SM's {limit}"
    for dtype in job["dtypes"]:
        row = rows[job["tag"], dtype]
        for problem in (gates.all_problems if job["full_gate"] else gates.quick_problems)(row):
            yield from (("parity", failure) for failure in gates.failures(row, [problem], device))
            tell("alive")


def time_job(
    job: dict[str, Any], rows: dict[tuple[str, str], Any], device: Any, tell: Tell
) -> dict[str, Any]:
    """Microseconds (median) of a candidate and the incumbents by case, the shortest case first.

    A candidate that is far behind on one case is not timed on the others: no gain elsewhere can make up for
    it.
    """
    from cutlass_fmha.bench.cases import Case

    cases = sorted((Case(**case) for case in job["cases"]), key=lambda case: case.flop)
    us: dict[str, float] = {}
    incumbents_us: dict[str, dict[str, float]] = {}
    for case in cases:
        times = time_case(job, case, rows, device, tell)
        us[case.name] = times.pop(job["tag"])
        incumbents_us[case.name] = {job["incumbents"][tag]: time for tag, time in times.items()}
        if min(times.values()) / us[case.name] < DROP:
            break
    return {"us": us, "incumbents_us": incumbents_us, "quick": len(us) < len(cases)}


def time_case(
    job: dict[str, Any], case: Any, rows: dict[tuple[str, str], Any], device: Any, tell: Tell
) -> dict[str, float]:
    """Microseconds (median) by tag. After a first look, only what may still matter is timed in turns."""
    from cutlass_fmha.bench.timing import time_interleaved

    stand = Stand.of(case, device)
    timers = {tag: stand.timer(rows[tag, case.dtype]) for tag in (*job["incumbents"], job["tag"])}
    look = {tag: timer.graph_us / timer.calls for tag, timer in timers.items()}
    best = min(look[tag] for tag in job["incumbents"])
    if best / look[job["tag"]] < FIRST_LOOK:
        return look
    timers = {tag: timer for tag, timer in timers.items() if best / look[tag] >= INCUMBENT_LOOK}
    tell("alive", seconds=4 * job["budget_s"] * len(timers))
    return {tag: timing.p50_us for tag, timing in time_interleaved(timers, job["budget_s"]).items()}


class Stand:
    """A case's inputs in as many copies as keep them out of the cache, and a place for outputs."""

    def __init__(self, case: Any, device: Any) -> None:
        import torch

        from cutlass_fmha.bench.contenders import make_inputs
        from cutlass_fmha.bench.timing import input_sets

        self.case = case
        self.sets = input_sets(case.input_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
        self.inputs = make_inputs(case, self.sets, device)
        self.outputs = [torch.empty_like(q) for q, *_ in (self.inputs[i] for i in range(self.sets))]

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, case: Any, device: Any) -> Stand:
        return cls(case, device)

    def timer(self, row: Any) -> Any:
        """A row's launches by the binding itself: no selection, no allocation."""
        import gpu

        from cutlass_fmha.bench.timing import GraphTimer

        c = self.case
        diagonal = c.seqlen_k - c.seqlen_q if c.causal else None
        launches = [
            gpu.Launch(row, *self.inputs[i], gpu.Guarded(out, out), None, c.head_dim**-0.5, diagonal)
            for i, out in enumerate(self.outputs)
        ]
        return GraphTimer(lambda number: launches[number].run(), self.sets)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
