"""Rows that are not contiguous, which kernels don't read and some callers may give: copies of them."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import jagged
from cutlass_fmha.arguments import check


def have_contiguous_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    try:
        return query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    except RuntimeError:  # a sparse tensor has no strides
        return False


def contiguous_rows(name: str, tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    try:
        if tensor.stride(-1) == 1:
            return tensor
    except RuntimeError:  # a sparse tensor has no strides
        pass
    if jagged.is_jagged(tensor):
        return jagged.contiguous_rows(tensor)
    check.check_tensor(name, tensor)
    return tensor.clone(memory_format=torch.contiguous_format)  # contiguous() leaves an empty one as it is
