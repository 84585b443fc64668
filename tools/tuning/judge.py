"""A candidate on a GPU: the parity gate, then its times beside the incumbents'. search.py starts it once for each, a
process of its own: it holds one ``_C``, and a kernel that reads where it must not takes down what launched it."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parents[1])]
    from building import load_extension

    job = json.loads(Path(sys.argv[1]).read_text())
    module = load_extension(Path(job["extension"]))

import torch
from launches import Launch
from problems import Problem, listed

from cutlass_fmha.bench.cases import Case
from cutlass_fmha.calibrate import timing
from cutlass_fmha.dispatch.problem import Problem as Timed

LAUNCHES = 3
Rows = Mapping[tuple[str, str], Any]  # the scratch build's ``_C.Row`` by its candidate's tag and its dtype


def problems(row: Any) -> list[Problem]:
    return [problem for problem in listed() if problem.runs_on(row.alignment)]


def failures(row: Any, problems: Sequence[Problem], device: torch.device, stream: int | None = None) -> Iterator[str]:
    """One sentence per problem that a row fails, as soon as it is known: operands and outputs lie in memory full of
    NaN, and three launches must agree to the bit."""
    for problem in problems:
        launch = Launch.of(row, problem, device)
        results = []
        for _ in range(LAUNCHES):
            launch.run(stream)
            written = [x.view.contiguous() for x in (launch.out, launch.lse) if x is not None]
            results.append([x.view(torch.int16).clone() for x in written])  # of integers: NaN equals itself
        errors = launch.errors()
        if errors.complaint or not errors.worst <= 1.0:
            yield f"{row.dtype} {problem}: {errors.complaint or f'{errors.worst:.3g} times the tolerance'}"
        elif not launch.intact():
            yield f"{row.dtype} {problem}: wrote outside its outputs"
        elif not all(all(map(torch.equal, results[0], other)) for other in results[1:]):
            yield f"{row.dtype} {problem}: {LAUNCHES} launches do not agree to the bit"


def time_candidate(job: Mapping[str, Any], rows: Rows, device: int) -> dict[str, dict[str, float]]:
    """Case -> tag -> microseconds of the candidate and the incumbents, in turns as a calibration has them."""
    found: dict[str, dict[str, float]] = {}
    for case in (Case(**fields) for fields in job["cases"]):
        sizes = (case.batch, case.seqlen_q, case.seqlen_k, case.num_heads, case.num_heads_kv, case.head_dim)
        problem = Timed(*sizes, case.dtype, "bottom-right" if case.causal else "none")
        own = {tag: rows[tag, case.dtype] for tag in (*job["incumbents"], job["tag"])}
        timer = timing.RowTimer(device, [problem])
        looks = [timer.time(problem, list(own.values()), give_up=math.inf) for _ in range(job["looks"])]
        found[case.name] = {tag: median(look[row.name].us for look in looks) for tag, row in own.items()}
    return found


def judge(job: Mapping[str, Any], rows: Rows, device: torch.device) -> dict[str, Any]:
    for dtype in job["dtypes"]:
        row = rows[job["tag"], dtype]
        for failure in failures(row, problems(row), device):
            return {"parity": failure}
    return {"us": time_candidate(job, rows, device.index)}


if __name__ == "__main__":
    rows = {(row.name.rpartition("_")[2], row.dtype): row for row in module.rows()}
    try:
        result = judge(job, rows, torch.device("cuda", 0))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # CUDA's, which a kernel causes; all others are errors of this program
        result = {"crash": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    Path(sys.argv[2]).write_text(json.dumps(result))
