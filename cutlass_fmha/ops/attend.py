"""The op ``attend``, which takes everything that a call may say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import autocast, cpu
from cutlass_fmha.arguments import check, check_features
from cutlass_fmha.dispatch.problem import CAUSAL
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher

#: What ``forward`` has, too.
CALL = "Tensor query, Tensor key, Tensor value, float scale, str causal, bool return_lse, str? row"
RESULT = "(Tensor output, Tensor softmax_lse)"
#: What a call may say besides.
FEATURES = (
    "SymInt window_left=-1, SymInt window_right=-1, Tensor? mask=None, Tensor? bias=None, "
    "Tensor? prefix_lengths=None, Tensor? block_counts=None, Tensor? block_indices=None, int block_m=0, "
    "int block_n=0, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0., "
    "Tensor? dropout_seed=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? leftpad_k=None, Tensor? page_table=None, Tensor? cache_batch_idx=None, int? num_splits=None, "
    "bool batch_invariant=False, bool deterministic=False, "
    "int? deterministic_workspace=None, Tensor? numbers=None"
)
SCHEMA = f"attend({CALL}, *, {FEATURES}) -> {RESULT}"


def check_options(scale: float, causal: str) -> None:
    check.finite_scale(scale)
    if causal not in CAUSAL:
        raise ValueError(f'causal must be "none", "top-left" or "bottom-right", got {causal!r}')


def no_lse(query: Tensor) -> Tensor:
    """The op's arity is fixed: what stands in for an LSE that nobody asked for."""
    return torch.empty(0, dtype=torch.float32, device=query.device)


def scale_of(scale: float, features: dict[str, Any]) -> float:
    """The scale of a call of ``attend``, whose features become those of ``Features``.

    ``numbers``, float64 [3] on the CPU, are scale, softcap and dropout_p in place of those: a compiled graph
    holds a float as a constant, and would be compiled anew for each value.
    """
    numbers = features.pop("numbers", None)
    if numbers is not None:
        if numbers.dtype != torch.float64 or numbers.shape != (3,) or numbers.device.type != "cpu":
            raise ValueError(
                f"numbers must be float64 of shape (3,) on the CPU, got {check.dtype_name(numbers.dtype)} of "
                f"shape {tuple(numbers.shape)} on {numbers.device}"
            )
        scale, features["softcap"], features["dropout_p"] = numbers.tolist()
    return scale


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    """What both ops are on a GPU."""
    scale = scale_of(scale, features)
    check_options(scale, causal)
    output, lse = plan.launch(query, key, value, scale, causal, return_lse, row, "bshd", check.NAMES, features)
    return output, no_lse(query) if lse is None else lse


def refuse_row(row: str | None) -> None:
    """Of CPU tensors."""
    if row is not None:
        raise UnsupportedError(f"row {row} is a CUDA kernel, and the tensors are on the CPU")


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    scale = scale_of(scale, features)
    check_options(scale, causal)
    arguments = Features(**features)
    sizes = check_features.check_features((query, key, value), arguments)
    cpu.check_contents(query, key, arguments, sizes)
    if dispatcher.simulated():
        return launch(query, key, value, scale, causal, return_lse, row, **features)
    refuse_row(row)
    output, lse = cpu.attend(query, key, value, scale, causal, arguments, sizes)
    return output, lse if return_lse else no_lse(query)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    check_options(scale, causal)
    features.pop("numbers", None)  # known when the graph runs, and checked then
    sizes = check_features.check_features((query, key, value), Features(**features))
    output = query.new_empty(sizes.out_shape)
    if not return_lse:
        return output, no_lse(query)
    return output, query.new_empty(sizes.lse_shape, dtype=torch.float32)


dispatcher.register(SCHEMA, {"CUDA": launch, "CPU": _cpu, "fake": _fake}, autocast.attention_rule)
