"""flash_attn.flash_attn_interface: its functions, in its order, with its defaults and return values."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha.arguments.op_arguments import SEEDS
from cutlass_fmha.attention import attention
from cutlass_fmha.contiguous import contiguous_rows, have_contiguous_rows
from cutlass_fmha.dropout import dropout_mask
from cutlass_fmha.kv_cache import with_kv_cache
from cutlass_fmha.ops.attend_parts import attend_parts, parts_of, write_gradients

Side = int | Tensor
Found = Tensor | tuple[Tensor, Tensor, Tensor]


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
) -> Found:
    """Attention over [batch, seqlen, num_heads, head_dim]: ``cutlass_fmha.attention`` in flash_attn's words.

    window_size: (left, right), negative for no limit. deterministic: of the gradients; every call is.

    Returns:
        The output, or with return_attn_probs a triple: the output; the LSE, float32 [batch, num_heads,
        seqlen_q], +inf for a row without keys; and which probabilities dropout keeps, 1 and -1 for those that
        it drops, [batch, num_heads, seqlen_q, seqlen_k] with the last two rounded up to 128 (flash_attn has
        probabilities in place of the 1); an empty tensor without dropout.
    """
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, *given, deterministic, return_attn_probs, {})


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[Side] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """``flash_attn_func`` of [batch, seqlen, 3, num_heads, head_dim]."""
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_parts("qkv", qkv, 2, 3)
    return _attend_parts(qkv, 2, None, (*given, deterministic, return_attn_probs), {})


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[Side] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """``flash_attn_func`` with keys and values of [batch, seqlen_k, 2, num_heads_kv, head_dim]."""
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_parts("kv", kv, 2, 2)
    return _attend_parts(kv, 2, q, (*given, deterministic, return_attn_probs), {})


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
) -> Found:
    """Attention of packed sequences, [total, num_heads, head_dim]. LSEs are [num_heads, total_q].

    block_table: int32 [batch, pages]: k and v are pages, [pages, page_size, num_heads_kv, head_dim], of any
    multiple of 16 rows, and cu_seqlens_k says how many keys each sequence has in them.
    """
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return _attend(q, k, v, *given, deterministic, return_attn_probs, lengths)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Side,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[Side] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """``flash_attn_varlen_func`` of [total, 3, num_heads, head_dim]."""
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = _packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    check_parts("qkv", qkv, 1, 3)
    return _attend_parts(qkv, 1, None, (*given, deterministic, return_attn_probs), lengths)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Found:
    """``flash_attn_varlen_func`` with keys and values of [total_k, 2, num_heads_kv, head_dim]."""
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_parts("kv", kv, 1, 2)
    return _attend_parts(kv, 1, q, (*given, deterministic, return_attn_probs), lengths)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """``cutlass_fmha.with_kv_cache`` in flash_attn's words: the cache is written in place.

    As there, positions of rotary embedding count left padding, pairs are neighbours unless told otherwise,
    num_splits 0 has a number chosen, and the result has no gradient, whatever its inputs want.
    """
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    scores = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _with_cache(q, k_cache, v_cache, k, v, rotary, where, *scores, num_splits, return_softmax_lse, {})


def _with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary: tuple[Tensor | None, Tensor | None, bool],
    where: tuple[int | Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[Side],
    softcap: float,
    alibi_slopes: Tensor | None,
    num_splits: int,
    return_softmax_lse: bool,
    said: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """The one call with a cache. ``said``: what flash_attn has no word for, and what is no default, as each name costs
    host time."""
    cache_seqlens, cache_batch_idx, cache_leftpad, block_table = where
    rotary_cos, rotary_sin, rotary_interleaved = rotary
    if rotary_cos is not None:
        said |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
        if cache_leftpad is not None:
            said["rotary_seqlens"] = cache_seqlens
    if cache_batch_idx is not None:
        said["cache_batch_idx"] = cache_batch_idx
    if cache_leftpad is not None:
        said["leftpad_k"] = cache_leftpad
    if block_table is not None:
        said["page_table"] = block_table
    _say_scores(said, window_size, softcap, alibi_slopes)
    if num_splits:
        said["num_splits"] = num_splits
    if k is None or v is None or not have_contiguous_rows(q, k, v):
        q = contiguous_rows("q", q)
        k, v = (None if x is None else contiguous_rows(name, x) for name, x in (("k", k), ("v", v)))
    call = _without_gradients if torch.is_grad_enabled() else with_kv_cache
    found = call(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        scale=softmax_scale,
        causal=bool(causal),
        return_lse=bool(return_softmax_lse),
        **said,
    )
    if isinstance(found, Tensor):
        return found
    output, lse = found
    return output, _their_lse(lse)


# ---- what other libraries import beside them ---------------------------------------------------------------


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, LSE, the dropout mask (empty unless return_softmax) and int64 [2] that begins with the seed."""
    window = (window_size_left, window_size_right)
    given = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return _with_state(q, k, v, *given, False, return_softmax, {})


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``_flash_attn_forward``, of packed sequences."""
    window = (window_size_left, window_size_right)
    given = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    lengths = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k)
    lengths["leftpad_k"] = leftpad_k
    return _with_state(q, k, v, *given, False, return_softmax, lengths)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Gradients, written to dq, dk and dv. The rows' sums of dout * out, which flash_attn returns, are empty.

    rng_state: what the forward returned last; only with dropout_p.
    """
    given = (dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return _write_gradients((dq, dk, dv), (dout, q, k, v, out), softmax_lse, *given, deterministic, rng_state)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """As ``_flash_attn_backward``, of packed sequences."""
    given = (dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    rest = (deterministic, rng_state, _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    return _write_gradients((dq, dk, dv), (dout, q, k, v, out), softmax_lse, *given, *rest)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


#: Programs generate by models whose parameters require gradients, also outside of torch.no_grad().
_without_gradients = torch.no_grad()(with_kv_cache)


# ---- their words to ours -----------------------------------------------------------------------------------


def _say(
    said: dict[str, Any],
    dropout_p: float,
    window: Sequence[Side],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> None:
    """The same of what has no cache, too."""
    _say_scores(said, window, softcap, alibi_slopes)
    if dropout_p:
        said["dropout_p"] = dropout_p
    if deterministic:
        said["deterministic"] = deterministic


def _say_scores(said: dict[str, Any], window: Sequence[Side], softcap: float, alibi_slopes: Tensor | None) -> None:
    """Adds what of these is no default: each name costs host time."""
    if window != (-1, -1):
        said["window"] = _window(window)
    if softcap:
        said["softcap"] = softcap
    if alibi_slopes is not None:
        said["alibi_slopes"] = alibi_slopes


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[Side],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    said: dict[str, Any],
) -> Found:
    """``said``: what ``attention`` hears besides. Of the rest it hears what is no default: each name costs
    host time."""
    if return_attn_probs:
        given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return _with_state(q, k, v, *given, True, said)[:3]
    _say(said, dropout_p, window_size, softcap, alibi_slopes, deterministic)
    if not have_contiguous_rows(q, k, v):
        q, k, v = map(contiguous_rows, "qkv", (q, k, v))
    found: Found = attention(q, k, v, scale=softmax_scale, causal=bool(causal), **said)
    return found


def _attend_parts(
    packed: Tensor, dim: int, query: Tensor | None, given: tuple[Any, ...], said: dict[str, Any]
) -> Found:
    """``_attend`` of parts of a tensor, of which gradients are, too, parts of one. ``given``: its arguments."""
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs = given
    if packed.requires_grad and not return_attn_probs and torch.is_grad_enabled():
        _say(said, dropout_p, window_size, softcap, alibi_slopes, deterministic)
        found = attend_parts(packed, dim, query, softmax_scale, "bottom-right" if causal else "none", said)
        if found is not None:
            return found
    q, k, v = parts_of(packed, dim, query)
    scores = (window_size, softcap, alibi_slopes)
    return _attend(q, k, v, dropout_p, softmax_scale, causal, *scores, deterministic, return_attn_probs, said)


def _with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[Side],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    wants_mask: bool,
    said: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, LSE, the dropout mask and the seed's tensor, which both are made from."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p > 0.0:
        state[:1] = torch.randint(SEEDS, (1,), device=q.device)
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, False)
    said |= {"return_lse": True, "dropout_seed": state[:1]}
    found: Any = _attend(q, k, v, *given, said)
    output, lse = found
    mask = q.new_empty(0)
    if wants_mask and dropout_p > 0.0:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        if "cu_seqlens_q" in said:
            batch = said["cu_seqlens_q"].shape[0] - 1
            seqlen_q, seqlen_k = said["max_seqlen_q"], said["max_seqlen_k"]
        seqlen_q, seqlen_k = (-(-seqlen // 128) * 128 for seqlen in (seqlen_q, seqlen_k))
        kept = dropout_mask(state[:1], batch, q.shape[-2], seqlen_q, seqlen_k, dropout_p)
        mask = kept.to(q.dtype) * 2 - 1
    return output, _their_lse(lse), mask, state


@torch.no_grad()
def _write_gradients(
    places: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    softmax_lse: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: Sequence[Side],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None,
    lengths: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    left, right = _window(window_size) or (-1, -1)
    said = {"window_left": left, "window_right": right, "softcap": softcap, "alibi_slopes": alibi_slopes}
    if dropout_p > 0.0:
        if rng_state is None:
            raise ValueError("rng_state must be what the forward returned last, where dropout_p is not 0")
        said |= {"dropout_p": dropout_p, "dropout_seed": rng_state[:1]}
    said |= {**lengths, "deterministic": deterministic}
    names = ("dout", "q", "k", "v", "out")
    dout, q, k, v, out = (contiguous_rows(name, x) for name, x in zip(names, tensors, strict=True))
    lse = softmax_lse.masked_fill(softmax_lse == math.inf, -math.inf)
    given = (dout, (q, k, v), out, lse, softmax_scale, "bottom-right" if causal else "none")
    write_gradients(places, *given, said)
    return softmax_lse.new_empty(0)


def _packed(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Side,
    max_seqlen_k: Side,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q if type(max_seqlen_q) is int else _number(max_seqlen_q),
        "max_seqlen_k": max_seqlen_k if type(max_seqlen_k) is int else _number(max_seqlen_k),
    }
    if block_table is None:
        found["cu_seqlens_k"] = cu_seqlens_k
    else:
        found["page_table"] = block_table
        seqused_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if seqused_k is not None:
        found["seqused_k"] = seqused_k
    return found


def check_parts(name: str, packed: Tensor, dim: int, count: int) -> None:
    """Raises ValueError but for [batch, seqlen, count, num_heads, head_dim] (dim 2) or [total, ...] (1)."""
    if not isinstance(packed, Tensor) or packed.dim() != dim + 3 or packed.shape[dim] != count:
        axes = "batch, seqlen" if dim == 2 else "total"
        shape = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(f"{name} must be [{axes}, {count}, num_heads, head_dim], got {shape}")


def _number(side: Side) -> Any:
    """An int that may be a tensor's only element."""
    return operator.index(side) if isinstance(side, Tensor) else side


def _window(window_size: Sequence[Side]) -> tuple[int, int] | None:
    left, right = map(_number, window_size)
    return None if left < 0 and right < 0 else (max(left, -1), max(right, -1))


def _their_lse(lse: Tensor) -> Tensor:
    """A row without keys has +inf there."""
    return lse.masked_fill(lse == -math.inf, math.inf)
