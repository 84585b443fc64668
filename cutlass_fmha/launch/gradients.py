"""The way from tensors to a launch of a backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cutlass_fmha import _C
from cutlass_fmha.arguments import check
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import gradients
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.describe import Operands, describe
from cutlass_fmha.dispatch.problem import FULL_ALIGNMENT, Problem
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import NO_FEATURES, Features, Sizes
from cutlass_fmha.launch.helpers import address, strides
from cutlass_fmha.launch.params import addresses_of, params_of
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.launch.streams import current_stream

VECTOR = 8
"""Elements of a 16-byte copy: head dims that are no multiple are filled up with zeros."""


class Plan(NamedTuple):
    row: int
    params: _C.AttentionParams  # complete but for addresses, the scale and strides, and never written to
    workspace: int  # floats
    addresses: tuple[tuple[str, str], ...]


def launch(
    dout: Tensor,
    tensors: Operands,
    output: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    causal: str,
    said: Mapping[str, Any],
    row: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, new tensors of their shapes, on the current stream.

    ``said``: what ``Features`` are made of. ``row``: its name; None: chosen. Raises UnsupportedError, and
    ValueError for a name that no row has.
    """
    head_dims = [x.shape[-1] for x in tensors]
    q, k, v, output, dout = (_whole_vectors(x) for x in (*tensors, output, dout))
    plan: Plan = kept(
        "attend_backward",
        (q, k, v, causal, row, *said, *said.values()),
        lambda: _prepare((q, k, v), causal, said, row),
    )
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    # Rows that are no sequence's, or are not in use, are not written.
    new = torch.zeros_like if plan.addresses else torch.empty_like
    dq, dk, dv = (new(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    workspace = torch.empty(plan.workspace, dtype=torch.float32, device=q.device)
    params = _C.BackwardParams(
        plan.params.of_call(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr(), lse.data_ptr(), scale
        )
    )
    for name, field in plan.addresses:
        setattr(params, field, said[name].data_ptr())
    params.o_stride, params.dout_stride = strides(output), strides(dout)
    params.dq_stride, params.dk_stride, params.dv_stride = strides(dq), strides(dk), strides(dv)
    params.dout, params.dlse, params.workspace = dout.data_ptr(), address(dlse), workspace.data_ptr()
    params.dq, params.dk, params.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    index = q.get_device()
    _C.run(plan.row, params, max(index, 0), current_stream(index))
    found = zip((dq, dk, dv), head_dims, strict=True)
    dq, dk, dv = (x if x.shape[-1] == dim else x[..., :dim] for x, dim in found)
    return dq, dk, dv


def refusal(problem: Problem, index: int) -> str:
    """Why no kernel computes the gradients of a problem on CUDA device ``index``; empty where one does."""

    def ask() -> str:
        try:
            gradients.choose(problem, devices.of_index(index))
        except UnsupportedError as error:
            return f"cutlass_fmha has no backward yet here: {error}"
        return ""

    return kept("refusal of gradients", (problem, index), ask)


def _prepare(tensors: Operands, causal: str, said: Mapping[str, Any], name: str | None) -> Plan:
    features = Features(**said) if said else NO_FEATURES
    call = describe(tensors, causal, features)
    index = tensors[0].get_device()
    table = tables.backward()
    device = devices.of_index(index) if index >= 0 else devices.simulated(table.architectures)
    row = gradients.choose(call.problem, device, name)
    params = params_of(call.sizes, call.features, call.causal, call.strides)
    floats = _C.BackwardParams(_sized(params, call.sizes)).workspace_floats(row.tile_m, row.head_dim)
    return Plan(row.index, params, floats, addresses_of(features) if said else ())


def _sized(params: _C.AttentionParams, sizes: Sizes) -> _C.AttentionParams:
    """For the size of a workspace, packed sequences are such by the address of their lengths."""
    sized = params.copy()
    if sizes.total_q is not None:
        sized.cu_seqlens_q = 4
    return sized


def _whole_vectors(x: Tensor) -> Tensor:
    """A tensor that 16-byte copies can read: itself, or a copy."""
    if odd := x.shape[-1] % VECTOR:
        x = functional.pad(x, (0, VECTOR - odd))
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    bits = x.data_ptr()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        bits |= 0 if size == 1 else stride * x.element_size()
    if check.alignment(bits) == FULL_ALIGNMENT:
        return x
    return x.clone(memory_format=torch.contiguous_format)
