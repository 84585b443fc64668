"""What the ops on rows share: tensors [..., dim] whose last dimension is contiguous."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.launch import workspace
from cutlass_fmha.ops import dispatcher

#: Leading dimensions that a launch knows strides of.
LEADING = 3

Strides = tuple[int, int, int]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """On the CPU: what an op computes tensors of a dtype in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(x: Tensor) -> Tensor:
    """The same with as many leading dimensions as a launch knows: a copy where more can't be viewed so."""
    return x if x.dim() <= LEADING + 1 else x.reshape(-1, x.shape[-1])


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Leading sizes, ones in front."""
    a, b, c = (1,) * (LEADING + 1 - x.dim()) + tuple(x.shape[:-1])
    return a, b, c


def strides(x: Tensor) -> Strides:
    """Of the leading dimensions."""
    a, b, c = (0,) * (LEADING + 1 - x.dim()) + x.stride()[:-1]
    return a, b, c


def check_rows(name: str, x: Tensor, most: int) -> None:
    """A tensor of at least one dimension, whose last has 1 to ``most`` elements."""
    check.check_tensor(name, x)
    if x.dim() < 1:
        raise ValueError(f"{name} must have at least one dimension, [..., dim], got a scalar")
    if not 1 <= x.shape[-1] <= most:
        raise ValueError(f"{name} must have rows of 1 to {most} elements, got shape {tuple(x.shape)}")
    if max(x.shape[:-1], default=0) > check.MAX_SEQLEN or math.prod(x.shape[:-1]) >= 2**31:
        raise ValueError(f"{name} must have fewer than 2**31 rows, got shape {tuple(x.shape)}")


def check_like(name: str, x: Tensor, first_name: str, first: Tensor) -> None:
    """A tensor of the first one's shape."""
    if x.shape != first.shape:
        raise ValueError(f"{name} must have {first_name}'s shape {tuple(first.shape)}, got {tuple(x.shape)}")


def differentiable(
    name: str,
    setup: Callable[[Any, Sequence[Any], Any], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
    with_gradient: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> None:
    """Tells autograd of an op that takes its arguments by position, the tensors first.

    ``with_gradient``: the arguments of a call that will be differentiated. ``setup``: (ctx, those, results).
    ``backward``: (ctx, gradients of the results) -> those of the tensors.
    """
    op = getattr(torch.ops.cutlass_fmha, name).default
    parameters = op._schema.arguments
    defaults = [each.default_value if each.has_default_value() else None for each in parameters]
    count = sum("Tensor" in str(each.type) for each in parameters)

    class Differentiable(dispatcher.Differentiable):
        @staticmethod
        def forward(keyset: Any, *given: Any) -> Any:
            return private_torch.after_autograd(op, keyset, *given)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.workspace = workspace.in_use(inputs[1].device)
            setup(ctx, inputs[1:], output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            none = (None,) * (len(parameters) - count)
            if all(each is None for each in gradients):
                return (None, *(None,) * count, *none)
            with workspace.inside(ctx.workspace):
                return (None, *backward(ctx, *gradients), *none)

    def autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        names = [each.name for each in parameters]
        given = [*args, *(kwargs.get(n, d) for n, d in list(zip(names, defaults, strict=True))[len(args) :])]
        inputs = given[:count]
        if not dispatcher.needs_gradient(*inputs):
            return private_torch.after_autograd(op, keyset, *given)
        dispatcher.check_reverse(keyset, *inputs)
        return Differentiable.apply(keyset, *with_gradient(given))  # type: ignore[no-untyped-call]

    dispatcher.register_gradients(name, autograd)
