"""Checks that the public functions and the op share, and what they learn of the tensors."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha.dispatch.problem import CAUSAL, FULL_ALIGNMENT

#: Where (batch, seqlen, heads) stand in a layout.
LAYOUTS = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1)}
_AXES = {"bshd": "[batch, seqlen, num_heads, head_dim]", "bhsd": "[batch, num_heads, seqlen, head_dim]"}

#: What the op calls its tensors, which is also what torch's SDPA does.
NAMES = ("query", "key", "value")

MAX_SEQLEN = 2**29  # so that i + diagonal fits 32 bits for all of them
PAGE_UNIT = 16  # keys: the kernels load runs of so many, which must not lie in two pages
MAX_SCALE = 2e38  # so that scale * log2(e) is a finite float
CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (*CUDA_DTYPES, torch.float64)


class Dimensions(NamedTuple):
    """The sizes of a problem."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int


def causal_name(causal: object) -> str:
    """The op's word for ``attention``'s ``causal``: False and None mean "none", True means "bottom-right"."""
    if causal is False or causal is None:
        return "none"
    if causal is True:
        return "bottom-right"
    if isinstance(causal, str) and causal in CAUSAL:
        return causal
    raise ValueError(f'causal must be False, True, "none", "top-left" or "bottom-right", got {shown(causal)}')


def shown(value: object) -> str:
    """A value as an error sentence shows it: what it is where that is short, otherwise its type alone.

    The contents of tensors and arrays are neither short nor, on a GPU, the host's to read.
    """
    if isinstance(value, (tuple, list)):
        inside = ", ".join(shown(each) for each in value[:4]) + (", ..." if len(value) > 4 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if value is None or isinstance(value, (str, int, float, torch.device, torch.dtype)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."
    return type(value).__name__


def number_of(name: str, value: Any, or_else: str = "") -> float:
    """``value`` as a float; a compiler's symbolic one stays symbolic."""
    number: float = value
    if type(value) is float or isinstance(value, torch.SymFloat):
        return number
    if not isinstance(value, (numbers.Real, torch.SymInt)):
        raise TypeError(f"{name} must be a float{or_else}, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:  # an int beyond all floats: the range check has a sentence for it
        return math.inf if number > 0 else -math.inf


def integer(name: str, value: Any, or_else: str = " or None") -> Any:
    """``value``, as an int; a compiler's symbolic one stays symbolic."""
    if type(value) is int or isinstance(value, torch.SymInt):  # asking the others takes longer
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int{or_else}, got {type(value).__name__}")
    return operator.index(value)  # NumPy's compare to a bool of NumPy's


def finite_scale(scale: Any) -> float:
    """``scale``, when it is a number that the kernels can take."""
    number = number_of("scale", scale, " or None")
    if not -MAX_SCALE <= number <= MAX_SCALE:
        raise ValueError(f"scale must be finite and of magnitude 2e38 at most, got {number}")
    return number


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def layout_name(layout: object) -> str:
    if isinstance(layout, str) and layout in LAYOUTS:
        return layout
    raise ValueError(f'layout must be "bshd" or "bhsd", got {shown(layout)}')


def row_name(row: object) -> None:
    if not isinstance(row, str):
        raise TypeError(f"row must be the name of a row or None, got {type(row).__name__}")


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def page_size(name: str, keys: int) -> None:
    """One rule for every backend, so that what runs on the CPU runs on a GPU."""
    if keys < 1 or keys % PAGE_UNIT != 0:
        raise ValueError(f"{name} must have pages of a multiple of {PAGE_UNIT} keys, got {keys}")


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise NotImplementedError(
            f"{name} is a nested tensor, which no kernel takes: pack the sequences, [total tokens, "
            f"num_heads, head_dim] ({name}.values() of a jagged one), and pass cu_seqlens_q and "
            "cu_seqlens_k; attention takes jagged q, k and v (layout=torch.jagged)"
        )
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{name} must be a dense tensor, got the layout {str(tensor.layout).removeprefix('torch.')}: "
            f"pass {name}.to_dense(), and a block_mask for keys that are to be left out"
        )


def check_tensors_given(tensors: Mapping[str, object], optional: Mapping[str, object] | None = None) -> None:
    """Tensors that there must be, and those that may be None, by name."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    for name, tensor in (optional or {}).items():
        if tensor is not None:
            check_optional_tensor(name, tensor)


def check_optional_tensor(name: str, tensor: object) -> None:
    """A tensor that could have been left out."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    check_tensor(name, tensor)


def check_types(tensors: tuple[Tensor, Tensor, Tensor], names: tuple[str, str, str] = NAMES) -> None:
    """Tensors, of one dtype and device that the op has an implementation for."""
    for name, tensor in zip(names, tensors, strict=True):
        if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
            check_tensor(name, tensor)
    dtype, device = tensors[0].dtype, tensors[0].device
    for name, tensor in zip(names[1:], tensors[1:], strict=True):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have {names[0]}'s dtype {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {names[0]}'s device {device}, got {tensor.device}")
    first = tensors[0]
    if not (first.is_cuda or first.is_cpu or first.is_meta):  # a device's type takes ten times as long
        raise ValueError(f"{names[0]} must be on a CUDA device or the CPU, got {device}")
    allowed = CUDA_DTYPES if first.is_cuda else CPU_DTYPES
    if dtype not in allowed:
        raise ValueError(
            f"{names[0]} must be {' or '.join(map(dtype_name, allowed))} on {device.type}, got {dtype_name(dtype)}"
        )


def check_dims(tensors: tuple[Tensor, Tensor, Tensor], layout: str, names: tuple[str, str, str]) -> None:
    """Tensors, of the layout's four dimensions."""
    for name, tensor in zip(names, tensors, strict=True):
        check_tensor(name, tensor)
    _check_dims(tensors, layout, names)


def _check_dims(tensors: tuple[Tensor, Tensor, Tensor], layout: str, names: tuple[str, str, str]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, {_AXES[layout]}, got shape {tuple(tensor.shape)}")


def check_tensors(
    tensors: tuple[Tensor, Tensor, Tensor], layout: str = "bshd", names: tuple[str, str, str] = NAMES
) -> Dimensions:
    """Everything that a call asks of its tensors. Raises TypeError or ValueError, naming the one at fault."""
    check_types(tensors, names)
    _check_dims(tensors, layout, names)
    q_name, k_name, v_name = names
    shapes = q, k, v = [tensor.shape for tensor in tensors]
    batch_axis, seqlen_axis, heads_axis = LAYOUTS[layout]
    batch, seqlen_q, heads, head_dim = q[batch_axis], q[seqlen_axis], q[heads_axis], q[3]
    if head_dim < 1:
        raise ValueError(f"{q_name} must have a head_dim (last dimension) of at least 1, got {head_dim}")
    for name, shape in ((k_name, k), (v_name, v)):
        if shape[batch_axis] != batch:
            raise ValueError(f"{name} must have {q_name}'s batch size {batch}, got {shape[batch_axis]}")
        if shape[3] != head_dim:
            raise ValueError(f"{name} must have {q_name}'s head_dim (last dimension) {head_dim}, got {shape[3]}")
    for what, axis in (("seqlen", seqlen_axis), ("num_heads", heads_axis)):
        if v[axis] != k[axis]:
            raise ValueError(f"{v_name} must have {k_name}'s {what} {k[axis]}, got {v[axis]}")
    heads_kv = k[heads_axis]
    if heads != heads_kv and (heads_kv == 0 or heads % heads_kv != 0):
        raise ValueError(f"{k_name} must have a number of heads that divides {q_name}'s {heads}, got {heads_kv}")
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        if shape[seqlen_axis] > MAX_SEQLEN:
            raise ValueError(f"{name} must have a seqlen of 2**29 at most, got {shape[seqlen_axis]}")
        if tensor.stride(3) != 1 and head_dim > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got a stride of {tensor.stride(3)} there: "
                f"pass {name}.contiguous()"
            )
    return Dimensions(batch, seqlen_q, k[seqlen_axis], heads, heads_kv, head_dim)


def alignment(value: int) -> int:
    """The largest power of two, 16 at most, that divides a pointer or a stride in bytes."""
    return (value & -value) if value % FULL_ALIGNMENT else FULL_ALIGNMENT


class Operand(NamedTuple):
    """How a kernel finds a tensor's elements: strides in elements, alignments in bytes."""

    strides: tuple[int, int, int]
    #: Alignment of the pointer and of the strides, in (batch, seqlen, head) order.
    pointer_alignment: int
    stride_alignments: tuple[int, int, int]

    @property
    def alignment(self) -> int:
        return min(self.pointer_alignment, *self.stride_alignments)


def operand(tensor: Tensor, layout: str = "bshd") -> Operand:
    """A tensor's strides in (batch, seqlen, head) order, and how they and its pointer are aligned.

    The stride of a dimension of size 1 is never used and may be anything: it becomes 0, which disqualifies no
    row.
    """
    shape, strides = tensor.shape, tensor.stride()
    batch, seqlen, head = (strides[axis] if shape[axis] > 1 else 0 for axis in LAYOUTS[layout])
    size = tensor.element_size()
    return Operand(
        (batch, seqlen, head),
        alignment(tensor.data_ptr()),
        (alignment(batch * size), alignment(seqlen * size), alignment(head * size)),
    )


def misaligned(operands: list[Operand], names: tuple[str, ...] = NAMES) -> list[str]:
    """What keeps 16-byte copies from being used: "query's seqlen stride", "key's address"."""
    found = []
    for name, operand in zip(names, operands, strict=True):
        if operand.pointer_alignment < FULL_ALIGNMENT:
            found.append(f"{name}'s address")
        for dimension, alignment in zip(("batch", "seqlen", "head"), operand.stride_alignments, strict=True):
            if alignment < FULL_ALIGNMENT:
                found.append(f"{name}'s {dimension} stride")
    return found
