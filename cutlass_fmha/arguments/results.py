"""Tensors that a call is given to write to, ``out`` and ``lse``: what they must be, a sentence each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from cutlass_fmha import private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.features import Sizes

#: What a call of attention writes to where it is given it.
RESULTS = ("out", "lse")
OUT = ("out",)  # without return_lse

LSE_ALONE = "lse is only taken with return_lse=True"
NO_GRADIENT = (
    "out and lse are not taken where a gradient is wanted, and a tensor of this call requires one: call "
    "without them, under torch.no_grad() or with detached tensors"
)
Placed = tuple[str, Tensor, int]
"""A tensor, its name, and how many bytes there are from its first element to the end of its last."""


def check_result(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, first: tuple[str, Tensor]
) -> None:
    """Metadata of a tensor to write to. ``first``: the tensor whose device it must have, and its name."""
    check.check_optional_tensor(name, tensor)
    if tensor.dtype != dtype:
        own, got = check.dtype_name(dtype), check.dtype_name(tensor.dtype)
        raise ValueError(f"{name} must be {own}, as the result is, got {got}")
    if tensor.device != first[1].device:
        raise ValueError(f"{name} must be on {first[0]}'s device {first[1].device}, got {tensor.device}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got a stride of {tensor.stride(-1)} there")
    if _overlaps_itself(tensor):
        raise ValueError(
            f"{name} is written to, and must neither be expanded nor have elements that share memory, "
            f"got strides {tuple(tensor.stride())}"
        )


def check_results(given: Mapping[str, Tensor], sizes: Sizes, layout: str, first: tuple[str, Tensor]) -> None:
    """Metadata of those of ``RESULTS`` that a call of attention is given. ``first``: query, and its name."""
    if (out := given.get("out")) is not None:
        shape = sizes.out_shape
        if layout == "bhsd":
            shape = (shape[0], shape[2], shape[1], shape[3])
        check_result("out", out, shape, first[1].dtype, first)
    if (lse := given.get("lse")) is not None:
        check_lse(lse, sizes.lse_shape, first)


def check_lse(lse: Tensor, shape: tuple[int, ...], first: tuple[str, Tensor]) -> None:
    """Of attention, whose kernels write rows one after the other."""
    check_result("lse", lse, shape, torch.float32, first)
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {tuple(lse.stride())}")


def pair_of(out: object) -> tuple[Tensor, Tensor]:
    """Of a call with two results what ``out`` has to be; raises TypeError."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out must be a tuple of two tensors, got {check.shown(out)}")
    check.check_tensors_given(both(*out))
    return out


def both(one: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Under the names that a caller knows."""
    return {"out[0]": one, "out[1]": other}


def placed(tensors: Mapping[str, Tensor | None]) -> list[Placed]:
    """Those that are there, as ``check_apart`` takes them."""
    return [(name, x, extent(x)) for name, x in tensors.items() if x is not None]


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Tells autograd of a write, so that whoever saved the tensor for a backward is told."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last; 0 without any."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_apart(written: Sequence[Placed], read: Sequence[Placed]) -> None:
    """Raises ValueError where what is written shares memory with what is read, or is written, too."""
    for number, (name, x, size) in enumerate(written):
        begin = x.data_ptr()
        for other, y, other_size in (*written[:number], *read):
            other_begin = y.data_ptr()
            apart = begin >= other_begin + other_size or other_begin >= begin + size
            if not apart and _share_memory(x, y):
                raise ValueError(
                    f"{name} must not share memory with {other}, which is read or written in the same call"
                )


def are_apart(written: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
    """Whether each may be written while the others are: none is expanded, or shares memory with another."""
    of_written, of_read = ([("", x, extent(x)) for x in tensors] for tensors in (written, read))
    try:
        check_apart(of_written, of_read)
    except ValueError:
        return False
    return not any(map(_overlaps_itself, written))


def check_apart_before(to: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None]) -> None:
    """The same before anything is done, under a caller's names, of tensors that have addresses."""
    given = [x for x in (*to.values(), *read.values()) if x is not None]
    if not torch.compiler.is_compiling() and all(_has_address(x) for x in given):
        check_apart(placed(to), placed(read))


def check_before(
    out: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    head_dim_v: int,
    dtype: torch.dtype,
    read: Mapping[str, Tensor | None],
    any_strides: bool = False,
) -> None:
    """What ``attention`` asks of ``out`` and ``lse``, before the first of several launches.

    ``any_strides``: of the LSE, which a merge writes.
    """
    check.check_tensors_given({}, {"out": out, "lse": lse})
    if out is not None:
        check_result("out", out, (*q.shape[:-1], head_dim_v), dtype, ("q", q))
    if lse is not None:
        *batch, seqlen, heads, _ = q.shape
        shape, first = (*batch, heads, seqlen), ("q", q)
        check_result("lse", lse, shape, torch.float32, first) if any_strides else check_lse(lse, shape, first)
    check_apart_before({"out": out, "lse": lse}, read)


def _has_address(x: Tensor) -> bool:
    return type(x) is Tensor and not x.is_meta and not private_torch.is_transformed(x)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether an element may lie where another does: False for every slice of a dense tensor."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return tensor.numel() > 0
        span += max(size - 1, 0) * stride
    return False


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether tensors, whose ranges of memory overlap, may have a byte in common.

    A tensor is runs of bytes, some steps apart. Where all steps of both are multiples of one number and the
    runs don't meet modulo that, none does: keys and values that alternate in one tensor, say.
    """
    (run, *steps), (other_run, *other_steps) = _runs(x), _runs(y)
    if 0 in (run, other_run):
        return False
    unit = math.gcd(*steps, *other_steps)
    if unit == 0:
        return True
    ahead = y.data_ptr() - x.data_ptr()
    return ahead % unit < run or -ahead % unit < other_run


def _runs(tensor: Tensor) -> list[int]:
    """How many bytes lie side by side, and the steps from one such run to the next; [0] without elements."""
    if tensor.numel() == 0:
        return [0]
    run = tensor.element_size()
    steps: list[int] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride * tensor.element_size() == run and not steps:
            run *= size
        else:
            steps.append(stride * tensor.element_size())
    return [run, *steps]
