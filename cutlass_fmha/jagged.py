"""Jagged tensors (``torch.nested``, ``layout=torch.jagged``) as the packed sequences that they are.

Their values are packed rows already, their offsets say where the sequences begin: nothing is copied but the
offsets, as int32. The host reads no length of them: the longest is what a tensor keeps of itself, if it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from cutlass_fmha import private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.dispatch.describe import Names

_AXES = {1: "[batch, seqlen, num_heads, head_dim]", 2: "[batch, num_heads, seqlen, head_dim]"}


class Packed(NamedTuple):
    """A call of jagged tensors as one of packed sequences, in the layout "bshd"."""

    tensors: tuple[Tensor, Tensor, Tensor]
    arguments: Mapping[str, Any]
    query: Any
    #: Where a sequence's rows stand among the call's own dimensions.
    axis: int

    def as_given(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Results as query is: jagged with its offsets, or with a batch dimension, in the call's layout."""
        if not is_jagged(self.query):
            return (out if self.axis == 1 else out.transpose(1, 2)), lse
        if self.query.lengths() is not None:  # what lies around the sequences must not reach a gradient
            nobody = _rows_of_nobody(self.query, out.shape[0])
            out = out.masked_fill(nobody[:, None, None], 0.0)
            lse = None if lse is None else lse.masked_fill(nobody, float("-inf"))
        rows = out if self.axis == 1 else out.transpose(0, 1)
        return _like(self.query, rows, self.axis), None if lse is None else _like(self.query, lse, 2)


def is_jagged(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.jagged


def pack(tensors: tuple[Tensor, Tensor, Tensor], layout: str, names: Names, arguments: Mapping[str, Any]) -> Packed:
    """What ``attention`` is to be called with. ``arguments`` are the op's; query or key is jagged.

    Raises TypeError or ValueError where jagged tensors don't go together; what else is wrong is found later.
    """
    axis = check.LAYOUTS[layout][1]
    batch = tensors[0].shape[0] if isinstance(tensors[0], Tensor) and tensors[0].dim() else None
    for name, x in zip(names, tensors, strict=True):
        if not isinstance(x, Tensor) or x.layout is torch.strided:
            check.check_tensor(name, x)
        elif not (is_jagged(x) and x.dim() == 4 and private_torch.ragged_axis(x) == axis):
            raise ValueError(
                f"{name} must be a jagged tensor {_AXES[axis]} whose seqlen is jagged, got shape {tuple(x.shape)}"
            )
        elif x.shape[0] != batch:
            raise ValueError(f"{name} must have {names[0]}'s batch size {batch}, got {x.shape[0]}")
    jagged: tuple[Any, Any, Any] = tensors
    q, k, v = jagged
    if is_jagged(k) is not is_jagged(v) or (is_jagged(k) and not _same_sequences(k, v)):
        raise ValueError(
            f"{names[2]} must have {names[1]}'s sequences: make it with "
            f"torch.nested.nested_tensor_from_jagged(values, {names[1]}.offsets())"
        )
    for name in RESULTS:
        if name in arguments:
            raise ValueError(f"{name} is not taken with jagged tensors: pass their values() and cu_seqlens")
    said = dict(arguments)
    begin: dict[str, Tensor] = {}
    for side, x in (("q", q), ("k", k)):
        if not is_jagged(x):
            continue
        same = bool(begin) and x.offsets() is q.offsets()
        begin[f"cu_seqlens_{side}"] = begin["cu_seqlens_q"] if same else _int32(x.offsets())
        longest = private_torch.bounds_of_jagged(x)[1]
        if x.lengths() is not None:
            begin[f"seqused_{side}"], longest = _int32(x.lengths()), None  # that is the longest in use
        if longest is not None:
            said.setdefault(f"max_seqlen_{side}", longest)
    for name in begin:
        if name in arguments:
            raise ValueError(f"{name} is not taken with jagged tensors, which say it themselves")
    return Packed((_rows(q, axis), _rows(k, axis), _rows(v, axis)), said | begin, q, axis)


def contiguous_rows(x: Any) -> Tensor:
    """A copy whose last dimension is contiguous."""
    return _like(x, x.values().clone(memory_format=torch.contiguous_format), private_torch.ragged_axis(x))


def refuse_leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> NoReturn:
    """Of ``scaled_dot_product_attention``, which broadcasts what is not jagged."""
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    hint = "" if enable_gqa else " (enable_gqa=True lets key and value have fewer heads)"
    raise ValueError(
        f"query, key and value must have the same batch size and heads where one is jagged, {_AXES[2]}, "
        f"got shapes {shapes}{hint}"
    )


def _rows(x: Any, axis: int) -> Any:
    """[total tokens, num_heads, head_dim] of a jagged tensor; another one in the layout "bshd"."""
    if is_jagged(x):
        rows = x.values()
        return rows if axis == 1 else rows.transpose(0, 1)
    return x if axis == 1 else x.transpose(1, 2)


def _int32(numbers: Tensor) -> Tensor:
    return numbers.to(torch.int32).contiguous()


def _like(query: Any, rows: Tensor, axis: int | None) -> Tensor:
    bounds = private_torch.bounds_of_jagged(query)
    found: Tensor = private_torch.jagged_view(rows, query.offsets(), query.lengths(), axis, bounds)
    return found


def _rows_of_nobody(query: Any, total: int) -> Any:
    """bool [total]: the rows before the first sequence and behind the last one."""
    rows, offsets = torch.arange(total, device=query.device), query.offsets()
    return (rows < offsets[0]) | (rows >= offsets[-1])


def _same_sequences(one: Any, other: Any) -> bool:
    """Whether the offsets agree, as far as the host may know: numbers on a GPU are taken to."""
    pairs = ((one.offsets(), other.offsets()), (one.lengths(), other.lengths()))
    for own, others in pairs:
        if own is others:
            continue
        if own is None or others is None:
            return False
        known = type(own) is Tensor and own.is_cpu and others.is_cpu and not torch.compiler.is_compiling()
        if own.shape != others.shape or (known and not torch.equal(own, others)):
            return False
    bounds = zip(private_torch.bounds_of_jagged(one), private_torch.bounds_of_jagged(other), strict=True)
    return all(own is None or others is None or own == others for own, others in bounds)
