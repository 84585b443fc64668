"""Launches of rows that compute gradients, on a GPU's tensors or on a simulator's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import gpu
import oracle
import oracle_gradients
import torch
from feature_launch import only_ranges
from feature_tensors import Call
from operands import CAUSAL
from problems import Problem
from torch import Tensor

from cutlass_fmha import _C, ops
from cutlass_fmha.arguments.op_arguments import op_arguments

#: What broke others' kernels, and an edge of each mask that crosses a tile.
LISTED = [
    *(
        Problem(q, k, causal)
        for q, k in ((1, 1), (17, 113), (113, 17), (1, 300), (0, 5), (5, 0))
        for causal in CAUSAL
    ),
    *(Problem(n, n, causal, num_heads=4) for n in (64, 192, 320) for causal in CAUSAL),
    *(Problem(192, 192, causal, fill="constant", scale=-3.0) for causal in CAUSAL),
    *(Problem(129, 300, causal, window=(40, 30), num_heads=6, num_heads_kv=2) for causal in CAUSAL),
    *(Problem(200, 330, causal, prefix=True, num_heads=4, num_heads_kv=1) for causal in CAUSAL),
    *(Problem(200, 330, causal, prefix=True, window=(20, -1)) for causal in CAUSAL[1:]),
    *(Problem(130, 200, batch=5, packed_q=True, packed_k=True, causal=causal, seed=3) for causal in CAUSAL),
    *(
        Problem(130, 200, batch=4, packed_q=True, packed_k=True, used_q=True, used_k=True, seed=s)
        for s in (1, 4)
    ),
    *(Problem(170, 300, batch=4, used_q=True, used_k=True, leftpad=True, causal=causal) for causal in CAUSAL),
    *(Problem(70, 130, layout=layout, num_heads=4) for layout in ("bhsd", "packed", "padded", "expanded")),
    *(
        Problem(70, 130, head_dim=d, head_dim_v=v)
        for d, v in ((24, 72), (72, 24), (128, 64), (64, 256), (200, 256))
    ),
    *(Problem(100, 130, scale=scale, fill=fill) for scale in (0.0, -0.3) for fill in ("ramp", "small")),
]


def listed(row: _C.Row) -> list[Problem]:
    """LISTED as a row can take them, every second one with its head dims."""
    found = []
    for number, problem in enumerate(LISTED):
        if number % 2 and problem.head_dim == problem.head_dim_v == 64:
            problem = replace(problem, head_dim=row.head_dim, head_dim_v=row.head_dim)
        found.append(fit(problem, row))
    return list(dict.fromkeys(found))


def fit(problem: Problem, row: _C.Row) -> Problem:
    """The problem as a row can take it: with scores that a gradient of the row's dtype can be computed of."""
    problem = only_ranges(problem)
    dims = (min(problem.head_dim, row.head_dim), min(problem.head_dim_v, row.head_dim))
    fill = "normal" if problem.fill in ("huge-values", "steep-ramp", "outliers") else problem.fill
    return replace(
        problem,
        head_dim=dims[0],
        head_dim_v=dims[1],
        fill=fill,
        sinks="",
        page_size=0,
        indexed=False,
        pack=False,
    )


@dataclass
class BackwardLaunch:
    """One call of ``attend_backward`` on a row, with the output and LSE of the forward."""

    row: _C.Row
    problem: Problem
    call: Call
    dout: Tensor
    dlse: Tensor | None
    forward: tuple[Tensor, Tensor]
    said: dict[str, Any]
    found: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> BackwardLaunch:
        problem = fit(problem, row)
        call = problem.call(gpu.torch_dtype(row), device)
        generator = torch.Generator(device=device).manual_seed(problem.seed)
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        dout = torch.randn(shape, generator=generator, device=device).to(call.q.dtype)
        if problem.seed % 2:  # as transposed models hand it over
            dout = dout.transpose(-3, -2).contiguous().transpose(-3, -2)
        said = op_arguments(call.q, call.features)
        # Of rows that are not in use, NaN would be noticed.
        assert ops  # importing them registered them
        with _simulated(False):
            arguments = (call.q, call.k, call.v, cls._scale(problem, call), call.causal)
            forward = torch.ops.cutlass_fmha.attend(*arguments, True, None, **said)
        dlse = None
        if problem.return_lse:
            dlse = torch.randn(forward[1].shape, generator=generator, device=device)
        return cls(row, problem, call, dout, dlse, forward, said)

    @staticmethod
    def _scale(problem: Problem, call: Call) -> float:
        return problem.head_dim**-0.5 if call.scale is None else call.scale

    def run(self) -> None:
        call = self.call
        with _simulated(gpu.simulated()):
            arguments = (self.dout, call.q, call.k, call.v, *self.forward, self.dlse)
            found = torch.ops.cutlass_fmha.attend_backward(
                *arguments, self._scale(self.problem, call), call.causal, row=self.row.name, **self.said
            )
        self.found = dict(zip("qkv", found, strict=True))

    def errors(self) -> oracle.Errors:
        return oracle_gradients.compare(self.call, self.found, self.dout, self.dlse)

    def intact(self) -> bool:
        """The gradients are new tensors: the sanitizer sees what is written beside them."""
        return True


class _simulated:
    """Kernels run on the simulator in the block, or don't."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.before = os.environ.get("CUTLASS_FMHA_SIMULATE")
        os.environ["CUTLASS_FMHA_SIMULATE"] = str(int(self.on))

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del os.environ["CUTLASS_FMHA_SIMULATE"]
        else:
            os.environ["CUTLASS_FMHA_SIMULATE"] = self.before
