"""The op ``attend_out``: ``attend`` into tensors that the caller has.

An op of its own, which returns nothing: one that returns what it writes to could not be compiled, since no
result may be an argument's alias, and an ``out`` of ``attend`` would take from it that it writes nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import autocast
from cutlass_fmha.arguments import check, check_features, results
from cutlass_fmha.features import Features, Sizes
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher
from cutlass_fmha.ops.attend import FEATURES, check_options, scale_of

# Written arguments come by position: by name alone, torch takes them for those of an out= overload.
SCHEMA = (
    "attend_out(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor(b!)? lse, float scale, "
    f"str causal, str? row, *, {FEATURES}) -> ()"
)


def _given(out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    return {"out": out} if lse is None else {"out": out, "lse": lse}


def _check(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, features: dict[str, Any]
) -> Sizes:
    sizes = check_features.check_features((query, key, value), Features(**features))
    results.check_results(_given(out, lse), sizes, "bshd", ("query", query))
    return sizes


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: str,
    row: str | None,
    **features: Any,
) -> None:
    scale = scale_of(scale, features)
    check_options(scale, causal)
    said = features | _given(out, lse)
    plan.launch(query, key, value, scale, causal, lse is not None, row, "bshd", check.NAMES, said)


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: str,
    row: str | None,
    **features: Any,
) -> None:
    scale = scale_of(scale, features)
    check_options(scale, causal)
    sizes = _check(query, key, value, out, lse, features)
    tensors = {"query": query, "key": key, "value": value} | Features(**features).tensors
    results.check_apart(results.placed(_given(out, lse)), results.placed(tensors))
    if dispatcher.simulated():
        return _cuda(query, key, value, out, lse, scale, causal, row, **features)
    # The bits of a call without ``out``, which is ``forward`` where nothing is said.
    short = not features and sizes.total_q is None and sizes.head_dim == sizes.head_dim_v
    op = torch.ops.cutlass_fmha.forward if short else torch.ops.cutlass_fmha.attend
    output, softmax_lse = op(query, key, value, scale, causal, lse is not None, row, **features)
    out.copy_(output)
    if lse is not None:
        lse.copy_(softmax_lse)
    return None


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: str,
    row: str | None,
    **features: Any,
) -> None:
    check_options(scale, causal)
    features.pop("numbers", None)  # known when the graph runs, and checked then
    _check(query, key, value, out, lse, features)


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, autocast.attention_rule)
dispatcher.register_writes("attend_out", ("out", "lse"))
