"""``explain``: what selection makes of a problem, row by row, on the GPU that is here or on another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cutlass_fmha import _C, check, select
from cutlass_fmha import device as devices
from cutlass_fmha.device import Device
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.select import Build, Problem

if TYPE_CHECKING:
    from cutlass_fmha._C import Template


@dataclass(frozen=True)
class Verdict:
    """A row's line in an explanation. ``predicted_us`` is None for a row that is not eligible."""

    template: Template
    reasons: tuple[str, ...]
    predicted_us: float | None

    @property
    def eligible(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Explanation:
    """What runs a problem on a device, and why. Print it for the table.

    ``device`` None is the CPU. ``rows`` has the eligible rows first, cheapest first. ``winner`` is the name
    of the row that runs, None when none does; ``note`` says in a sentence what runs and how it was chosen, or
    why nothing does.
    """

    problem: Problem
    device: Device | None
    rows: tuple[Verdict, ...]
    winner: str | None
    note: str

    def __str__(self) -> str:
        width = max((len(row.template.name) for row in self.rows), default=0)
        lines = [f"problem: {self.problem}", f"device:  {self.device or 'CPU'}"]
        if self.rows:
            lines += ["", f"  {'template':<{width}}  {'predicted':>12}"]
        for row in self.rows:
            name = row.template.name
            if row.predicted_us is None:
                lines.append(f"  {name:<{width}}  {'-':>12}  no: {'; '.join(row.reasons)}")
            else:
                mark = ">" if name == self.winner else " "
                lines.append(f"{mark} {name:<{width}}  {row.predicted_us:9.1f} us  eligible")
        return "\n".join([*lines, "", f"runs: {self.note}"])


def explain(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool | str = False,
    layout: str = "bshd",
    template: str | None = None,
    shape: Sequence[int] | None = None,
    seqlen_k: int | None = None,
    num_heads_kv: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    alignment: int = select.FULL_ALIGNMENT,
    device: str | int | torch.device | Device | None = None,
    arch: int | None = None,
    sm_count: int | None = None,
) -> Explanation:
    """Which kernel runs a problem on a device, and what speaks against each of the others.

    Either ``explain(q, k, v, causal=..., layout=..., template=...)`` as ``attention`` is called, or
    ``explain(shape=(batch, seqlen_q, num_heads, head_dim), ...)`` with ``seqlen_k`` and ``num_heads_kv``
    where they differ from seqlen_q and num_heads, ``dtype``, and ``alignment``: what pointers and strides are
    multiples of, in bytes.

    Args:
        device: "cuda", "cuda:1", "cpu", "sm_89", "sm_89:58" (with its SM count) or a name: "l4", "l40s",
            "rtx4090", "h200", "rtx5080", "rtx5090", "rtxpro6000". That of the tensors when None; for a shape
            the first CUDA device, or the CPU without one. No GPU is needed for a named one.
        arch, sm_count: the same as ``device="sm_<arch>:<sm_count>"``.

    Raises TypeError or ValueError, in a sentence, for arguments that describe no problem or no device.
    """
    causal_name = check.causal_name(causal)
    check.layout_name(layout)
    if shape is not None:
        if q is not None or k is not None or v is not None:
            raise TypeError("explain takes tensors or a shape, got both")
        problem = _problem_of_shape(shape, seqlen_k, num_heads_kv, dtype, causal_name, alignment)
        default: str | torch.device | None = None
    else:
        if q is None or k is None or v is None:
            raise TypeError("explain needs q, k and v, or a shape (batch, seqlen_q, num_heads, head_dim)")
        problem = _problem_of_tensors((q, k, v), causal_name, layout)
        default = q.device
    if arch is not None or sm_count is not None:
        if device is not None or arch is None:
            raise TypeError("explain takes arch with or without sm_count, or device, but not both")
        return explain_problem(problem, devices.of_arch(arch, sm_count), template)
    if device is None:  # the driver is asked only now: it may be too old to answer
        device = default or ("cuda" if _C.device_count() else "cpu")
    return explain_problem(problem, resolve(device), template)


def _problem_of_tensors(tensors: tuple[Tensor, Tensor, Tensor], causal: str, layout: str) -> Problem:
    dims = check.check_tensors(tensors, layout, ("q", "k", "v"))
    alignment = min(check.operand(tensor, layout).alignment for tensor in tensors)
    return Problem(*dims, dtype=check.dtype_name(tensors[0].dtype), causal=causal, alignment=alignment)


def _problem_of_shape(
    shape: Sequence[int],
    seqlen_k: int | None,
    num_heads_kv: int | None,
    dtype: str | torch.dtype,
    causal: str,
    alignment: int,
) -> Problem:
    if len(shape) != 4 or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"shape must be four sizes (batch, seqlen_q, num_heads, head_dim), got {shape!r}")
    batch, seqlen_q, num_heads, head_dim = shape
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    name = check.dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    allowed = [check.dtype_name(each) for each in check.CPU_DTYPES]
    if name not in allowed:
        raise ValueError(f"dtype must be one of {', '.join(allowed)}, got {dtype!r}")
    if seqlen_k < 0:
        raise ValueError(f"seqlen_k must be at least 0, got {seqlen_k}")
    if (longest := max(seqlen_q, seqlen_k)) > check.MAX_SEQLEN:
        raise ValueError(f"a seqlen must be 2**29 at most, got {longest}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if num_heads_kv < 0 or (num_heads % num_heads_kv if num_heads_kv else num_heads):
        raise ValueError(f"num_heads_kv must divide num_heads {num_heads}, got {num_heads_kv}")
    if alignment not in (1, 2, 4, 8, 16):
        raise ValueError(f"alignment must be 1, 2, 4, 8 or 16 bytes, got {alignment}")
    return Problem(batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, name, causal, alignment)


def resolve(device: str | int | torch.device | Device) -> Device | None:
    """The GPU that a description means; None for the CPU. An int is a CUDA device's index."""
    if isinstance(device, Device):
        return device
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    if text == "cpu":
        return None
    if text == "cuda" or text.startswith("cuda:"):
        index = text.removeprefix("cuda").removeprefix(":") or "0"
        count = _C.device_count()
        if not index.isdecimal() or int(index) >= count:
            raise ValueError(f"device {text} does not exist: there are {count} CUDA devices here")
        return devices.of_index(int(index))
    return devices.named(text)


def explain_problem(
    problem: Problem, device: Device | None, template: str | None = None, build: Build | None = None
) -> Explanation:
    """Every row's verdict on a problem. ``device`` None is the CPU, ``build`` defaults to this one."""
    build = build or select.this_build()
    if template is not None:
        build.by_name(template)
    if device is None:
        verdicts = tuple(
            Verdict(row, ("a CUDA kernel, and this is the CPU",), None) for row in build.templates
        )
        note = "the CPU backend, which needs no template"
        if template is not None:
            note = f"nothing, because template {template} is a CUDA kernel and this is the CPU"
        return Explanation(problem, None, verdicts, None, note)
    judged = []
    for row in build.templates:
        why = tuple(select.reasons(row, problem, device, build))
        judged.append(Verdict(row, why, None if why else select.predicted_cost(row, problem, device)))
    verdicts = tuple(sorted(judged, key=_rank))
    try:
        winner = select.select(problem, device, template, build)
    except UnsupportedError as error:
        sentence = str(error).partition("\n")[0].removesuffix(":")
        return Explanation(problem, device, verdicts, None, f"nothing, because {sentence}")
    how = "forced by name" if template is not None else "the cheapest eligible row by predicted cost"
    return Explanation(problem, device, verdicts, winner.name, f"{winner.name}, {how}")


def _rank(verdict: Verdict) -> tuple[int, float]:
    """Eligible rows by cost, then the others by how little they lack."""
    return (len(verdict.reasons), verdict.predicted_us or 0.0)
