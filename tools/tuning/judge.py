"""A candidate on a GPU: the parity gate, then its times beside the incumbents'.

    python tools/tuning/judge.py SPECIFICATION RESULT       as session.py starts it, once for each candidate

A process of its own, because a process holds one ``_C``, and a kernel that reads where it must not takes down
the process that launched it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parents[1])]
    from building import load_extension

    job = json.loads(Path(sys.argv[1]).read_text())
    module = load_extension(Path(job["extension"]))

import gpu
import torch
from feature_tensors import Call
from launches import Launch
from listed_problems import listed
from problems import Problem

from cutlass_fmha.bench import timing
from cutlass_fmha.bench.cases import Case
from cutlass_fmha.bench.contenders import make_inputs

LAUNCHES = 3
Rows = Mapping[tuple[str, str], Any]
"""The scratch build's ``_C.Row`` by its candidate's tag and its dtype."""


def problems(row: Any) -> list[Problem]:
    """All that the parity tests list for such a row."""
    return [problem for problem in listed() if problem.runs_on(row.alignment)]


def failures(
    row: Any, problems: Sequence[Problem], device: torch.device, stream: int | None = None
) -> Iterator[str]:
    """One sentence per problem that a row fails, as soon as it is known.

    Operands and outputs lie in memory full of NaN, and three launches must agree to the bit.
    """
    for problem in problems:
        launch = Launch.of(row, problem, device)
        results = []
        for _ in range(LAUNCHES):
            launch.run(stream)
            results.append([bits(x.view) for x in (launch.out, launch.lse) if x is not None])
        errors = launch.errors()
        if errors.complaint or not errors.worst <= 1.0:
            yield f"{row.dtype} {problem}: {errors.complaint or f'{errors.worst:.3g} times the tolerance'}"
        elif not launch.intact():
            yield f"{row.dtype} {problem}: wrote outside its outputs"
        elif not all(all(map(torch.equal, results[0], other)) for other in results[1:]):
            yield f"{row.dtype} {problem}: {LAUNCHES} launches do not agree to the bit"


def bits(x: torch.Tensor) -> torch.Tensor:
    """A copy as integers: NaN equals itself."""
    return x.clone().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def time_candidate(
    tag: str, incumbents: Sequence[str], cases: Sequence[Case], rows: Rows, device: Any, budget_s: float
) -> dict[str, dict[str, float]]:
    """Case -> tag -> microseconds (median)."""
    found: dict[str, dict[str, float]] = {}
    for case in cases:
        call = calls(case, device)
        timers = {name: timing.GraphTimer(*call(rows[name, case.dtype])) for name in (*incumbents, tag)}
        times = timing.time_interleaved(timers, budget_s)
        found[case.name] = {name: time.p50_us for name, time in times.items()}
    return found


def calls(case: Case, device: Any) -> Callable[[Any], tuple[timing.Call, int]]:
    """Row -> its launches on a case by the binding itself, without selection or allocation, and how many sets
    of inputs they rotate through."""
    sets = timing.input_sets(case.input_bytes, torch.cuda.get_device_properties(device).L2_cache_size)
    inputs = make_inputs(case, sets, device)
    operands = [(*inputs[i], torch.empty_like(inputs[i][0])) for i in range(sets)]

    def of(row: Any) -> tuple[timing.Call, int]:
        causal, heads = "bottom-right" if case.causal else "none", (case.num_heads, case.num_heads_kv)
        dims = (case.head_dim, case.head_dim)
        problem = Problem(case.seqlen_q, case.seqlen_k, causal, case.batch, *heads, *dims, return_lse=False)
        outs = [gpu.Guarded(o, o) for *_, o in operands]
        inputs = [Call(q, k, v, None, causal, {}, False) for q, k, v, _ in operands]
        launches = [Launch(row, problem, *each, None) for each in zip(inputs, outs, strict=True)]
        return lambda number: launches[number].run(), sets

    return of


def judge(job: Mapping[str, Any], rows: Rows, device: torch.device) -> dict[str, Any]:
    """What is wrong with a candidate, in any of its dtypes; or its times."""
    for dtype in job["dtypes"]:
        row = rows[job["tag"], dtype]
        for failure in failures(row, problems(row), device):
            return {"parity": failure}
    cases = [Case(**case) for case in job["cases"]]
    return {"us": time_candidate(job["tag"], job["incumbents"], cases, rows, device, job["budget_s"])}


def main() -> None:
    device = torch.device("cuda", job["device"])
    torch.cuda.set_device(device)
    rows = {(row.name.rpartition("_")[2], row.dtype): row for row in module.rows()}
    try:
        result = judge(job, rows, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # CUDA's, which a kernel causes; all others are errors of this program
        result = {"crash": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
