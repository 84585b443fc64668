"""RMSNorm of queries and keys, rotary embedding, and a cache's new rows, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha.arguments import check, results, tensors
from cutlass_fmha.ops import angles, dispatcher
from cutlass_fmha.ops.append_kv import capacity_of, check_room
from cutlass_fmha.ops.rotary import check_positions


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    offsets: Tensor | int | None = None,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of q and k, then rotary embedding, in one launch; into a cache where there is one.

    Args:
        q: [batch, seqlen, num_heads, head_dim] or packed, [total, num_heads, head_dim]; float16, bfloat16 or
            float32 (on the CPU also float64), any strides with a contiguous last dimension.
        k: the same rows, with num_heads_kv heads.
        v: [..., num_heads_kv, head_dim_v], with a cache only, to which it goes as it is.
        q_weight, k_weight: [head_dim] of q's dtype or float32; None: 1, without weight_offset.
        cos, sin, inv_freq, interleaved, offsets, positions, cu_seqlens: as ``rotary_qk``. Without
            cos, sin and inv_freq nothing is rotated. With a cache a key's position is by default its number
            in its own sequence, cache_seqlens - leftpad_k and up.
        eps: x becomes x / sqrt(mean(x^2) + eps) (weight + weight_offset), computed in float32.
        weight_offset: 1 where weights are stored as their distance to 1, as Gemma's.
        k_cache, v_cache, cache_seqlens, cache_batch_idx, page_table, leftpad_k: as ``with_kv_cache``: k and v
            become rows cache_seqlens, cache_seqlens + 1, ... of each sequence.
        out: what is returned, to write to: of its shapes and dtypes, contiguous in the last dimension. It
            shares no memory with another tensor of the call, and is not taken where a gradient is wanted.

    Returns:
        ``out``, or new contiguous tensors (q, k); with a cache (q, seqused_k), the latter int32 [batch], rows
        in use after the call. All is computed in float32 and rounded once. Rows of no sequence become 0. As
        with ``rotary`` a row whose position cos and sin do not have becomes NaN as far as it is rotated, and
        as with ``with_kv_cache`` a key without a place is dropped; both raise where the host knows.

    Gradients of q, k, q_weight and k_weight, in reverse mode and once; not with a cache. They are the same
    bits in every run on one kind of device.

    Raises:
        TypeError, ValueError: as ``rotary_qk``.
        NotImplementedError: a gradient that there is not is wanted.
    """
    others = {
        "v": v,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_batch_idx": cache_batch_idx,
        "page_table": page_table,
        "leftpad_k": leftpad_k,
    }
    a = angles.given(q, k, cos, sin, inv_freq, interleaved, offsets, positions, cu_seqlens, others)
    norm = {
        "eps": check.number_of("eps", eps),
        "weight_offset": check.number_of("weight_offset", weight_offset),
    }
    weights = (q_weight, k_weight)
    if k_cache is None or v_cache is None:
        named = {"v": v, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
        named |= {"cache_batch_idx": cache_batch_idx, "page_table": page_table, "leftpad_k": leftpad_k}
        if found := [name for name, x in named.items() if x is not None]:
            raise ValueError(f"{found[0]} is for a cache: k_cache, v_cache, v and cache_seqlens go together")
        if out is not None:
            to = results.pair_of(out)
            torch.ops.cutlass_fmha.qk_norm_rope_out(q, k, *to, *weights, **norm, **a._asdict())
            return out
        one, other = dispatcher.call("qk_norm_rope", q, k, *weights, **norm, **a._asdict())
        return one, other
    if v is None or cache_seqlens is None:
        missing = "v" if v is None else "cache_seqlens"
        raise ValueError(f"{missing} is None, and k_cache, v_cache, v and cache_seqlens go together")
    if not isinstance(cache_seqlens, Tensor):
        room = cache_seqlens
        sequences = angles.sequences_of(q, cu_seqlens)
        cache_seqlens = tensors.vector_of("cache_seqlens", room, sequences, q.device)
        rows = k.shape[1] if k.dim() == 4 else min(1, k.shape[0])
        check_room(room, rows, capacity_of(k_cache, page_table))
        if cos is not None and offsets is None and positions is None and leftpad_k is None:
            check_positions(cos, room, rows)
    if not (offsets is None or isinstance(offsets, Tensor)):  # the op adds its start to cache_seqlens
        sequences = angles.sequences_of(q, cu_seqlens)
        a = a._replace(start=0, offsets=tensors.vector_of("offsets", offsets, sequences, q.device))
    given = (q, k, v, cache_seqlens, *weights)
    said = {**norm, "cache_batch_idx": cache_batch_idx, "page_table": page_table, "leftpad_k": leftpad_k}
    said |= a._asdict()
    if out is not None:
        torch.ops.cutlass_fmha.qk_norm_rope_append_out(k_cache, v_cache, *results.pair_of(out), *given, **said)
        return out
    one, other = torch.ops.cutlass_fmha.qk_norm_rope_append_(k_cache, v_cache, *given, **said)
    return one, other
