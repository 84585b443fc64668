"""What the ops beside attention ask of their tensors: one sentence each."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.check import CPU_DTYPES, CUDA_DTYPES


def vector_of(name: str, value: Any, batch: int, device: torch.device) -> Tensor:
    """A number for each sequence: the tensor, or an int32 one of the int."""
    if isinstance(value, Tensor):
        return value
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int32 tensor [batch] or an int, got {type(value).__name__}")
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"{name} must fit in 32 bits, got {number}")
    vector: Tensor = torch.full((batch,), number, dtype=torch.int32, device=device)
    return vector


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
