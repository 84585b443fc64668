"""The numbers of attention problems, and places between NaN for them: what a kernel reads outside its operand, a
padding row included, poisons the result, for even 0 times NaN is NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from problems import Problem

GUARD = 256  # elements of NaN before and after each tensor: 512 bytes keep the alignment of the allocation
CAUSAL = ("none", "top-left", "bottom-right")
EXACT_FILLS = ("large", "huge")

QKV = tuple[Tensor, Tensor, Tensor]


def filled(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> QKV:
    p, g = problem, torch.Generator(device=device).manual_seed(problem.seed)
    shapes = [(p.seqlen_q, p.num_heads), *[(p.seqlen_k, p.num_heads_kv)] * 2]
    q, k, v = (torch.randn(p.batch, *x, head_dim, generator=g, device=device).to(dtype) for x in shapes)
    return FILLS[p.fill](p, q, k, v)


def _ramp(per_key: float, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Scores change by up to 2 * ``per_key`` from one key to the next: up in some rows, down in others."""
    scale = problem.scale or q.shape[-1] ** -0.5  # a scale of 0 has no ramp to show
    # In fp64: torch divides on a GPU by multiplying, and 1 / scale may be infinite in fp32, 0 * inf NaN.
    steps = torch.arange(problem.seqlen_k, device=q.device, dtype=torch.float64) * per_key / scale
    # The first element of q and k carries the ramp; q's varies by row, in size and sign.
    q[..., 0] = q[..., 0].clamp(-2, 2)
    k[..., 0] = steps.clamp(-60000.0, 60000.0).to(q.dtype)[:, None]
    return q, k, v


def _outliers(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """A few keys score far above all before them, for some query rows of a warp and not for others."""
    k[:, 5::37] *= 20
    return q, k, v


def _exact(half: tuple[int, int], other: tuple[int, int], problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Scores that are integers up to 12 times 2 to the sum of exponents (the first in fp16), exact in fp32 in any
    order of summation, with frequent ties. Beyond ties the softmax picks one key."""
    q[..., 4:] = 0  # sums of four products of small integers and a power of two
    q_unit, k_unit = (2.0**x for x in (half if q.dtype == torch.float16 else other))
    to_q, to_k = q.float().round().clamp(-1, 1) * q_unit, k.float().round().clamp(-3, 3) * k_unit
    return to_q.to(q.dtype), to_k.to(k.dtype), v


def _near_minus_120(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """All scores near -120: where no key is, a score of 0 would weigh e^120, which is infinite in fp32."""
    offset = (120.0 / problem.head_dim**0.5) ** 0.5
    return q / 4 + offset, k / 4 - offset, v


def _times(half: float, other: float, problem: Problem, *tensors: Tensor) -> Any:
    return tuple(x * (half if x.dtype == torch.float16 else other) for x in tensors)


def _minus_infinity(hides: Callable[[Tensor], Tensor], problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Scores of -inf for the keys that ``hides`` names, given their numbers."""
    q[..., 0] = q[..., 0].abs() + 0.5  # positive, so that the scores are -inf and not +inf
    k[:, hides(torch.arange(problem.seqlen_k, device=q.device)), :, 0] = -torch.inf
    return q, k, v


#: Of a problem and q, k and v as they are drawn: what they are.
FILLS: dict[str, Callable[..., QKV]] = {
    "normal": lambda p, *qkv: qkv,
    # Every key weighs the same, and every output is the one value there is.
    "constant": lambda p, *qkv: tuple(torch.full_like(x, 0.7) for x in qkv),
    "ramp": partial(_ramp, 0.05), "steep-ramp": partial(_ramp, 1.0),
    "outliers": _outliers, "large": partial(_exact, (10, 10), (10, 10)), "huge": partial(_exact, (15, 14), (50, 50)),
    "huge-values": lambda p, q, k, v: (q, k, *_times(15000.0, 1e30, p, v.clamp(-4, 4))),
    # Subnormal in fp16; with a scale of 2^40 the scores are ordinary again.
    "small": partial(_times, 2.0**-20, 2.0**-20),
    # The smallest subnormal numbers of fp16; in bf16 numbers whose products underflow to 0.
    "tiny": partial(_times, 2.0**-23, 1e-30),
    "first-keys-minus-inf": partial(_minus_infinity, lambda j: j < 100),
    "last-keys-minus-inf": partial(_minus_infinity, lambda j: j >= j.numel() - 100),
    "most-keys-minus-inf": partial(_minus_infinity, lambda j: j % 50 > 0),
    "all-keys-minus-inf": partial(_minus_infinity, lambda j: j >= 0), "near-minus-120": _near_minus_120,
}  # fmt: skip


def poison(dtype: torch.dtype, count: int, device: torch.device | str) -> Tensor:
    """``count`` elements of NaN, with a bit pattern that no arithmetic makes."""
    integer, pattern = {
        torch.float16: (torch.int16, 0x7E5A), torch.bfloat16: (torch.int16, 0x7FDA),
        torch.float32: (torch.int32, 0x7FDA5A5A), torch.int32: (torch.int32, 0x7FDA5A5A),
        torch.float64: (torch.int64, 0x7FFDA5A55A5A5A5A),
    }[dtype]  # fmt: skip
    return torch.full((count,), pattern, dtype=integer, device=device).view(dtype)


def place(x: Tensor, order: str = "bshd", row_pad: int = 0, offset: int = GUARD) -> Tensor:
    """A copy of x [batch, seqlen, heads, head_dim] inside NaN, its dimensions in memory in ``order``, each
    row followed by ``row_pad`` elements of NaN, the first element at ``offset``."""
    sizes = dict(zip("bsh", x.shape, strict=False))
    strides, step = {}, x.shape[3] + row_pad
    for axis in reversed(order[:3]):
        strides[axis] = step
        step *= sizes[axis]
    buffer = poison(x.dtype, offset + step + GUARD, x.device)
    view = buffer.as_strided(x.shape, (*(strides[axis] for axis in "bsh"), 1), offset)
    return view.copy_(x)


#: Layouts of each tensor by itself; "expanded": one head for all.
OF_EACH = ("bshd", "bhsd", "sbhd", "padded", "unaligned", "expanded")
#: And those where no length tells sequences apart: "shared", one batch entry for all; "overlapping", rows
#: that begin within others.
LAYOUTS = (*OF_EACH, "shared", "overlapping")


def lay_out(q: Tensor, k: Tensor, v: Tensor, layout: str) -> QKV:
    """[batch, seqlen, heads, head_dim] each, inside NaN. Some layouts keep only the first entry or head. "packed":
    slices of one tensor along the heads, as a fused projection leaves them; of two for two lengths."""
    if layout != "packed":
        return lay_out_one(q, layout, 0), lay_out_one(k, layout, 1), lay_out_one(v, layout, 2)
    heads = [x.shape[2] for x in (q, k, v)]
    if q.shape[1] != k.shape[1]:
        return (place(q), *place(torch.cat([k, v], dim=2)).split(heads[1:], dim=2))
    return place(torch.cat([q, k, v], dim=2)).split(heads, dim=2)


def lay_out_one(x: Tensor, layout: str, which: int) -> Tensor:
    """x [batch, seqlen, heads, head_dim] inside NaN. ``which``: 0 for q, 1 for k, 2 for v."""
    if layout == "overlapping" and x.numel():  # rows begin 8, 16 or 24 elements after others
        strides = (24, 16, 8, 1)
        count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        buffer = poison(x.dtype, count + 2 * GUARD, x.device)
        buffer[GUARD:-GUARD] = x.flatten().repeat(-(-count // x.numel()))[:count]
        return buffer.as_strided(x.shape, strides, GUARD)
    if layout == "unaligned":
        return place(x, ("bshd", "bshd", "bhsd")[which], row_pad=(0, 3, 1)[which], offset=GUARD + 1)
    first = {"expanded": x[:, :, :1], "shared": x[:1]}.get(layout, x)
    order = layout if layout in ("bhsd", "sbhd") else "bshd"
    return place(first, order, 8 * (1 + which) if layout == "padded" else 0).expand(x.shape)
