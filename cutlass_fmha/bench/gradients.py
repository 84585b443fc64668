"""The backward: who computes the gradients of a case, and what they must be.

Timed is what follows the forward: from q, k, v, the output, its LSE and its gradient to those of q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .contenders import Error, Inputs, reference
from .features import DROPOUT, Feature

Call = Callable[[int], tuple[Tensor, ...]]
CHUNK = 1024
"""Queries whose dense scores are computed at once."""


def arguments_of(case: Case, device: torch.device) -> dict[str, Any]:
    """What a call of ``attention`` says besides q, k, v and causal."""
    return {name: x for name, x in Feature(case, device).arguments.items() if name != "causal"}


def said_to_op(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The same as the op has it."""
    from cutlass_fmha.arguments.op_arguments import op_arguments

    return op_arguments(inputs.query, arguments_of(case, inputs.query.device))


def gradients_of(inputs: Inputs) -> Tensor:
    """Of the output, for all sets, whoever made it."""
    generator = torch.Generator(device=inputs.query.device).manual_seed(3)
    shape = (*inputs.query.shape[:-1], inputs.value.shape[-1])
    return torch.randn(shape, generator=generator, device=inputs.query.device, dtype=inputs.query.dtype)


def ours(case: Case, inputs: Inputs, row: str | None = None, deterministic: bool = False) -> Call:
    scale, causal = case.head_dim**-0.5, "bottom-right" if case.causal else "none"
    said = said_to_op(case, inputs)
    op = torch.ops.cutlass_fmha
    dout = gradients_of(inputs)
    found = [op.attend(*inputs[n], scale, causal, True, None, **said) for n in range(inputs.sets)]

    def call(number: int) -> tuple[Tensor, ...]:
        arguments = (dout[number], *inputs[number], *found[number], None, scale, causal)
        gradients: tuple[Tensor, ...] = op.attend_backward(*arguments, row=row, deterministic=deterministic, **said)[:3]
        return gradients

    return call


def row_of(case: Case, inputs: Inputs) -> str:
    """Name of the row that selection gives this problem."""
    from cutlass_fmha.dispatch import device as devices
    from cutlass_fmha.dispatch import gradients
    from cutlass_fmha.dispatch.describe import describe
    from cutlass_fmha.features import Features

    call = describe(inputs[0], "bottom-right" if case.causal else "none", Features(**said_to_op(case, inputs)))
    return gradients.choose(call.problem, devices.of_index(inputs.query.get_device())).row.name


def repeated(case: Case, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Keys and values for torch's kernels, whose gradients know no shared heads; before what is timed."""
    return tuple(x.repeat_interleave(case.num_heads // case.num_heads_kv, -2) for x in tensors)


def summed(case: Case, *tensors: Tensor) -> tuple[Tensor, ...]:
    """And theirs back to the heads that there are, which is timed: who has shared heads has to."""
    if case.num_heads == case.num_heads_kv:
        return tensors
    return tuple(x.unflatten(-2, (case.num_heads_kv, -1)).sum(-2) for x in tensors)


def flash(case: Case, inputs: Inputs) -> Call:
    """FlashAttention-2's, which torch has; with dropout, by numbers of its own."""
    ends = arguments_of(case, inputs.query.device).get("cu_seqlens_q")
    p = DROPOUT if case.feature == "dropout" else 0.0
    sizes = (ends, ends, case.seqlen_q, case.seqlen_k, p, case.causal)
    dout = gradients_of(inputs)
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    kept = []
    for number in range(inputs.sets):
        query, *shared = inputs[number]
        tensors = (query, *repeated(case, *shared))
        output, lse, seed, offset, _ = forward(*tensors, *sizes, False)
        kept.append((*tensors, output, lse, *sizes, seed, offset))

    def call(number: int) -> tuple[Tensor, ...]:
        dq, *shared = backward(dout[number], *kept[number])
        return dq, *summed(case, *shared)

    return call


def fused(case: Case, inputs: Inputs, name: str) -> Call:
    """By the ops beneath torch's SDPA, "efficient", which takes masks and biases, or "cudnn". What the forward leaves
    is found at the first call, where a refusal is told."""
    bias = _bias(case, inputs)
    dout = gradients_of(inputs).transpose(-3, -2)
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward")
    kept: list[tuple[Any, ...]] = []

    def keep(number: int) -> tuple[Any, ...]:
        query, *shared = inputs[number]
        tensors = tuple(x.transpose(1, 2) for x in (query, *repeated(case, *shared)))
        output, lse, *rest = forward(*tensors, bias, True, 0.0, case.causal)
        if name == "efficient":
            return *tensors, bias, output, lse, *rest, 0.0, [True, True, True, False], case.causal
        *ends, seed, offset, _ = rest
        return *tensors, output, lse, seed, offset, None, *ends, 0.0, case.causal

    def call(number: int) -> tuple[Tensor, ...]:
        if not kept:
            kept.extend(map(keep, range(inputs.sets)))
        dq, *shared = (x.transpose(1, 2) for x in backward(dout[number], *kept[number])[:3])
        return dq, *summed(case, *shared)

    return call


def _bias(case: Case, inputs: Inputs) -> Tensor | None:
    """A mask or a bias as torch's op has it: added, of all scores."""
    feature = Feature(case, inputs.query.device)
    bias: Tensor | None = feature.arguments.get("bias")
    if "mask" in case.feature:
        mask = feature.mask()
        bias = torch.zeros_like(mask, dtype=inputs.query.dtype).masked_fill(~mask, -math.inf)
    return None if bias is None else bias.expand(case.batch, case.num_heads, -1, -1)


class GradientCheck:
    """Compares the gradients of one case with dense fp64: of the last sequence and its last head of keys, or, as
    a feature is known of the first heads, its first two.

    The tolerance is twice the error that unfused math of the same dtype makes, plus two ulp of the largest.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.lengths, self.group = case.lengths, case.num_heads // case.num_heads_kv
        tensors = [*inputs[0], gradients_of(inputs)[0]]
        self.first = bool(case.feature)
        count = min(2, case.num_heads_kv) if self.first else 1
        heads = (count * self.group, count, count, count * self.group)
        q, k, v, dout = (self._own(x, n) for x, n in zip(tensors, heads, strict=True))
        feature = Feature(case, q.device) if case.feature else None
        self.truth = dense(q, k, v, dout, case.causal, None, feature)
        self.tolerance = []
        unfused = dense(q, k, v, dout, case.causal, q.dtype, feature)
        for low, exact in zip(unfused, self.truth, strict=True):
            rounding = 2.0 * torch.finfo(q.dtype).eps * exact.abs().max().item()
            self.tolerance.append(2.0 * (low.double() - exact).abs().max().item() + rounding)

    def _own(self, x: Tensor, heads: int) -> Tensor:
        """[heads, seqlen, head_dim]"""
        own = x[-1] if x.dim() == 4 else x[-self.lengths[-1] :]
        return (own[:, :heads] if self.first else own[:, -heads:]).transpose(0, 1)

    def __call__(self, found: tuple[Tensor, ...]) -> Error:
        errors = []
        for x, exact, tolerance in zip(found, self.truth, self.tolerance, strict=True):
            difference = (self._own(x, exact.shape[0]).double() - exact).abs()
            errors.append(Error(difference.max().item(), tolerance, difference.mean().item()))
        return max(errors, key=lambda error: error.ratio if error.ratio == error.ratio else math.inf)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    causal: bool,
    rounded: torch.dtype | None,
    feature: Feature | None = None,
) -> tuple[Tensor, ...]:
    """dQ, dK and dV of heads that share keys, in fp64, or in fp32 with what must be rounded to a dtype.

    q, dout: [heads, seqlen_q, head_dim]; k, v: [1, seqlen_k, head_dim]. With a feature, autograd's, in that dtype, of
    any heads of keys.
    """
    if feature is not None:
        with torch.inference_mode(False), torch.enable_grad():  # the benchmark's mode, whose tensors are copied
            q, k, v = (x.transpose(0, 1)[None].clone().requires_grad_() for x in (q, k, v))
            out = reference(q, k, v, causal, torch.arange(q.shape[1], device=q.device), rounded is None, feature)
            found = torch.autograd.grad(out, (q, k, v), dout.transpose(0, 1)[None].to(out.dtype, copy=True))
        return tuple(x[0].transpose(0, 1).double() for x in found)
    dtype = torch.float64 if rounded is None else torch.float32

    def round_(x: Tensor) -> Tensor:
        return x if rounded is None else x.to(rounded).to(dtype)

    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    scale, dq = q.shape[-1] ** -0.5, torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    keys = torch.arange(k.shape[1], device=q.device)
    for begin in range(0, q.shape[1], CHUNK):
        rows = slice(begin, begin + CHUNK)
        scores = q[:, rows] @ k.transpose(1, 2) * scale
        if causal:
            queries = keys.new_tensor(range(begin, begin + scores.shape[1])) + k.shape[1] - q.shape[1]
            scores = scores.masked_fill(keys > queries[:, None], -math.inf)
        p = round_(scores.softmax(-1))
        term = (round_(p @ v) * dout[:, rows]).sum(-1, keepdim=True)
        ds = round_(p * (dout[:, rows] @ v.transpose(1, 2) - term))
        dq[:, rows] = ds @ k * scale
        dk += (ds.transpose(1, 2) @ q[:, rows]).sum(0, keepdim=True) * scale
        dv += (p.transpose(1, 2) @ dout[:, rows]).sum(0, keepdim=True)
    return round_(dq), round_(dk), round_(dv)
