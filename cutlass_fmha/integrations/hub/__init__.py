"""flash_attn's functions as a kernel of Hugging Face's ``kernels`` package, which needs no registry.

    from cutlass_fmha.integrations import hub
    model = AutoModel.from_pretrained(path, attn_implementation=hub.use())

or without a line of Python: LOCAL_KERNELS="cutlass-fmha/flash-attn=<this directory>". Programs and models
that take only names they know get it under one of these: hub.use("kernels-community/flash-attn2").
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from cutlass_fmha.flash_attn.flash_attn_interface import Found, Side, _attend, _packed, _with_cache

NAME = "cutlass-fmha/flash-attn"
"""For transformers: with a slash, as repositories have, and "flash", for flash attention's masks."""

__all__ = ["NAME", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "use"]


def use(name: str = NAME) -> str:
    """Have ``kernels`` load this directory under ``name``, here and in child processes; returns the name."""
    entries = [entry for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry]
    kept = [entry for entry in entries if entry.partition("=")[0] != name]
    os.environ["LOCAL_KERNELS"] = ":".join([*kept, f"{name}={Path(__file__).parent}"])
    return name


# transformers drops what a function has no parameter for: flash_attn's own have none for sinks.
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[Side] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Found:
    """``cutlass_fmha.flash_attn.flash_attn_func``, and s_aux: sinks, float32 or q's dtype, [num_heads]."""
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend(q, k, v, *given, return_attn_probs, {"sinks": s_aux})


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Side,
    max_seqlen_k: Side,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[Side] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Found:
    """``cutlass_fmha.flash_attn.flash_attn_varlen_func``, and s_aux as above."""
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lengths = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return _attend(q, k, v, *given, return_attn_probs, lengths | {"sinks": s_aux})


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[Side] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``cutlass_fmha.flash_attn.flash_attn_with_kvcache``, and s_aux as above: the decode steps of transformers'
    continuous batching, whose block tables it takes."""
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    given = (softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits, return_softmax_lse)
    return _with_cache(q, k_cache, v_cache, k, v, rotary, where, *given, {} if s_aux is None else {"sinks": s_aux})
