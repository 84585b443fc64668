"""Attention over a cache of keys and values, contiguous or paged, to which a call may append new ones."""

from __future__ import annotations

from torch import Tensor

from cutlass_fmha.arguments import check, check_features, results, tensors
from cutlass_fmha.arguments.op_arguments import window_sides
from cutlass_fmha.arguments.signature import lists_features, refuse_name
from cutlass_fmha.attention import attend_cache
from cutlass_fmha.ops import dispatcher
from cutlass_fmha.ops.append_kv import Append, append, capacity_of, check_room
from cutlass_fmha.ops.rotary import check_positions


@lists_features
def with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | int | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool | str | None = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    row: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the keys and values in a cache, after new ones were appended: decoding, or a prompt.

    What ``flash_attn_with_kvcache`` is in flash_attn. The cache is written in place, cache_seqlens is not.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], as ``attention`` takes it, or with cu_seqlens_q packed,
            [total_q, num_heads, head_dim].
        k_cache, v_cache: [batch_cache, seqlen_cache, num_heads_kv, head_dim or head_dim_v], or with
            page_table pages, [pages, page_size, num_heads_kv, ...], of a multiple of 16 rows.
        k, v: [batch, seqlen_new, num_heads_kv, ...], written to rows cache_seqlens, cache_seqlens + 1, ...
            Packed as q is, [total_q, num_heads_kv, ...], with cu_seqlens_q. None: the cache is used as it is.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], of q's dtype or float32: k and q are rotated as
            ``rotary`` does it; rotary_dim is any even number up to head_dim.
        rotary_interleaved: pairs are neighbours, otherwise of an element of each half (flash_attn's default
            is True).
        rotary_seqlens: int32 [batch] or an int, the position of the first new key; when None cache_seqlens -
            leftpad_k, which is a key's number in its own sequence. (flash_attn does not subtract leftpad_k.)
        cache_seqlens: int32 [batch] or an int: rows of the cache in use before the call, counted with
            leftpad_k. None, without k: all.
        cache_batch_idx: int32 [batch], which entry of the cache is a sequence's; None: its own number.
        page_table: int32 [batch, pages]: which pages hold a sequence's rows.
        leftpad_k: int32 [batch]: rows before the first key.
        cu_seqlens_q: int32 [batch + 1], where sequences begin in q, k and v: prompts, parts of prompts and
            single tokens in one batch.
        max_seqlen_q, max_seqlen_k: no sequence has more queries; more keys, new ones included. As
            ``attention``.
        causal, window: as ``attention``. With one of them query i is rotated to the position of new key i,
            otherwise every query to that of the first one.
        scale, mask, bias, prefix_lengths, softcap, alibi_slopes, sinks, num_splits, batch_invariant,
            return_lse, row, out, lse: as ``attention``.

    Returns:
        As ``attention``. Under torch.autocast the cache is not cast: q, k and v are, to its dtype.

    The host reads no tensor on a GPU. There a new key without a place is dropped: one beyond the rows that
    the cache has for a sequence, or of a page or an entry that there is not; and a row whose position
    rotary_cos does not have becomes NaN as far as it is rotated. Both raise ValueError where the host knows:
    on the CPU, and where cache_seqlens or rotary_seqlens is an int.

    Raises:
        TypeError, ValueError, UnsupportedError, NotImplementedError: as ``attention``.
    """
    if unknown:
        refuse_name("with_kv_cache", min(unknown))
    packed = cu_seqlens_q is not None
    tensors.check_dims("q", q, f"{'total_q' if packed else 'batch, seqlen_q'}, num_heads, head_dim")
    check.check_tensors_given(
        {"k_cache": k_cache, "v_cache": v_cache},
        {
            "k": k,
            "v": v,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "leftpad_k": leftpad_k,
            "cache_batch_idx": cache_batch_idx,
            "page_table": page_table,
            "cu_seqlens_q": cu_seqlens_q,
        },
    )
    if cu_seqlens_q is not None:
        check_features.check_vector("cu_seqlens_q", cu_seqlens_q, None)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check.flag("rotary_interleaved", rotary_interleaved)
    if (k is None) != (v is None):
        raise ValueError("k and v go together: both are appended, or neither")
    if k is not None:
        tensors.check_dims("k", k, f"{'total_q' if packed else 'batch, seqlen_new'}, num_heads_kv, head_dim")
        if packed and k.shape[0] != q.shape[0]:
            raise ValueError(
                f"k must be packed as q, with {q.shape[0]} rows, got {k.shape[0]}: cu_seqlens_q is about both"
            )
    for name, bound, needed, given in (
        ("max_seqlen_q", max_seqlen_q, "cu_seqlens_q", cu_seqlens_q),
        ("max_seqlen_k", max_seqlen_k, "cache_seqlens", cache_seqlens),
    ):
        if bound is not None and given is None:
            raise ValueError(f"{name} is only taken with {needed}")
    advance_query = check.causal_name(causal) != "none" or _is_limited(window)
    first = rotary_seqlens  # the first position, where the host knows it
    if first is None and leftpad_k is None:
        first = cache_seqlens
    if isinstance(cache_seqlens, Tensor):
        tensors.check_vectors({"cache_seqlens": cache_seqlens}, batch)
    elif cache_seqlens is not None:
        room, cache_seqlens = (
            cache_seqlens,
            tensors.vector_of("cache_seqlens", cache_seqlens, batch, q.device),
        )
        check_room(room, 0 if k is None or packed else k.shape[1], capacity_of(k_cache, page_table))
    if rotary_seqlens is not None:
        rotary_seqlens = tensors.vector_of("rotary_seqlens", rotary_seqlens, batch, q.device)
    seqused_k = cache_seqlens
    is_rotated = rotary_cos is not None or rotary_sin is not None or rotary_seqlens is not None
    if k is not None and rotary_cos is not None and first is not None and not isinstance(first, Tensor):
        rows = min(1, q.shape[0]) if packed else max(k.shape[1], q.shape[1] if advance_query else 0)
        check_positions(rotary_cos, first, rows)
    if out is not None or lse is not None:
        _check_results(q, k_cache, v_cache, {"k": k, "v": v}, out, lse)
    with dispatcher.between_launches(q) as between:
        if k is not None and v is not None:
            if cache_seqlens is None:
                raise ValueError("k and v are appended behind cache_seqlens rows, and cache_seqlens is None")
            rotated, seqused_k = append(
                Append(
                    k_cache,
                    v_cache,
                    k,
                    v,
                    cache_seqlens,
                    q if is_rotated else None,
                    advance_query,
                    rotary_cos,
                    rotary_sin,
                    rotary_interleaved,
                    rotary_seqlens,
                    cache_batch_idx,
                    page_table,
                    leftpad_k,
                    cu_seqlens_q,
                ),
                between,
            )
            q = rotated if is_rotated else q
        elif is_rotated:
            raise ValueError("rotary embedding is of k and v that are appended, and there are none")
        call = {
            "window": window,
            "mask": mask,
            "bias": bias,
            "prefix_lengths": prefix_lengths,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "seqused_k": seqused_k,
            "leftpad_k": leftpad_k,
            "page_table": page_table,
            "cache_batch_idx": cache_batch_idx,
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "num_splits": num_splits,
            "batch_invariant": batch_invariant,
            "out": out,
            "lse": lse,
        }
        output, softmax_lse = attend_cache(q, k_cache, v_cache, scale, causal, return_lse, row, call)
    return output if softmax_lse is None or not return_lse else (output, softmax_lse)


def _check_results(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: dict[str, Tensor | None],
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """What ``attention`` asks of ``out`` and ``lse``, before the cache is written to."""
    check.check_tensors_given({}, {"out": out, "lse": lse})
    *batch, seqlen, heads, _ = q.shape
    if out is not None:
        shape = (*q.shape[:-1], v_cache.shape[-1])
        results.check_result("out", out, shape, k_cache.dtype, ("q", q))
    if lse is not None:
        results.check_lse(lse, (*batch, heads, seqlen), ("q", q))
    results.check_apart_before({"out": out, "lse": lse}, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **new})


def _is_limited(window: tuple[int | None, int | None] | None) -> bool:
    return bool(window_sides(window))
