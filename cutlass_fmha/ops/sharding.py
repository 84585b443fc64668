"""The ops on DTensors, sharded over batch and heads: each device computes its own, nothing is sent meanwhile.

Query decides, for each dimension of the device mesh. Where it is sharded over its batch or its heads, so is
all that has such an axis. Otherwise everything is whole: a sequence is never divided. What lies elsewise is
sent to where it should be, and a tensor that is no DTensor is taken to be the same on all devices, but for
dropout's seed, which each may have drawn for itself: the first device's is sent to all.

Imported by ``attention`` when it meets a DTensor; who calls the ops by themselves imports this module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from cutlass_fmha.ops import dispatcher

#: How a mesh dimension divides a call.
WHOLE, BATCH, HEADS = "whole", "batch", "heads"

#: The axes of batch and of heads, of tensors with a batch dimension and of packed ones, from the last one.
_AXES: Mapping[str, tuple[dict[str, int], dict[str, int]]] = {
    **dict.fromkeys(("query", "key", "value", "output", "dout"), ({BATCH: -4, HEADS: -2}, {HEADS: -2})),
    **dict.fromkeys(("softmax_lse", "dlse"), ({BATCH: -3, HEADS: -2}, {HEADS: -2})),
    **dict.fromkeys(("mask", "bias"), ({BATCH: -4, HEADS: -3},) * 2),
    "block_indices": ({BATCH: -4, HEADS: -3},) * 2,
    "block_counts": ({BATCH: -3, HEADS: -2},) * 2,
    "alibi_slopes": ({BATCH: -2, HEADS: -1},) * 2,
    "sinks": ({HEADS: -1},) * 2,
    **dict.fromkeys(("prefix_lengths", "seqused_q", "seqused_k", "leftpad_k"), ({BATCH: -1},) * 2),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ({}, {})),
}


class _Shards:
    """Where the tensors of a call lie."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        query, key = given["query"], given["key"]
        self.mesh: DeviceMesh = next(x.device_mesh for x in given.values() if isinstance(x, DTensor))
        self.packed = query.dim() == 3
        self.kinds = self._kinds(query, key.shape[-2])
        placements = query.placements if isinstance(query, DTensor) else ()
        if given.get("dropout_p") and any(isinstance(x, Shard) for x in placements):
            raise NotImplementedError(
                "dropout_p would not drop what one device drops where query is sharded: redistribute it to Replicate()"
            )
        if self.divided:
            self._refuse(given)

    @property
    def divided(self) -> bool:
        return any(kind != WHOLE for kind in self.kinds)

    def _kinds(self, query: Tensor, heads_kv: int) -> list[str]:
        if not isinstance(query, DTensor):
            return [WHOLE] * self.mesh.ndim
        axes = {axis + query.dim(): kind for kind, axis in _AXES["query"][self.packed].items()}
        kinds = [axes.get(x.dim, WHOLE) if isinstance(x, Shard) else WHOLE for x in query.placements]
        parts = {
            kind: math.prod(self.mesh.size(n) for n, each in enumerate(kinds) if each == kind)
            for kind in (BATCH, HEADS)
        }
        fits = {
            # A key's head goes where its queries' are, whole; one that all of them share goes everywhere.
            HEADS: heads_kv % parts[HEADS] == 0 or heads_kv == 1,
            BATCH: query.shape[0] % parts[BATCH] == 0,
            WHOLE: True,
        }
        return [kind if fits[kind] else WHOLE for kind in kinds]

    def _refuse(self, given: Mapping[str, Any]) -> None:
        where = "where query is sharded over batch or heads: redistribute it to Replicate()"
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in _AXES:
                raise NotImplementedError(f"{name} has no shards {where}")

    def of(self, name: str, shape: Sequence[int]) -> list[Placement]:
        """The placements of a tensor of a call, by its global shape."""
        axes = _AXES[name][self.packed] if self.divided else {}

        def place(kind: str) -> Placement:
            axis = len(shape) + axes.get(kind, -len(shape) - 1)
            return Shard(axis) if axis >= 0 and shape[axis] > 1 else Replicate()

        return [place(kind) for kind in self.kinds]

    def of_gradient(self, name: str, shape: Sequence[int]) -> list[Placement]:
        """Of its gradient: devices that share a tensor add what each has of it."""
        return [
            Partial() if kind != WHOLE and isinstance(placement, Replicate) else placement
            for kind, placement in zip(self.kinds, self.of(name, shape), strict=True)
        ]

    def local(self, name: str, value: Any) -> Any:
        """This device's part of an argument."""
        if not isinstance(value, Tensor):
            return value
        if name == "dropout_seed" and not isinstance(value, DTensor):  # a copy, as the broadcast writes to it
            value = distribute_tensor(value.clone(), self.mesh, [Replicate()] * self.mesh.ndim)
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        # Detached: below autograd, an older torch can't redistribute what requires a gradient.
        return value.detach().redistribute(self.mesh, self.of(name, value.shape)).to_local()

    def whole(self, local: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> DTensor:
        """The DTensor of a result, of whose devices this one has ``local``."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _attend(given: Mapping[str, Any], found: Sequence[Tensor], shards: _Shards) -> tuple[DTensor, DTensor]:
    """The results of ``forward`` and ``attend``."""
    query, value = given["query"], given["value"]
    shape = (*query.shape[:-1], value.shape[-1])
    *batch, seqlen, heads = shape[:-1]
    nothing = [Replicate()] * shards.mesh.ndim
    lse_shape, lse = ((*batch, heads, seqlen), "softmax_lse") if given["return_lse"] else ((0,), "")
    return (
        shards.whole(found[0], shape, shards.of("output", shape)),
        shards.whole(found[1], lse_shape, shards.of(lse, lse_shape) if lse else nothing),
    )


def _attend_backward(given: Mapping[str, Any], found: Sequence[Tensor], shards: _Shards) -> tuple[Tensor, ...]:
    """The results of ``attend_backward``: those that nobody wants are empty, and one of a tensor that is no DTensor is
    none either."""
    names = ("query", "key", "value", "bias", "sinks")
    wanted = given.get("wanted", (True, True, True, False, False))
    nothing = [Replicate()] * shards.mesh.ndim

    def whole(name: str, local: Tensor, want: bool) -> Tensor:
        if not want or given.get(name) is None:
            return shards.whole(local, local.shape, nothing)
        shape = given[name].shape
        gradient = shards.whole(local, shape, shards.of_gradient(name, shape))
        return gradient if isinstance(given[name], DTensor) else gradient.full_tensor()

    return tuple(map(whole, names, found, wanted))


def _rule(
    results: Any, cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> tuple[Tensor, ...]:
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    with torch.no_grad():
        shards = _Shards(given)
        local = {name: shards.local(name, value) for name, value in given.items()}
        split = len(args)
        found = func(*[local[name] for name in names[:split]], **{n: local[n] for n in kwargs or {}})
        wrapped: tuple[Tensor, ...] = results(given, found, shards)
        return wrapped


for _name, _results in (("forward", _attend), ("attend", _attend), ("attend_backward", _attend_backward)):
    torch.library.register_torch_dispatch(
        f"cutlass_fmha::{_name}", DTensor, functools.partial(_rule, _results), lib=dispatcher.library
    )
