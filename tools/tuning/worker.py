"""The process that runs candidates on a GPU: the parity gate, then times, candidates and incumbents in turns.

    python tools/tuning/worker.py SPECIFICATION EVENTS_FD        as evaluate.py starts it

A process of its own for each extension: a process holds one ``_C``, and a kernel that reads where it must not
takes down the process that launched it. Each step is told before it is taken, as a JSON line, so that whoever
reads knows which candidate was at work when the lines end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST_LOOK = 0.9  # a candidate that slow on one case can't be accepted: it is not timed further
INCUMBENT_LOOK = 0.85  # nor can a row that slow be the incumbent of the case
DROP = 0.96  # the same after proper timing
RESERVED_SHARED = 1024  # what CUDA keeps of an SM's shared memory for each block
FAILED = 3  # exit status when CUDA reported an error
Tell = Callable[..., None]


def main(specification: str, events: str) -> int:
    spec = json.loads(Path(specification).read_text())
    with os.fdopen(int(events), "w", buffering=1) as pipe:

        def tell(event: str, **fields: Any) -> None:
            pipe.write(json.dumps({"event": event, **fields}) + "\n")

        try:
            run(spec, tell)
        except (
            RuntimeError
        ) as error:  # CUDA's errors, which a kernel causes; all others are errors of this program
            if type(error).__name__ == "OutOfMemoryError":
                raise
            tell("failed", reason=(str(error).strip().splitlines() or [type(error).__name__])[0])
            return FAILED
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
    info = module.build_info()
    if info.get("mma_passes", 1) != spec["mma_passes"]:
        raise RuntimeError(f"the extension was built for {info.get('mma_passes', 1)} mma passes")
    rows = {(row.name.rpartition("_")[2], row.dtype): row for row in module.templates()}
    tell("ready", gpu=torch.cuda.get_device_name(device))
    for target in spec["targets"]:
        fitting = check_shared_memory(target, rows, spec, tell)
        passed = gate_target({**target, "candidates": fitting}, rows, device, tell)
        if passed:
            time_target(target, passed, rows, device, tell)
            tell("end", target=target["name"])
    tell("done")


def check_shared_memory(
    target: dict[str, Any], rows: dict[tuple[str, str], Any], spec: dict[str, Any], tell: Tell
) -> list[dict[str, Any]]:
    """The candidates whose launches ask for no more than they may: the kernels themselves say how much."""
    if spec["mma_passes"] != 1 and spec["arch"] != 90:
        return list(target["candidates"])  # of an emulation, which pads it
    fitting = []
    for candidate in target["candidates"]:
        row = rows[candidate["tag"], candidate["dtypes"][0]]
        shared, blocks = row.smem_bytes + RESERVED_SHARED, row.min_blocks
        if shared * blocks <= spec["shared_per_sm"]:
            fitting.append(candidate)
            continue
        reason = f"{blocks} blocks of {row.smem_bytes} bytes do not fit an SM's {spec['shared_per_sm']}"
        tell("gate", target=target["name"], tag=candidate["tag"], fate="resources", reason=reason)
    return fitting


def gate_target(
    target: dict[str, Any], rows: dict[tuple[str, str], Any], device: Any, tell: Tell
) -> list[str]:
    """Tags of the candidates that are correct."""
    from tuning import gates

    passed = []
    for candidate in target["candidates"]:
        tag = candidate["tag"]
        tell("begin", target=target["name"], tag=tag)
        reason = None
        for dtype in candidate["dtypes"]:
            row = rows[tag, dtype]
            for problem in (gates.all_problems if candidate["full_gate"] else gates.quick_problems)(row):
                reason = reason or gates.first_failure(row, [problem], device)
                tell("alive")
        tell("gate", target=target["name"], tag=tag, fate="parity", reason=reason)
        if reason is None:
            passed.append(tag)
    return passed


def time_target(
    target: dict[str, Any], passed: list[str], rows: dict[tuple[str, str], Any], device: Any, tell: Tell
) -> None:
    """Times of the candidates that are correct and of the incumbents, the shortest case first.

    A candidate that is far behind on one case is not timed on the others: no gain elsewhere can make up for
    it.
    """
    from cutlass_fmha.bench.cases import Case

    cases = sorted((Case(**case) for case in target["cases"]), key=lambda case: case.flop)
    alive = list(passed)
    us: dict[str, dict[str, float]] = {tag: {} for tag in passed}
    incumbents_us: dict[str, dict[str, float]] = {}
    for case in cases:
        if not alive:
            break
        times = time_case(target, case, alive, rows, device, tell)
        incumbents_us[case.name] = {tag: times[tag] for tag in target["incumbents"] if tag in times}
        best = min(incumbents_us[case.name].values())
        for tag in alive:
            us[tag][case.name] = times[tag]
        alive = [tag for tag in alive if best / times[tag] >= DROP]
    for tag in passed:
        tell(
            "times",
            target=target["name"],
            tag=tag,
            us=us[tag],
            incumbents_us={case: incumbents_us[case] for case in us[tag]},
            quick=len(us[tag]) < len(cases),
        )


def time_case(
    target: dict[str, Any],
    case: Any,
    alive: list[str],
    rows: dict[tuple[str, str], Any],
    device: Any,
    tell: Tell,
) -> dict[str, float]:
    """Microseconds (median) by tag. After a first look, only what may still matter is timed in turns."""
    import torch

    from cutlass_fmha.bench.contenders import make_inputs
    from cutlass_fmha.bench.timing import GraphTimer, input_sets, time_interleaved

    sets = input_sets(case.input_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
    inputs = make_inputs(case, sets, device)
    outputs = [torch.empty_like(inputs[number][0]) for number in range(sets)]
    timers: dict[str, GraphTimer] = {}
    look: dict[str, float] = {}
    for tag in [*target["incumbents"], *alive]:
        tell("begin", target=target["name"], tag=tag if tag in alive else None)
        launches = make_launches(rows[tag, case.dtype], case, inputs, outputs)
        timer = GraphTimer(partial(run_one, launches), sets)
        timers[tag], look[tag] = timer, timer.graph_us / timer.calls
    best = min(look[tag] for tag in target["incumbents"])
    for tag in list(timers):
        if best / look[tag] < (FIRST_LOOK if tag in alive else INCUMBENT_LOOK):
            del timers[tag]
    tell("begin", target=target["name"], tag=None, seconds=4 * target["budget_s"] * len(timers))
    times = {tag: us for tag, us in look.items() if tag in alive or tag in timers}
    if any(tag in timers for tag in alive):
        measured = time_interleaved(timers, target["budget_s"])
        times.update({tag: timing.p50_us for tag, timing in measured.items()})
    return times


def run_one(launches: list[Any], number: int) -> None:
    launches[number].run()


def make_launches(row: Any, case: Any, inputs: Any, outputs: list[Any]) -> list[Any]:
    """One launch per set of inputs, by the binding itself: no selection, no allocation."""
    import gpu

    diagonal = case.seqlen_k - case.seqlen_q if case.causal else None
    launches = []
    for number, out in enumerate(outputs):
        q, k, v = inputs[number]
        guarded = gpu.Guarded(out, out)
        launches.append(gpu.Launch(row, q, k, v, guarded, None, case.head_dim**-0.5, diagonal))
    return launches


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
