"""Attention of q, k and v that are parts of one tensor, and gradients where there is room for them.

Autograd would have each part's gradient in a tensor of its own, and copy all of them into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import autocast, private_torch
from cutlass_fmha.arguments import results
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.call import call_attention
from cutlass_fmha.launch import workspace
from cutlass_fmha.ops import attend_backward, dispatcher

#: Where gradients of query, key and value are written; None: nobody wants it.
Room = Sequence[Tensor | None]


def write_gradients(
    room: Room,
    dout: Tensor,
    tensors: Sequence[Tensor],
    output: Tensor,
    lse: Tensor,
    scale: float,
    causal: str,
    said: Mapping[str, Any],
    new: bool = False,
) -> None:
    """Those of a call of ``attend``, with autograd off; without a copy where ``room`` is as kernels write it.

    ``new``: nothing else lies there, and it is no tensor's twice.
    """
    wanted = (*(x is not None for x in room), False, False)
    q, k, v = tensors
    given: tuple[Any, ...] = (dout, q, k, v, output, lse, None, scale, causal)
    inputs = [x for x in (*given, *said.values()) if isinstance(x, Tensor)]
    by_kernels = _is_plain(*inputs, *room) and (tensors[0].is_cuda or dispatcher.simulated()) and _fits(room, tensors)
    if by_kernels and (new or results.are_apart([x for x in room if x is not None], inputs)):
        into = (*room, None, None)
        attend_backward.launch(dout, q, k, v, output, lse, None, scale, causal, wanted, into=into, **said)
        return
    found = torch.ops.cutlass_fmha.attend_backward(*given, **said, wanted=wanted)
    for to, gradient in zip(room, found[:3], strict=True):
        if to is not None:
            to.copy_(gradient)


def _fits(room: Room, tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can write to it: whatever doesn't fit is copied to, or refused, as torch does."""

    def fits(to: Tensor, x: Tensor) -> bool:
        same = to.shape == x.shape and to.dtype == x.dtype and to.device == x.device
        steps = (to.data_ptr(), *(n * to.element_size() for n in to.stride()[:-1]))
        return same and to.stride(-1) == 1 and all(step % 16 == 0 for step in steps)

    return all(to is None or fits(to, x) for to, x in zip(room, tensors, strict=True))


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are nothing but memory, and nothing has a say in what is done with them."""
    return (
        not torch.compiler.is_compiling()
        and all(x is None or (type(x) is Tensor and not x.is_neg()) for x in tensors)
        and not dispatcher.anything_changes()
    )


def attend_parts(
    packed: Tensor,
    dim: int,
    query: Tensor | None,
    scale: float | None,
    causal: str,
    features: Mapping[str, Any],
) -> Tensor | None:
    """Attention of the parts of ``packed`` along ``dim``: q, k and v, or with ``query`` k and v.

    With a gradient, and nothing else that needs more than a call of a kernel and one of its backward; None elsewhere.
    """
    differentiable = [x for x in (packed, query) if x is not None]
    others = [x for x in features.values() if isinstance(x, Tensor)]
    if not (
        torch.is_grad_enabled()
        and _is_plain(*differentiable, *others)
        and packed.requires_grad
        and not any(x.requires_grad for x in others)
        and all(x.stride(-1) == 1 for x in differentiable)
    ):
        return None
    casts = private_torch.any_autocast_enabled()
    if casts and any(autocast.dtype_of(x) not in (None, x.dtype) for x in differentiable):
        return None
    with torch.no_grad():
        tensors = parts_of(packed, dim, query)
    said = op_arguments(tensors[0], features, "q")
    if attend_backward.refusal(*tensors, causal, said):
        return None  # whose sentence is the usual call's
    number = float(tensors[0].shape[-1]) ** -0.5 if scale is None else scale
    found: Tensor = _Parts.apply(packed, query, dim, number, causal, said)  # type: ignore[no-untyped-call]
    return found


def parts_of(packed: Tensor, dim: int, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if query is None:
        q, k, v = packed.unbind(dim)
        return q, k, v
    return query, *packed.unbind(dim)  # type: ignore[return-value]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, query: Tensor | None, dim: int, scale: float, causal: str, said: dict[str, Any]
    ) -> Tensor:
        names = ("q", "k", "v")
        out, lse = call_attention(*parts_of(packed, dim, query), scale, causal, True, "bshd", None, names, said)
        ctx.save_for_backward(packed, query, out, lse, *dispatcher.tensors_of(said).values())
        ctx.dim, ctx.scale, ctx.causal = dim, scale, causal
        attend_backward.keep_features(ctx, said, packed.device)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        packed, query, out, lse, *given = ctx.saved_tensors
        said = {**ctx.said, **dict(zip(ctx.names, given, strict=True))}
        dout, tensors = dispatcher.rows_of_gradient(dout), parts_of(packed, ctx.dim, query)
        if torch.is_grad_enabled():  # the op says that it has no gradient of its own
            all_of = torch.ops.cutlass_fmha.attend_backward
            *dquery, dk, dv = all_of(dout, *tensors, out, lse, None, ctx.scale, ctx.causal, **said)[:3]
            parts, dquery = ((*dquery, dk, dv), [None]) if query is None else ((dk, dv), dquery)
            return torch.stack(parts, ctx.dim), *dquery, None, None, None, None
        dpacked = torch.empty_like(packed, memory_format=torch.contiguous_format)
        dquery = None
        if query is not None and ctx.needs_input_grad[1]:
            dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
        room = dpacked.unbind(ctx.dim)
        room = room if query is None else (dquery, *room)
        with workspace.inside(ctx.workspace):
            write_gradients(room, dout, tensors, out, lse, ctx.scale, ctx.causal, said, new=True)
        return dpacked, dquery, None, None, None, None
