"""The way from tensors to the kernels beside attention: which one runs, where; what their ops share."""

from __future__ import annotations

import functools
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast, ops, private_torch, select
from cutlass_fmha import device as devices
from cutlass_fmha.arguments import check
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.streams import current_stream

CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (*CUDA_DTYPES, torch.float64)

# The ops beside ``forward`` and ``attend``; it must live as long as its registrations.
_library = torch.library.Library("cutlass_fmha", "FRAGMENT")


def register(
    schema: str, implementations: Mapping[str, Callable[..., Any]], casts: autocast.Rule = autocast.as_it_is
) -> None:
    """Defines an op. ``implementations``: for "CUDA", "CPU" and "fake"; ``casts``: autocast's rule."""
    name = schema.partition("(")[0]
    # Inductor must not hand over another layout than the traced one: last dimensions have to stay contiguous.
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    ops.refuse_elsewhere(name)
    for key, implementation in implementations.items():
        if key == "fake":
            torch.library.register_fake(f"cutlass_fmha::{name}", implementation, lib=_library)
        else:
            _library.impl(name, implementation, key)
    _library.impl(name, functools.partial(_refuse_gradients, name), "Autograd", with_keyset=True)
    autocast.register(_library, name, casts)


def register_writes(name: str, implementation: Callable[..., Any]) -> None:
    """What an op that writes to its arguments does besides, called with the keyset first."""
    _library.impl(name, implementation, "ADInplaceOrView", with_keyset=True)


def _refuse_gradients(name: str, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Nothing here has a backward: a call whose gradient would silently be missing raises."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if ops.needs_gradient(*given):
        raise NotImplementedError(ops.NO_BACKWARD)
    return private_torch.after_autograd(
        getattr(torch.ops.cutlass_fmha, name).default, keyset, *args, **kwargs
    )


def simulated() -> bool:
    """Whether kernels run on CPU tensors: in a build for tools/simulator that was told to."""
    return os.environ.get(ops.SIMULATE) == "1" and bool(_C.build_info().get("simulator"))


Params = TypeVar("Params", _C.CombineParams, _C.MergeParams, _C.RotaryParams, _C.AppendParams)


class Helper(NamedTuple, Generic[Params]):
    """A plan of a kernel beside attention."""

    row: int
    device_index: int
    params: Params  # complete but for addresses, and never written to


def launch(plan: Helper[Params], params: Params) -> None:
    """Runs it on the current stream of its device. ``params``: a copy with the addresses of a call."""
    _C.run(plan.row, params, max(plan.device_index, 0), current_stream(plan.device_index))


def helper(family: str, params: Params, tensor: Tensor) -> Helper[Params]:
    """The family's kernel for this tensor's dtype and device."""
    index, dtype = tensor.get_device(), check.dtype_name(tensor.dtype)
    arch = _arch(index)
    for row in _C.helpers():
        if (row.family, row.dtype, row.arch) == (family, dtype, arch):
            return Helper(row.index, index, params)
    raise ValueError(f"this build has no kernel of family {family} for {dtype} on sm_{arch}")


def _arch(index: int) -> int:
    """The architecture whose kernels a device takes; -1: the simulator."""
    compiled_for = dict(select.this_build().compiled_for)
    built = {row.arch: compiled_for.get(row.arch, str(row.arch)) for row in _C.helpers()}
    if not built:
        raise UnsupportedError(select.NO_KERNELS)
    device = devices.of_index(index) if index >= 0 else devices.simulated(built)
    arch = devices.rows_arch(device, built)
    if arch is None or not devices.can_execute(built[arch], device.capability):
        names = ", ".join(f"sm_{each}" for each in sorted(built))
        raise UnsupportedError(f"this build has kernels for {names}, and none of them runs on {device}")
    return arch


def vector_of(name: str, value: Any, like: Tensor) -> Tensor:
    """A number for each sequence of ``like``, [batch, ...]: the tensor, or an int32 one of the int."""
    if isinstance(value, Tensor):
        return value
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int32 tensor [batch] or an int, got {type(value).__name__}")
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"{name} must fit in 32 bits, got {number}")
    vector: Tensor = torch.full((like.shape[0],), number, dtype=torch.int32, device=like.device)
    return vector


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, head) strides of [batch, seqlen, heads, head_dim], or packed rows without a batch."""
    batch, seqlen, head = tensor.stride()[:3] if tensor.dim() == 4 else (0, *tensor.stride()[:2])
    return batch, seqlen, head


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# ---- checks ------------------------------------------------------------------------------------------------


def check_alike(tensors: Mapping[str, Tensor]) -> None:
    """Tensors of one dtype that kernels exist for and of one device, each with contiguous rows."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{name} must have {first_name}'s dtype {check.dtype_name(first.dtype)}, "
                f"got {check.dtype_name(tensor.dtype)}"
            )
    check_device(first_name, first, tensors)
    allowed = CUDA_DTYPES if first.device.type == "cuda" else CPU_DTYPES
    if first.dtype not in allowed:
        raise ValueError(
            f"{first_name} must be {' or '.join(map(check.dtype_name, allowed))} on {first.device.type}, "
            f"got {check.dtype_name(first.dtype)}"
        )
    for name, tensor in tensors.items():
        check_rows(name, tensor)


def check_device(first_name: str, first: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name} must be on {first_name}'s device {first.device}, got {tensor.device}")


def check_rows(name: str, tensor: Tensor) -> None:
    """A last dimension that is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got a stride of {tensor.stride(-1)} there: "
            f"pass {name}.contiguous()"
        )


def check_dims(name: str, tensor: Tensor, axes: str) -> None:
    """A tensor of as many dimensions as ``axes`` names, separated by commas."""
    check.check_tensor(name, tensor)
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(
            f"{name} must have {axes.count(',') + 1} dimensions, [{axes}], got shape {tuple(tensor.shape)}"
        )


def check_vectors(vectors: Mapping[str, Tensor | None], batch: int) -> None:
    """int32 [batch], contiguous: a number for each sequence, which only the device reads."""
    for name, vector in vectors.items():
        if vector is None:
            continue
        check.check_tensor(name, vector)
        if vector.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {check.dtype_name(vector.dtype)}")
        if vector.shape != (batch,):
            raise ValueError(f"{name} must have shape ({batch},), got {tuple(vector.shape)}")
        if vector.stride(0) != 1 and batch > 1:
            raise ValueError(f"{name} must be contiguous: pass {name}.contiguous()")
