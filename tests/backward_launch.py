"""Launches of rows that compute gradients, on a GPU's tensors or on a simulator's."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import gpu
import oracle
import oracle_gradients
import torch
from gpu import Guarded
from launches import SPLIT_ERROR, UNKNOWN, fit_head_dims, whole_vectors, without
from operands import CAUSAL, GUARD, Call, poison
from problems import FILLS_WITHOUT_A_SCALE, MEMORY, SMALL_MEMORY, Problem, fitted
from tensors import moved
from torch import Tensor

import cutlass_fmha.ops  # noqa: F401, which registers them
from cutlass_fmha import _C
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.dispatch.describe import describe
from cutlass_fmha.dispatch.gradients import BLOCK, scores_of_a_head, writes_scores
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features
from cutlass_fmha.launch import gradients, workspace

#: Times fp16's dO where values are as large as fp16 has them, or dS is infinite: as a loss is scaled.
LOSS_SCALE = 2.0**-12

GROUPED: dict[str, int] = {"num_heads": 4, "num_heads_kv": 1}
PACKED = {"packed_q": True, "packed_k": True}
#: What broke others' kernels, and an edge of each mask that crosses a tile.
LISTED = [
    *(Problem(*n, c) for n in ((1, 1), (17, 113), (113, 17), (1, 300), (0, 5), (5, 0)) for c in CAUSAL),
    *(Problem(n, n, causal, num_heads=4) for n in (64, 192, 320) for causal in CAUSAL),
    *(Problem(n, n, causal, fill="near-minus-120", num_heads=4) for n in (33, 192, 300) for causal in CAUSAL),
    # Numbers whose probabilities, values or gradients lie far from 1.
    *(Problem(100, 150, "bottom-right", fill=fill) for fill in FILLS_WITHOUT_A_SCALE[2:]),
    *(Problem(129, 300, causal, window=(40, 30), num_heads=6, num_heads_kv=2) for causal in CAUSAL),
    *(Problem(200, 330, causal, prefix=True, **GROUPED) for causal in CAUSAL),
    *(Problem(200, 330, causal, prefix=True, window=(20, -1)) for causal in CAUSAL[1:]),
    *(Problem(130, 200, batch=5, **PACKED, causal=causal, seed=3) for causal in CAUSAL),
    *(Problem(130, 200, batch=4, **PACKED, used_q=True, used_k=True, seed=seed) for seed in (1, 4)),
    *(Problem(170, 300, batch=4, used_q=True, used_k=True, leftpad=True, causal=causal) for causal in CAUSAL),
    *(Problem(70, 130, layout=layout, num_heads=4) for layout in ("bhsd", "packed", "padded", "expanded")),
    *(Problem(70, 130, head_dim=d, head_dim_v=v) for d, v in ((24, 72), (72, 24), (128, 64), (64, 256), (200, 256))),
    *(Problem(100, 130, scale=scale, fill=fill) for scale in (0.0, -0.3, 1e-45) for fill in ("ramp", "small")),
    *(Problem(100, 150, c, sinks=x, num_heads=4) for x in ("normal", "high", "low") for c in CAUSAL),
    *(Problem(*n, "bottom-right", sinks="normal") for n in ((300, 100), (33, 0))),
    Problem(130, 200, batch=5, **PACKED, used_q=True, sinks="normal", seed=3),
]
WHOLE_HEADS, MASK = ("hqk", "same", "plain"), ("bqk", "plain")
BLOCKS = ((16, 32), "bh", "none"), ((64, 64), "bh", "bottom-right"), ((48, 96), "h", "top-left")
BLOCKS += ((128, 512), "b", "none"), ((192, 128), "", "bottom-right")
#: What becomes of scores, for rows that know it.
SCORED = [
    *(Problem(100, 150, causal, softcap=cap, num_heads=4) for cap in (0.5, 20.0) for causal in CAUSAL),
    *(Problem(100, 150, causal, alibi=alibi, num_heads=4) for alibi in ("h", "bh") for causal in CAUSAL),
    *(Problem(150, 330, c, dropout=p, num_heads=4, seed=4) for p in (0.1, 0.5, 0.9999) for c in CAUSAL),
    *(Problem(70, 200, mask=x, num_heads=4) for x in zip(("bhqk", "qk", "k", "bk", "", "hqk"), MEMORY, strict=False)),
    *(
        Problem(70, 200, "bottom-right", bias=(dims, kind, "plain"), bias_fill=fill, num_heads=4, seed=seed)
        for dims in ("bhqk", "hqk", "k", "q", "", "bh")
        for kind, fill, seed in (("same", "normal", 0), ("float32", "minus-inf", 1))
    ),
    # Nothing but the LSE's gradient counts, and that is the same for all keys of a query.
    *(Problem(100, 300, bias=(dims, "float32", "plain"), fill="tiny", seed=1) for dims in ("q", "k")),
    Problem(130, 200, batch=3, packed_q=True, used_k=True, softcap=5.0, dropout=0.3, bias=WHOLE_HEADS),
    *(Problem(200, 500, c, blocks=b, block_dims=x, blocks_beyond=x == "h", **GROUPED) for b, x, c in BLOCKS),
    *(Problem(150, 400, blocks=(64, 64), memory=memory, num_heads_kv=1) for memory in SMALL_MEMORY[1:]),
    Problem(200, 300, batch=4, **PACKED, blocks=(32, 64), dropout=0.2, softcap=5.0, seed=3),
    Problem(150, 300, leftpad=True, used_q=True, used_k=True, blocks=(64, 32), bias=WHOLE_HEADS, window=(90, 0)),
    Problem(150, 300, "top-left", window=(30, 5), prefix=True, dropout=0.2, alibi="bh", **GROUPED),
    Problem(150, 300, "bottom-right", leftpad=True, used_k=True, dropout=0.5, mask=MASK, sinks="normal"),
]
#: For ``overflowing``: few keys of a query, so that P is large; where the scale is that small, gradients are 0.
OVERFLOWING = [
    *(Problem(70, 90, "top-left", window=(1, 0), scale=scale, num_heads=4, seed=2) for scale in (None, 1e-45)),
    Problem(70, 90, "top-left", window=(1, 0), scale=1e-45, num_heads=4, batch=3, packed_q=True, seed=4),
    Problem(300, 2, scale=1e-45, num_heads=4, seed=2),
]


def listed(row: _C.Row) -> list[Problem]:
    """Problems as a row can take them, every second one with its head dims."""
    found = []
    for number, problem in enumerate([*LISTED, *(SCORED if row.scored else [])]):
        if number % 2 and problem.head_dim == problem.head_dim_v == 64:
            problem = replace(problem, head_dim=row.head_dim, head_dim_v=row.head_dim)
        found.append(fit(problem, row))
    return list(dict.fromkeys(found))


def fit(problem: Problem, row: _C.Row) -> Problem:
    """The problem as a row can take it: with an output that is a number in the row's dtype."""
    unknown = ("num_splits",) if row.scored else UNKNOWN["ranged"]
    problem = without(problem, *unknown, "page_size", "indexed", "pack")
    problem = fit_head_dims(problem, row) if row.family == "backward_wide" else whole_vectors(problem)
    if problem.fill == "huge-values" and row.dtype == "float16":  # which dropout scales up
        problem = replace(problem, dropout=0.0)
    return fitted(problem, row.head_dim, row.head_dim, *BLOCK)


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
    deterministic: bool = False
    heads_at_once: int = 1  # of keys, whose dS has memory, where the row writes it
    wanted: tuple[str, ...] = ()  # names of ``found``; all where it is empty
    found: dict[str, Tensor] = field(init=False)
    room: Room = field(init=False)  # what the launch allocated

    @classmethod
    def of(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> BackwardLaunch:
        problem = fit(problem, row)
        call = problem.call(gpu.torch_dtype(row), device)
        if call.scale is None:
            call = call._replace(scale=problem.head_dim**-0.5)
        drawn: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(problem.seed), "device": device}
        dout = torch.randn(*call.q.shape[:-1], call.v.shape[-1], **drawn).to(call.q.dtype)
        if problem.fill == "huge-values" and row.dtype == "float16":
            dout *= LOSS_SCALE
        if problem.seed % 2:  # as transposed models hand it over
            dout = dout.transpose(-3, -2).contiguous().transpose(-3, -2)
        said = op_arguments(call.q, call.features)
        with mock.patch.dict(os.environ, {"CUTLASS_FMHA_SIMULATE": "0"}):
            forward = _forward(row, *call[:5], True, None, **said)
        dlse = torch.randn(forward[1].shape, **drawn) if problem.return_lse else None
        return cls(row, problem, call, dout, dlse, forward, said)

    @classmethod
    def overflowing(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> BackwardLaunch:
        """With dO so large that some of dS is beyond fp16, but not dO."""
        launch = cls.drawn(row, problem, device)
        launch.dout *= 12000.0
        return launch

    @classmethod
    def drawn(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> BackwardLaunch:
        launch = cls.of(row, problem, device)
        launch.deterministic = writes_scores(row) or (row.scored and problem.seed % 3 == 0)
        launch.heads_at_once = 1 + problem.seed % 4
        return launch

    @property
    def _names(self) -> list[str]:
        """Of the gradients. Beside a softcap, only wide rows have a bias's."""
        biased = "bias" in self.said and (not self.problem.softcap or self.row.family == "backward_wide")
        found = [*"qkv"] + ["bias"] * biased + ["sinks"] * ("sinks" in self.said)
        return [name for name in found if name in (self.wanted or found)]

    def run(self, device: torch.device | None = None) -> None:
        call, names = self.call, self._names
        wanted = [name in names for name in ("q", "k", "v", "bias", "sinks")]
        given = (self.dout, *call[:3], *self.forward, self.dlse, call.scale)
        said = self.said | {"row": self.row.name, "wanted": wanted, "deterministic": self.deterministic}
        if writes_scores(self.row):
            problem = describe(call[:3], call.causal, Features(**self.said)).problem
            of_bias = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * 4
            of_heads = self.heads_at_once * scores_of_a_head(self.row, problem)
            said["deterministic_workspace"] = max(of_heads, of_bias if "bias" in said else 0)
        self.room = Room()
        memory = [mock.patch.object(module, "torch", self.room) for module in (gradients, workspace)]
        given, said = moved((given, said), device or call.q.device)
        simulate = mock.patch.dict(os.environ, {"CUTLASS_FMHA_SIMULATE": str(int(gpu.simulated()))})
        with simulate, memory[0], memory[1]:
            found = torch.ops.cutlass_fmha.attend_backward(*given, call.causal, **said)
        asked = (x.to(call.q.device) for x, need in zip(found, wanted, strict=True) if need)
        self.found = dict(zip(names, asked, strict=True))

    def errors(self) -> oracle.Errors:
        error = SPLIT_ERROR if self.row.mma == "tf32x3" else 0.0
        return oracle_gradients.compare(self.call, self.found, self.dout, self.dlse, error)

    def intact(self) -> bool:
        return bool(torch.stack([guarded.intact() for guarded in self.room.made]).all())


def _forward(row: _C.Row, *arguments: Any, **said: Any) -> tuple[Tensor, Tensor]:
    """The output and the LSE; by the CPU backend where the GPU has no row but for the gradients, or one whose
    products are off by more than float32's."""
    try:
        if row.family == "backward_wide":
            raise UnsupportedError
        return torch.ops.cutlass_fmha.attend(*arguments, **said)
    except UnsupportedError:
        on_cpu, said = moved((arguments, said), "cpu")
        return moved(torch.ops.cutlass_fmha.attend(*on_cpu, **said), arguments[0].device)


class Room:
    """In place of ``torch`` for a launch: what it allocates lies between NaN, and is NaN where not 0."""

    def __init__(self) -> None:
        self.made: list[Guarded] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: tuple[int, ...], *, device: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        if str(device) == "meta":  # only its strides are asked for
            return torch.empty(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        buffer = poison(dtype, size + 2 * GUARD, device)
        self.made.append(Guarded(buffer, buffer[GUARD : GUARD + size].view(shape)))
        return self.made[-1].view

    def empty_like(self, x: Tensor, dtype: torch.dtype | None = None, **_: torch.memory_format) -> Tensor:
        return self.empty(tuple(x.shape), dtype=dtype or x.dtype, device=x.device)

    def zeros_like(self, x: Tensor, **said: Any) -> Tensor:
        return self.empty_like(x, **said).zero_()
