"""The parity gate: a candidate's kernel against the fp64 oracle of the tests, on the tests' own problems.

A hard gate. Outputs lie in memory full of NaN, inputs too, and three launches must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gpu
import oracle
import torch
from problems import Problem, listed

LAUNCHES = 3


def quick_problems(row: Any) -> list[Problem]:
    """What a candidate must pass before it is timed: all masks, ragged tiles, GQA, scale signs, hard numbers.

    row: a ``_C.Template``. Lengths follow its tile, so that every buffer is used again and the last tile is
    partial.
    """
    queries, keys = 2 * row.tile_m + 9, 4 * row.tile_n * row.kv_warps + 5
    problems = [
        Problem(queries, keys, causal, num_heads=heads, num_heads_kv=heads_kv, fill=fill)
        for causal in ("none", "top-left", "bottom-right")
        for heads, heads_kv, fill in ((2, 2, "normal"), (4, 2, "outliers"), (3, 1, "ramp"))
    ]
    problems += [Problem(keys, queries, causal, fill="steep-ramp") for causal in ("none", "bottom-right")]
    problems += [Problem(113, 257, "bottom-right", scale=scale) for scale in (0.0, -0.3, -3.0, 20.0)]
    problems += [Problem(130, 300, fill=fill) for fill in ("huge-values", "most-keys-minus-inf", "tiny")]
    problems += [
        Problem(70, 1023, fill="huge", scale=1.0),
        Problem(1, 1),
        Problem(1, 1023),
        Problem(1023, 1, "top-left"),
    ]
    problems += [Problem(0, 5), Problem(300, 0), Problem(257, 113, "bottom-right", return_lse=False)]
    problems += [
        Problem(113, 113, "bottom-right", layout=layout)
        for layout in ("bhsd", "padded", "packed", "expanded")
    ]
    return [replace(problem, seed=seed) for seed, problem in enumerate(problems)]


def all_problems(row: Any) -> list[Problem]:
    """What it has to pass before it is accepted: the quick ones, and all that the parity tests list."""
    return [*quick_problems(row), *(problem for problem in listed() if problem.runs_on(row.alignment))]


def failures(
    row: Any, problems: Sequence[Problem], device: torch.device, stream: int | None = None
) -> Iterator[str]:
    """One sentence per problem that a row fails, as soon as it is known."""
    for problem in problems:
        launch = gpu.Launch.of(row, problem, device)
        results = []
        for _ in range(LAUNCHES):
            launch.run(stream)
            results.append([bits(x.view) for x in (launch.out, launch.lse) if x is not None])
        lse = launch.lse.view if launch.lse else None
        errors = oracle.compare(
            launch.out.view,
            launch.q,
            launch.k,
            launch.v,
            launch.scale,
            problem.causal,
            lse,
            problem.exact_scores,
        )
        if errors.complaint or not errors.worst <= 1.0:
            yield f"{row.dtype} {problem}: {errors.complaint or f'{errors.worst:.3g} times the tolerance'}"
        elif not launch.intact():
            yield f"{row.dtype} {problem}: wrote outside its outputs"
        elif any(
            not torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
        ):
            yield f"{row.dtype} {problem}: {LAUNCHES} launches do not agree to the bit"


def bits(x: torch.Tensor) -> torch.Tensor:
    """A copy as integers: NaN equals itself."""
    return x.clone().view({2: torch.int16, 4: torch.int32}[x.element_size()])
