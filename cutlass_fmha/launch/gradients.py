"""The way from tensors to a launch of a backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.check_features import broadcast_strides
from cutlass_fmha.dispatch import decisions, gradients
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.describe import Operands, describe
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import FULL_ALIGNMENT, Problem
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import NO_FEATURES, Features, Sizes
from cutlass_fmha.launch.helpers import address, strides
from cutlass_fmha.launch.params import addresses_of, params_of
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.launch.streams import current_stream
from cutlass_fmha.launch.workspace import Scratch

VECTOR = 8
"""Elements of a 16-byte copy: head dims that are no multiple are filled up with zeros."""


class Plan(NamedTuple):
    row: int
    params: _C.AttentionParams  # complete but for addresses, the scale and strides, and never written to
    workspace: int  # floats
    addresses: tuple[tuple[str, str], ...]
    zeros: bool  # there is nothing to launch
    bias_shape: tuple[int, ...]  # of the sums that its gradient is made of; those of a broadcast one may be whole
    bias_stride: tuple[int, int, int, int]
    ordered: bool
    heads: int  # of keys whose dS is in memory at a time
    scores: int  # bytes of it


def launch(
    dout: Tensor,
    tensors: Operands,
    output: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    causal: str,
    said: Mapping[str, Any],
    wanted: tuple[bool, ...],
    row: str | None = None,
    device: Device | None = None,
    into: tuple[Tensor | None, ...] = (None,) * 5,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bias and sinks, on the current stream: new tensors, or ``into``.

    ``said``: what ``Features`` are made of. ``wanted``: which of the gradients; another one is empty.
    ``row``: its name; None: chosen. ``device``: that which meta tensors stand for, of which all is done but
    the launch. Raises UnsupportedError, and ValueError for a name that no row has.
    """
    with Scratch(tensors[0].device) as scratch:
        head_dims = [x.shape[-1] for x in tensors]
        q, k, v, output, dout = (_whole_vectors(x, scratch) for x in (*tensors, output, dout))
        plan: Plan = kept(
            "attend_backward",
            (q, k, v, causal, row, wanted, device, workspace_cap(said), *said, *said.values()),
            lambda: _prepare((q, k, v), causal, said, wanted, row, device),
        )
        lse = lse if lse.is_contiguous() else scratch.copy(lse)
        if dlse is not None and not (dlse.dtype == torch.float32 and dlse.is_contiguous()):
            dlse = scratch.copy(dlse, torch.float32)
        new = torch.zeros_like if plan.zeros else torch.empty_like
        found = [
            q.new_empty(0)
            if not need
            else new(x, memory_format=torch.contiguous_format)
            if to is None
            else _room(x, to, scratch, plan.zeros)
            for x, need, to in zip((q, k, v), wanted[:3], into[:3], strict=True)
        ]
        # Added to, or of heads without queries.
        bias, sinks = (
            _zeros(x.shape if shape is None else shape, x, scratch, to) if need and x is not None else q.new_empty(0)
            for x, shape, need, to in zip(
                (said.get("bias"), said.get("sinks")), (plan.bias_shape, None), wanted[3:], into[3:], strict=True
            )
        )
        workspace = scratch.empty((plan.workspace,), torch.float32)
        params = _C.BackwardParams(
            plan.params.of_call(q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr(), lse.data_ptr(), scale)
        )
        for name, field in plan.addresses:
            setattr(params, field, said[name].data_ptr())
        params.o_stride, params.dout_stride = strides(output), strides(dout)
        _add_results(params, found, bias, sinks, plan.bias_stride)
        if plan.heads:
            scores = scratch.empty((plan.scores // 4,), torch.float32)
            params.scores, params.scores_turn = scores.data_ptr(), plan.heads
        params.ordered = plan.ordered
        params.dout, params.dlse, params.workspace = dout.data_ptr(), address(dlse), workspace.data_ptr()
        scratch.check()
        if not q.is_meta:
            index = q.get_device()
            _C.run(plan.row, params, max(index, 0), current_stream(index))
        dq, dk, dv = (
            x if x.dim() == 1 or x.shape[-1] == dim else x[..., :dim] for x, dim in zip(found, head_dims, strict=True)
        )
        if wanted[3] and "bias" in said:
            bias = _summed(bias, said["bias"].shape)
            bias = bias.to(said["bias"].dtype) if into[3] is None else bias
        results = (dq, dk, dv, bias, sinks)
        for x, to in zip(results, into, strict=True):
            if to is not None and x.numel() and x.data_ptr() != to.data_ptr():
                to.copy_(x)
        return results


def _add_results(
    params: _C.BackwardParams,
    found: Sequence[Tensor],
    bias: Tensor,
    sinks: Tensor,
    bias_stride: tuple[int, int, int, int],
) -> None:
    """Where gradients are written: none of what is empty."""
    for name, x in zip(("dq", "dk", "dv"), found, strict=True):
        if x.numel():
            setattr(params, name, x.data_ptr())
            setattr(params, f"{name}_stride", strides(x))
    if bias.numel():
        params.dbias, params.dbias_stride = bias.data_ptr(), bias_stride
    if sinks.numel():
        params.dsinks = sinks.data_ptr()


def workspace_cap(said: Mapping[str, Any]) -> int:
    """Bytes that a call may have of dS in memory."""
    most: int | None = said.get("deterministic_workspace")
    return gradients.deterministic_workspace() if most is None else most


def _room(x: Tensor, to: Tensor, scratch: Scratch, zero: bool) -> Tensor:
    """Where the gradient of ``x`` is written: what is given, unless its rows end within a vector."""
    found = to if to.shape == x.shape else scratch.empty(x.shape, x.dtype)
    return found.zero_() if zero else found


def _zeros(shape: tuple[int, ...], x: Tensor, scratch: Scratch, to: Tensor | None) -> Tensor:
    """Where the gradient of ``x`` is summed, in float32: itself, or what it is rounded or summed from, of ``shape``."""
    if x.dtype == torch.float32 and x.shape == shape:
        return torch.zeros_like(x, memory_format=torch.contiguous_format) if to is None else to.zero_()
    return scratch.empty(shape, torch.float32).zero_()


def _summed(whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a tensor that was broadcast from ``shape`` has for a gradient, in an order that torch keeps to."""
    return whole if whole.shape == shape else whole.sum_to_size(shape)


def empty_like(x: Tensor) -> Tensor:
    """A tensor that lies as the gradient of ``x`` that ``launch`` makes: rows end with whole vectors."""
    head_dim = x.shape[-1]
    return x.new_empty((*x.shape[:-1], head_dim + -head_dim % VECTOR)).narrow(-1, 0, head_dim)


def refusal(problem: Problem, index: int) -> str:
    """Why no kernel computes the gradients of a problem on CUDA device ``index``; empty where one does."""

    def ask() -> str:
        try:
            gradients.choose(problem, devices.of_index(index))
        except UnsupportedError as error:
            return f"cutlass_fmha has no backward yet here: {error}"
        return ""

    # While a graph is traced, sizes may be symbols, which are compared but not hashed.
    symbolic = any(isinstance(size, torch.SymInt) for size in vars(problem).values())
    return ask() if symbolic else kept("refusal of gradients", (problem, index), ask)


def _prepare(
    tensors: Operands,
    causal: str,
    said: Mapping[str, Any],
    wanted: tuple[bool, ...],
    name: str | None,
    device: Device | None,
) -> Plan:
    features = Features(**said) if said else NO_FEATURES
    call = describe(tensors, causal, features)
    index = tensors[0].get_device()
    if device is None:
        built = tables.backward().architectures
        device = devices.of_index(index) if index >= 0 else devices.simulated(built)
    # What nobody wants of q is summed in no order.
    ordered = features.deterministic and wanted[0]
    problem = replace(call.problem, bias_gradient=wanted[3] and features.bias is not None)
    route = gradients.choose(problem, device, name, ordered, workspace_cap(said))
    row = route.row
    decisions.decision_of_gradients(problem, device, route, name is not None)
    bias_shape: tuple[int, ...] = (0,)
    if problem.bias_gradient and features.bias is not None:
        whole = (call.sizes.batch, call.sizes.num_heads, call.sizes.seqlen_q, call.sizes.seqlen_k)
        bias_shape = gradients.bias_sums(tuple(features.bias.shape), whole, features.deterministic, workspace_cap(said))
    bias = broadcast_strides(torch.empty(bias_shape, device="meta"), call.sizes)
    params = _C.BackwardParams(_sized(params_of(call.sizes, call.features, call.causal, call.strides), call.sizes))
    # A wide row sums dQ in registers, in a fixed order.
    sums = row.family != "backward_wide" and not gradients.writes_scores(row)
    params.ordered, params.dsinks = sums and features.deterministic and row.scored, 4 * wanted[4]
    if row.family == "backward_wide":
        params.block_m = 0  # it reads the lists as they are, without a transpose
    floats = params.workspace_floats(row.tile_m, row.tile_n, row.head_dim * sums)
    plan = params_of(call.sizes, call.features, call.causal, call.strides)
    addresses = addresses_of(features) if said else ()
    return Plan(
        row.index,
        plan,
        floats,
        addresses,
        0 in (call.sizes.batch, call.sizes.num_heads) or params.seqlen_q == params.seqlen_k == 0,
        bias_shape,
        bias,
        params.ordered,
        route.heads,
        route.scores,
    )


def _sized(params: _C.AttentionParams, sizes: Sizes) -> _C.AttentionParams:
    """For the size of a workspace, packed sequences are such by the address of their lengths."""
    sized = params.copy()
    if sizes.total_q is not None:
        sized.cu_seqlens_q = 4
    return sized


def _whole_vectors(x: Tensor, scratch: Scratch) -> Tensor:
    """A tensor that 16-byte copies can read: itself, or a copy."""
    head_dim = x.shape[-1]
    if odd := head_dim % VECTOR:
        copy = scratch.empty((*x.shape[:-1], head_dim + VECTOR - odd), x.dtype)
        copy[..., :head_dim] = x
        copy[..., head_dim:] = 0
        return copy
    if head_dim > 1 and x.stride(-1) != 1:
        return scratch.copy(x)
    bits = x.data_ptr()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        bits |= 0 if size == 1 else stride * x.element_size()
    if check.alignment(bits) == FULL_ALIGNMENT:
        return x
    return scratch.copy(x)
