"""Measures cases on the GPU and collects the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from . import gradients, machine, memory
from .cases import Case
from .contenders import INSTALLED, OTHER, OURS, OWN, PEERS, Error, ErrorCheck, Inputs, make_inputs, only
from .features import Feature
from .gradients import GradientCheck
from .host import measure_host
from .lineup import Contender, line_up
from .peers import installed, versions
from .report import SCHEMA
from .timing import GraphTimer, Timing, input_sets, time_interleaved

BUDGET_S = 0.45
"""GPU seconds that each contender's replays of one case take."""

METHOD = (
    "Time of one call = time of a CUDA graph of many calls, between two CUDA events, over the number of "
    "calls; p50 and p90 over the graph's replays, the contenders taking turns. The calls rotate through sets "
    "of inputs that together exceed the L2 cache. Inputs are normally distributed and lie as [batch, seqlen, "
    "num_heads, head_dim]; SDPA gets them as transposed views. FLOP = 4 * batch * num_heads * visible query-"
    "key pairs * head_dim, 10 of a backward, the pairs of a causal mask, a window, a prefix or documents "
    "counted exactly and all pairs under a mask in memory. Bytes of decode are those of Q, K, V and O, each "
    "once; the copy, within device memory, reads half as many and writes the other half. Error: worst "
    "difference from dense fp64 attention on a sample of rows, relative to twice the error of unfused math in"
    " the same dtype plus two ulp. Memory: the most that a call held of torch's allocator at once, besides "
    "its inputs and what a package keeps between calls."
)


class CannotMeasure(RuntimeError):
    """There is nothing to measure with; the message says what is missing."""


def measure(
    cases: list[Case],
    peers: list[str] | None,
    row: str | None = None,
    quick: bool = False,
    device: int = 0,
    in_turns: Callable[[Case, float], dict[str, object]] | None = None,
) -> dict[str, object]:
    """Time ``cases`` on a CUDA device against ``peers`` and return the report (see report.SCHEMA).

    peers: names; None: torch's, and those of other packages that are installed.
    in_turns: measures a case within a budget of seconds, in place of ``measure_case``.
    Raises CannotMeasure when there is no GPU, or the package was built without CUDA.
    """
    require_gpu(device)
    begin = time.perf_counter()
    peers = [*PEERS, *installed()] if peers is None else peers
    budget_s = BUDGET_S / 4 if quick else BUDGET_S
    with torch.cuda.device(device):
        described = machine.describe(device)
        calls = in_turns is None and any(case.group == "latency" for case in cases)
        host_us = measure_host(peers) if calls else {}
        loop = memory.loop() if calls else {}
        results = []
        clocks = []
        for number, case in enumerate(cases, 1):
            print(f"bench: {number}/{len(cases)} {case.label}", file=sys.stderr, flush=True)
            if in_turns is not None:
                results.append(in_turns(case, budget_s))
            else:
                with torch.inference_mode():
                    results.append(measure_case(case, peers, row, budget_s, device))
                torch.cuda.empty_cache()
            if number == len(cases) or cases[number].group != case.group:
                clocks.append({"after": case.group, **machine.read_smi(device)})
        return {
            "schema": SCHEMA,
            "machine": {**described, "packages": versions(peers)},
            "clocks": clocks,
            "method": METHOD,
            "row": row,
            "quick": quick,
            "peers": peers,
            "host_us": host_us,
            "loop": loop,
            "cases": results,
            "wall_s": round(time.perf_counter() - begin, 1),
        }


def require_gpu(device: int) -> None:
    """Raise CannotMeasure, with one sentence, unless torch and this package can use the CUDA device."""
    if torch.version.cuda is None:
        raise CannotMeasure(
            f"a GPU is timed and this torch ({torch.__version__}) has no CUDA: install a CUDA build of torch."
        )
    if not torch.cuda.is_available():
        raise CannotMeasure("a GPU is timed and torch finds none: run it on a machine with an NVIDIA GPU and driver.")
    if device >= torch.cuda.device_count():
        raise CannotMeasure(f"there is no CUDA device {device}: torch sees {torch.cuda.device_count()}.")
    from cutlass_fmha import _C

    if not _C.rows():
        raise CannotMeasure("cutlass_fmha was built without CUDA (CUTLASS_FMHA_CUDA=OFF): rebuild it with CUDA.")


def measure_case(case: Case, peers: list[str], row: str | None, budget_s: float, device: int) -> dict[str, object]:
    """One case's entry: its description and, per contender, times and error, or why there are none."""
    inputs, feature, check = problem(case, device)
    results: dict[str, dict[str, object]] = {}
    timers: dict[str, GraphTimer] = {}
    contenders = line_up(case, inputs, peers, row, feature)
    for name, contender in contenders.items():
        results[name], timer = prepare(name, contender, inputs.sets, check)
        if timer is not None:
            timers[name] = timer
    for name, timing in time_interleaved(timers, budget_s).items():
        results[name] |= rates(timing, contenders[name].flop, contenders[name].bytes)
    if results[OURS]["status"] == "ok":
        results[OURS]["row"] = row or selected_row(case, inputs, feature)
        results[OURS]["planned_bytes"] = memory.planned(case, inputs, feature, row)
    return {**case.as_dict(), "input_sets": inputs.sets, "results": results}


def problem(case: Case, device: int) -> tuple[Inputs, Feature | None, ErrorCheck | GradientCheck]:
    """A case's tensors on the device, what its calls say besides, and what its results must be."""
    sets = input_sets(case.input_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
    inputs = make_inputs(case, sets, torch.device("cuda", device))
    if case.backward:
        return inputs, None, GradientCheck(case, inputs)
    feature = Feature(case, inputs.query.device) if case.featured else None
    return inputs, feature, ErrorCheck(case, inputs, feature)


def rates(timing: Timing, flop: int, moved_bytes: int) -> dict[str, object]:
    """A timing's fields, and what was done in that time."""
    seconds = timing.p50_us * 1e-6
    return {
        **{key: round(value, 3) for key, value in asdict(timing).items()},
        "tflops": round(flop / seconds / 1e12, 2),
        "tbytes_per_s": round(moved_bytes / seconds / 1e12, 3),
    }


def prepare(
    name: str, contender: Contender, sets: int, check: Callable[[Any], Error]
) -> tuple[dict[str, object], GraphTimer | None]:
    """Check one contender's result and capture its graph; the reason and no timer if it refuses."""
    with only(name):
        try:
            output = contender.call(0)
            error = check(output) if contender.checked else None
            peak = memory.peak(lambda: contender.call(0))
            timer = GraphTimer(contender.call, sets)
        except Exception as refusal:
            if not is_refusal(name, refusal):
                raise
            return {"status": "unsupported", "reason": first_sentence(refusal)}, None
    allocated = {"status": "ok", "peak_bytes": peak}
    if error is None:
        return allocated, timer
    return {
        **allocated,
        "max_abs_error": error.max_abs,
        "mean_abs_error": error.mean_abs,
        "tolerance": error.tolerance,
        "error_ratio": error.ratio,
    }, timer


def is_refusal(name: str, error: Exception) -> bool:
    """Whether an error says "not this problem"; everything else is a failure and must surface.

    Ours has an exception for it. torch has many sentences: a peer's counts while the device still works.
    Another build may not know an argument, and what another package raises is up to it.
    """
    from cutlass_fmha import UnsupportedError

    if name in OWN:
        return isinstance(error, UnsupportedError)
    torch.cuda.synchronize()  # raises when the error was a broken launch
    return name == OTHER or name in INSTALLED or isinstance(error, RuntimeError)


def first_sentence(error: Exception) -> str:
    """First line of an error's message, shortened to what a table footnote can hold."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].removesuffix(":")
    return line if len(line) <= 200 else line[:197] + "..."


def selected_row(case: Case, inputs: Inputs, feature: Feature | None) -> str:
    """Name of the row that selection gives this problem."""
    import cutlass_fmha

    if case.backward:
        return gradients.row_of(case, inputs)
    arguments = feature.arguments if feature else {"causal": case.causal}
    return str(cutlass_fmha.explain(*inputs[0], **arguments).winner)
