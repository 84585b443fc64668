"""The op ``forward``: the short form of ``attend``, which most calls need."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import autocast, cpu
from cutlass_fmha.arguments import check
from cutlass_fmha.dispatch.problem import CAUSAL, mask_diagonal
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher

SCHEMA = (
    "forward(Tensor query, Tensor key, Tensor value, float scale, str causal, bool return_lse, "
    "str? row) -> (Tensor output, Tensor softmax_lse)"
)


def check_options(scale: float, causal: str) -> None:
    check.finite_scale(scale)
    if causal not in CAUSAL:
        raise ValueError(f'causal must be "none", "top-left" or "bottom-right", got {causal!r}')


def no_lse(query: Tensor) -> Tensor:
    """The op's arity is fixed: what stands in for an LSE that nobody asked for."""
    return torch.empty(0, dtype=torch.float32, device=query.device)


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
) -> tuple[Tensor, Tensor]:
    check_options(scale, causal)
    output, lse = plan.launch(query, key, value, scale, causal, return_lse, row)
    return output, no_lse(query) if lse is None else lse


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
) -> tuple[Tensor, Tensor]:
    check_options(scale, causal)
    dims = check.check_tensors((query, key, value))
    if row is not None:
        raise UnsupportedError(f"row {row} is a CUDA kernel, and the tensors are on the CPU")
    output, lse = cpu.forward(query, key, value, scale, mask_diagonal(causal, dims.seqlen_q, dims.seqlen_k))
    return output, lse if return_lse else no_lse(query)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
) -> tuple[Tensor, Tensor]:
    check_options(scale, causal)
    dims = check.check_tensors((query, key, value))
    output = query.new_empty((dims.batch, dims.seqlen_q, dims.num_heads, dims.head_dim))
    if not return_lse:
        return output, no_lse(query)
    return output, query.new_empty((dims.batch, dims.num_heads, dims.seqlen_q), dtype=torch.float32)


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, autocast.attention_rule)
