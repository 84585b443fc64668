"""What the demo measures: agreement of embeddings, calls of the op, time of the attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cutlass_fmha.bench.timing import GraphTimer, percentile, time_interleaved

MIN_COSINE = {torch.float32: 0.99999, torch.float16: 0.999, torch.bfloat16: 0.999}
"""Least cosine by the model's dtype: embeddings that point further apart are wrong, not rounded."""


@dataclass(frozen=True)
class Agreement:
    """How far apart two sets of unit vectors are: differences of their entries, least cosine of a pair."""

    max_abs: float
    mean_abs: float
    min_cosine: float

    @classmethod
    def of(cls, one: torch.Tensor, other: torch.Tensor) -> Agreement:
        """Compare [count, hidden] with [count, hidden], row by row, in fp64."""
        one, other = one.double().cpu(), other.double().cpu()
        difference = (one - other).abs()
        cosine = torch.nn.functional.cosine_similarity(one, other, dim=-1)
        return cls(difference.max().item(), difference.mean().item(), cosine.min().item())

    def good(self, dtype: torch.dtype) -> bool:
        """Whether the directions agree as the dtype allows. A NaN does not."""
        return self.min_cosine >= MIN_COSINE[dtype]


class CountCalls(TorchDispatchMode):
    """Counts calls of the ops ``forward``, ``attend`` and ``attend_out`` in its block: proof that they computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.cutlass_fmha
        if func in (ops.forward.default, ops.attend.default, ops.attend_out.default):
            self.calls += 1
        return func(*args, **(kwargs or {}))


def attention_times(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, budget_s: float = 0.5
) -> dict[str, float]:
    """Median microseconds of one attention call on these tensors, by the op and by torch's SDPA.

    Tensors are [batch, seqlen, num_heads, head_dim]. On a GPU both are replays of CUDA graphs, so that the
    time is the GPU's and not Python's; on the CPU both are eager calls. They take turns.
    """
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def op() -> object:
        return torch.ops.cutlass_fmha.forward(query, key, value, scale, "none", False, None)

    def sdpa() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    return times_in_turns({"cutlass_fmha": op, "torch SDPA": sdpa}, query.device.type, budget_s)


def times_in_turns(calls: dict[str, Callable[[], object]], device: str, budget_s: float) -> dict[str, float]:
    """Median microseconds of each call: on a GPU its own, of graphs that are replayed; else by the wall."""
    if device == "cuda":
        timers = {name: GraphTimer(partial(_ignore_number, call), sets=1) for name, call in calls.items()}
        return {name: timing.p50_us for name, timing in time_interleaved(timers, budget_s).items()}
    return wall_times(calls, device, budget_s)


def _ignore_number(call: Callable[[], object], number: int) -> object:
    """A GraphTimer numbers its input sets; here there is one."""
    return call()


def wall_times(calls: dict[str, Callable[[], object]], device: str, budget_s: float = 0.5) -> dict[str, float]:
    """Median wall-clock microseconds of each call, the calls taking turns, after two turns to warm up.

    Takes about ``budget_s`` seconds for each call, and 3 to 200 turns.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def synchronise() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def turn(call: Callable[[], object]) -> float:
        synchronise()
        begin = time.perf_counter()
        call()
        synchronise()
        return (time.perf_counter() - begin) * 1e6

    for call in calls.values():
        turn(call)
    slowest = max(turn(call) for call in calls.values())
    for _ in range(max(3, min(200, int(budget_s * 1e6 / max(slowest, 1.0))))):
        for name, call in calls.items():
            samples[name].append(turn(call))
    return {name: percentile(times, 0.5) for name, times in samples.items()}
