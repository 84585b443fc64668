"""The op ``forward``: the short form of ``attend``, which most calls need."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import autocast, cpu
from cutlass_fmha.arguments import check
from cutlass_fmha.dispatch.problem import mask_diagonal
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.ops import dispatcher
from cutlass_fmha.ops.attend import CALL, RESULT, check_options, launch, no_lse

SCHEMA = f"forward({CALL}) -> {RESULT}"


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


dispatcher.register(SCHEMA, {"CUDA": launch, "CPU": _cpu, "fake": _fake}, autocast.attention_rule)
