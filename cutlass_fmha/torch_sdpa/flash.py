"""The ops of torch's flash backend: what DTensor, ring attention, varlen_attn and compiled graphs call.

Their outputs lie in memory as torch's do, because compiled graphs count on it. An LSE is the logarithm of a
sum: -inf for a row without keys, where torch's has +inf; each backward is given its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import autocast, private_torch, tally
from cutlass_fmha.attention import attention
from cutlass_fmha.contiguous import contiguous_rows
from cutlass_fmha.features import NO_LIMIT
from cutlass_fmha.torch_sdpa.calls import calls

#: Where dropout's numbers come from is not written in a call, and the two halves of one would have to agree.
_DROPOUT = "dropout_p here would have a backward elsewhere draw other numbers"
_DEBUG_MASK = "return_debug_mask asks for probabilities, which are never formed"
_VALUE_DIM = "value has another head_dim than query"


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output, [batch, seqlen, num_heads, head_dim] or packed, and LSE. is_causal is bottom-right."""
    if return_debug_mask:
        raise NotImplementedError(_DEBUG_MASK)
    if dropout_p:
        raise NotImplementedError(_DROPOUT)
    if value.shape[-1] != query.shape[-1]:
        raise NotImplementedError(_VALUE_DIM)
    said: dict[str, Any] = {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "page_table": block_table}
    said["num_splits"] = num_splits or None
    said |= _lengths(cum_seq_q, None if block_table is not None else cum_seq_k, max_q, max_k)
    if block_table is not None and seqused_k is not None:
        said["max_seqlen_k"] = max_k
    found: tuple[Tensor, Tensor] = attention(
        contiguous_rows("query", query),
        contiguous_rows("key", key),
        contiguous_rows("value", value),
        scale=scale,
        causal=is_causal,
        return_lse=True,
        window=(window_size_left, window_size_right),
        **said,
    )
    return found


def _lengths(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if cum_seq_q is not None:
        said |= {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
    if cum_seq_k is not None:
        said |= {"cu_seqlens_k": cum_seq_k, "max_seqlen_k": max_k}
    return said


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> list[Tensor]:
    if dropout_p:
        raise NotImplementedError(_DROPOUT)
    q, k, v = (contiguous_rows(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    sides = {"window_left": window_size_left, "window_right": window_size_right}
    said: dict[str, Any] = {name: side for name, side in sides.items() if side not in (None, NO_LIMIT)}
    said |= _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    lse = logsumexp
    if said or query.shape[1] > key.shape[1] or key.shape[1] == 0:  # there may be queries without keys
        lse = lse.masked_fill(lse == math.inf, -math.inf)
    if torch.get_deterministic_debug_mode() == 2:  # what is not deterministic is an error
        said["deterministic"] = True
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    causal = "bottom-right" if is_causal else "none"
    given = (grad_out, q, k, v, out, lse, None, scale, causal)
    found = torch.ops.cutlass_fmha.attend_backward(*given, **said)
    return [_laid_out_as(x, like) for x, like in zip(found[:3], (query, key, value), strict=True)]


def _laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the strides that ``torch.empty_like`` has, copied where it has others."""
    same = torch.empty_like(like)
    return tensor if same.stride() == tensor.stride() else same.copy_(tensor)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's ops also return: the state of dropout, and a mask that nobody asked for."""
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return state, unused, query.new_empty(0)


# ---- the ops, with torch's signatures ----------------------------------------------------------------------


def _flash_attention_forward(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    output, lse = _forward(query, *args, **kwargs)
    return _laid_out_as(output, query), lse, *_nothing(query)


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    output, lse = _forward(*args, **kwargs)
    out.copy_(output)
    return lse


def _flash_attention_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(_backward(*args[:12], **kwargs))


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = query.shape[2], key.shape[2]
    given = (None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask)
    output, lse = _forward(q, k, v, *given, scale=scale)
    return _laid_out_as(output.transpose(1, 2), query), lse, None, None, max_q, max_k, *_nothing(query)


def _scaled_dot_product_flash_attention_backward(*args: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad_out, query, key, value, out = (x.transpose(1, 2) for x in args[:5])
    found = _backward(grad_out, query, key, value, out, args[5], None, None, *args[8:12], scale=scale)
    return tuple(x.transpose(1, 2) for x in found)


OPS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        _flash_attention_forward,
        _flash_attention_forward_no_dropout_inplace,
        _flash_attention_backward,
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
    )
}


def kernel(name: str, device_key: str) -> Callable[..., Any]:
    """What stands in torch's dispatcher for an op: ours, or what stood there before where ours declines."""
    ours = OPS[name]
    op = getattr(torch.ops.aten, name).default
    try:
        theirs = torch.library.get_kernel(op, device_key)
    except RuntimeError:  # there is none: a torch without CUDA, or the CPU
        theirs = None

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _as_it_is(device_key):
                found = ours(*args, **kwargs)
        except tally.REFUSALS as error:
            if theirs is None:  # torch has none for this device type
                raise
            calls.decline(name, tally.sentence(error))
            return theirs.call_boxed(keyset, *_with_their_lse(name, args), **kwargs)
        calls.count(name)
        return found

    return call


def _as_it_is(device_key: str) -> AbstractContextManager[Any]:
    """Without autocast, which has had its say about torch's op."""
    if private_torch.any_autocast_enabled():
        return autocast.off(device_key.lower())
    return contextlib.nullcontext()


def _with_their_lse(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A backward's arguments as torch's own kernel wants them."""
    if not name.endswith("_backward"):
        return args
    lse = args[5]
    return (*args[:5], lse.masked_fill(lse == -math.inf, math.inf), *args[6:])
