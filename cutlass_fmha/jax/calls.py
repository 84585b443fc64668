"""What XLA calls: a problem that was described when the function was traced, and runs where its buffers are.

The description, a text, holds all that is known then: what is computed, and shapes. So XLA's buffers are but
addresses, and a program that XLA kept from another process runs, too.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import _C, private_torch
from cutlass_fmha.arguments import check, check_features
from cutlass_fmha.arguments.op_arguments import FLOATS, INTEGERS
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.features import Features
from cutlass_fmha.launch import gradients, plan
from cutlass_fmha.launch.workspace import Workspace
from cutlass_fmha.memory.plan import EVERYTHING
from cutlass_fmha.ops import attend_backward

#: What is never an array.
NUMBERS = INTEGERS | FLOATS | {"window", "batch_invariant", "deterministic"}
#: (name of its dtype, shape).
Array = tuple[str, tuple[int, ...]]


class Problem(NamedTuple):
    """One call of attention, or of its gradients: what holds for each execution."""

    #: Operands query, key, value, those of ``given``; results output and, with ``lse``, the LSE. Of
    #: gradients: operands output's gradient, query, key, value, output, LSE, with ``lse`` that one's
    #: gradient, those of ``given``; results the gradients that are ``wanted``. Last, if needed, a workspace.
    gradients: bool
    causal: str
    scale: float
    row: str | None
    #: What is said in numbers to the op ``attend``, and which tensors.
    numbers: tuple[tuple[str, Any], ...]
    given: tuple[str, ...]
    lse: bool
    wanted: tuple[bool, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]

    def text(self) -> str:
        return json.dumps(self._asdict(), sort_keys=True)

    @classmethod
    def of(cls, text: bytes) -> Problem:
        return cls(**{name: _tuples(value) for name, value in json.loads(text).items()})

    def said(self, given: Sequence[Tensor]) -> dict[str, Any]:
        return dict(self.numbers) | dict(zip(self.given, given, strict=True))

    def metas(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype_of(name), device="meta") for name, shape in self.operands]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def name_of(dtype: torch.dtype) -> str:
    return check.dtype_name(dtype)


# ---- when a function is traced -----------------------------------------------------------------------------


def check_problem(problem: Problem) -> None:
    """Raises what ``attention`` raises of these arguments, and NotImplementedError without gradients."""
    metas = problem.metas()
    q, k, v = metas[1:4] if problem.gradients else metas[:3]
    said = problem.said(metas[len(metas) - len(problem.given) :])
    if problem.gradients:
        if sentence := attend_backward.refusal(q, k, v, problem.causal, said):
            raise NotImplementedError(sentence)
    else:
        check_features.check_features((q, k, v), Features(**said), ("q", "k", "v"))


@functools.lru_cache(1024)
def workspace_bytes(problem: Problem, index: int) -> int:
    """What a launch on that CUDA device needs beside its results. Raises UnsupportedError."""
    metas = problem.metas()
    device = devices.of_index(index)
    with Workspace(EVERYTHING, "meta") as workspace, torch.no_grad():
        if problem.gradients:
            _gradients(
                problem,
                metas,
                [torch.empty(s, dtype=dtype_of(d), device="meta") for d, s in problem.results],
                device,
            )
        else:
            found = _plan(problem, metas, device)
            if found.launch is None:
                return 4 * found.room
            q, k, v, *given = metas
            found.launch((q, k, v), problem.scale, problem.lse, problem.said(given))
    return workspace.high_water


def _plan(problem: Problem, metas: Sequence[Tensor], device: devices.Device) -> plan.Plan:
    q, k, v, *given = metas
    return plan.prepare((q, k, v), problem.causal, problem.row, "bshd", check.NAMES, problem.said(given), device)


# ---- when XLA calls ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One execution: the text that was said when the function was traced, and where its buffers are."""

    text: bytes
    arguments: list[int]
    results: list[int]
    #: (CUDA stream, number of the CUDA device); None for the host.
    where: tuple[int, int] | None


#: What XLA's handler is told of a launch that it has by ``_C.xla_keep``: repeat it, without Python from then on.
KEPT = True


def answer(
    text: bytes, arguments: list[int], results: list[int], stream: int | None, device: int | None
) -> str | bool | None:
    """Of an execution that XLA's handler can't repeat: KEPT; None after it; or what was wrong, which XLA tells
    whoever waits for a result."""
    try:
        where = None if stream is None or device is None else (stream, device)
        return run(Call(text, arguments, results, where))
    except BaseException as error:  # there is nobody else to tell
        return f"{type(error).__name__}: {error}"


def run(call: Call) -> bool | None:
    """Raises what the call raises."""
    if call.where is None:
        _on_host(call)
        return None
    (q, k, v, *_), (out, *_) = call.arguments, call.results
    problem, is_kept = _prepared(call.text, call.where[1])
    if is_kept and not (q | k | v | out) & 15:
        return KEPT
    _on_device(call, problem)
    return None


@functools.lru_cache(1024)
def _described(text: bytes) -> Problem:
    return Problem.of(text)


@functools.lru_cache(1024)
def _prepared(text: bytes, index: int) -> tuple[Problem, bool]:
    """What is described, and whether XLA's handler has its launch, for which addresses alone are enough."""
    problem = _described(text)
    room = math.prod(problem.results[-1][1]) if problem.results[-1][0] == "uint8" else 0
    if (needed := workspace_bytes(problem._replace(results=_own(problem)), index)) > room:
        raise RuntimeError(
            f"this was compiled with {room} bytes of workspace, and {devices.of_index(index)} needs "
            f"{needed}: compile it where it runs"
        )
    found = None if problem.gradients else _plan(problem, problem.metas(), devices.of_index(index))
    if found is None or found.launch is not None:
        return problem, False
    places = [(3 + problem.given.index(name), field) for name, field in found.addresses]
    _C.xla_keep(text, index, found.row, found.params, problem.scale, problem.lse, bool(found.room), places)
    return problem, True


def _own(problem: Problem) -> tuple[Array, ...]:
    """The results without a workspace."""
    return tuple(each for each in problem.results if each[0] != "uint8")


def _on_host(call: Call) -> None:
    problem = _described(call.text)
    operands, results = (
        [_host_tensor(*each, address) for each, address in zip(arrays, addresses, strict=True)]
        for arrays, addresses in ((problem.operands, call.arguments), (problem.results, call.results))
    )
    ops = torch.ops.cutlass_fmha
    off = private_torch.disable_autocast  # XLA may have called from the thread of who called it
    with torch.no_grad(), nullcontext() if off is None else off():
        if not problem.gradients:
            q, k, v, *given = operands
            out, lse = (*results, None)[:2]
            ops.attend_out(q, k, v, out, lse, problem.scale, problem.causal, problem.row, **problem.said(given))
            return
        arguments, said = _operands(problem, operands)
        found = ops.attend_backward(*arguments, problem.scale, problem.causal, **said, wanted=problem.wanted)
        wanted = (x for x, need in zip(found, problem.wanted, strict=True) if need)
        for to, x in zip(results, wanted, strict=True):
            to.copy_(x)


def _on_device(call: Call, problem: Problem) -> None:
    assert call.where is not None
    stream, index = call.where
    device = torch.device("cuda", index)
    operands, results = (
        [_device_tensor(*each, address, device) for each, address in zip(arrays, addresses, strict=True)]
        for arrays, addresses in ((problem.operands, call.arguments), (problem.results, call.results))
    )
    on = torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
    with torch.cuda.device(index), on, torch.no_grad():
        memory = results.pop() if len(results) > len(_own(problem)) else _device_tensor("uint8", (0,), 0, device)
        with Workspace.within(memory):
            if problem.gradients:
                _gradients(problem, operands, results, None)
                return
            q, k, v, *given = operands
            said = problem.said(given) | dict(zip(("out", "lse"), results, strict=False))
            plan.launch(q, k, v, problem.scale, problem.causal, problem.lse, problem.row, "bshd", check.NAMES, said)


def _operands(problem: Problem, operands: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Those of ``attend_backward`` by position, and what is said."""
    count = 7 if problem.lse else 6
    found = [*operands[:count], *([] if problem.lse else [None])]
    return found, {n: x for n, x in problem.said(operands[count:]).items() if n in attend_backward.NAMES}


def _gradients(
    problem: Problem, operands: Sequence[Tensor], results: Sequence[Tensor], device: devices.Device | None
) -> None:
    (dout, q, k, v, out, lse, dlse), said = _operands(problem, operands)
    places = iter(results)
    into = tuple(next(places) if need else None for need in problem.wanted)
    gradients.launch(
        dout, (q, k, v), out, lse, dlse, problem.scale, problem.causal, said, problem.wanted, device=device,
        into=into,
    )  # fmt: skip


def _host_tensor(dtype: str, shape: tuple[int, ...], address: int) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype_of(dtype))
    size = math.prod(shape) * dtype_of(dtype).itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype_of(dtype)).view(shape)


class _Bytes:
    """Memory of a GPU, for ``torch.as_tensor``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _device_tensor(dtype: str, shape: tuple[int, ...], address: int, device: torch.device) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype_of(dtype), device=device)
    memory = _Bytes(address, math.prod(shape) * dtype_of(dtype).itemsize)
    return torch.as_tensor(memory, device=device).view(dtype_of(dtype)).view(shape)
