"""Tensors that tests begin with: drawn from a seed, the same on every machine; one that looks like a GPU's."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def starts(*lengths: int) -> Tensor:
    return ints(0, *accumulate(lengths))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def moved(tree: Any, device: torch.device | str, floats: torch.dtype | None = None) -> Any:
    """Its tensors there, those of floats in that dtype."""
    return tree_map_only(Tensor, lambda x: x.to(device, floats if x.is_floating_point() else None), tree)


def laid(x: Tensor, how: str) -> Tensor:
    """The same numbers, with a last dimension that is not contiguous, or heads first."""
    if how == "last dimension":
        return torch.stack((x, x), -1)[..., 0]
    return x.transpose(-2, -3).contiguous().transpose(-2, -3) if how == "heads first" else x


def qkv(
    batch: int = 2, seqlen_q: int = 33, seqlen_k: int = 65, heads: int = 4, heads_kv: int = 2,
    head_dim: int = 32, head_dim_v: int = 0, dtype: torch.dtype = torch.float16, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """[batch, seqlen, heads, head_dim] each; ``head_dim_v`` 0: as head_dim."""
    generator = torch.Generator().manual_seed(seed)
    keys = (seqlen_k, heads_kv, head_dim)
    shapes = ((seqlen_q, heads, head_dim), keys, (*keys[:2], head_dim_v or head_dim))
    q, k, v = (torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


class LooksLikeCuda(Tensor):
    """What ``dispatcher.can_skip_dispatcher`` would see on a GPU; its type stands in for torch.Tensor there."""

    is_cuda = True
