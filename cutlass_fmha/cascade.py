"""States: an output and the log-sum-exp of its scores. Two that saw different keys merge into one.

With a state for each of two sets of keys, the softmax over both is a mean of the outputs, weighted with the
exponentials of their log-sum-exps (Ye et al. 2024, Cascade Inference).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import autocast, private_torch
from cutlass_fmha.arguments import check, results, tensors
from cutlass_fmha.arguments.signature import lists_features, refuse_name
from cutlass_fmha.attention import attention
from cutlass_fmha.ops import dispatcher


def merge_states(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state over two sets of keys, from those over each: ``softmax([s_a, s_b]) @ [v_a; v_b]``.

    Args:
        o_a, o_b: [batch, seqlen_q, num_heads, head_dim_v] or packed [total_q, num_heads, head_dim_v],
            float16, bfloat16 or float32 (on the CPU also float64), any strides with a contiguous last
            dimension.
        lse_a, lse_b: float32 [batch, num_heads, seqlen_q] or [num_heads, total_q], any strides: natural logs,
            as ``attention`` returns them.
        out, lse: of o_a's and lse_a's shape and dtype, contiguous in their last dimension: written to and
            returned. They share no memory with another tensor of the call.

    Returns:
        The merged output, ``out`` or contiguous, of o_a's shape and dtype, computed in float32 and rounded
        once, and its LSE. A side whose LSE is -inf saw no key: the other one's bits are passed on. Where both
        are, the output is 0 and the LSE -inf. An LSE of +inf outweighs every finite one; two of them weigh
        the same.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the sentence says which.
        NotImplementedError: an input requires a gradient.
    """
    check.check_tensors_given({"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}, {"out": out, "lse": lse})
    if out is None and lse is None:
        output, softmax_lse = torch.ops.cutlass_fmha.merge_states(o_a, lse_a, o_b, lse_b)
        return output, softmax_lse
    out = o_a.new_empty(o_a.shape) if out is None else out
    lse = lse_a.new_empty(lse_a.shape) if lse is None else lse
    torch.ops.cutlass_fmha.merge_states_out(o_a, lse_a, o_b, lse_b, out, lse)
    return out, lse


@lists_features
def cascade_attention(
    q: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool | str | None = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over keys that all sequences of a batch share, such as a system prompt, and over their own.

    The shared keys are read once for all queries of the batch: they are one sequence of batch * seqlen_q
    queries to them. Its states are merged with those over each sequence's own keys.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], or packed [total_q, num_heads, head_dim] with cu_seqlens_q.
        k_shared, v_shared: [seqlen_shared, num_heads_kv, head_dim or head_dim_v]: keys before all others.
            Every query sees all of them.
        k, v: each sequence's own, as ``attention`` takes them.
        scale, softcap, num_splits, batch_invariant: as ``attention``, of both parts.
        causal: of the own keys alone, which may be none, or fewer than the queries.
        sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, page_table,
            cache_batch_idx: as ``attention``, of the own keys. Windows and ALiBi, which count keys across
            both parts, are not taken.
        return_lse: also return the LSE over all keys.
        out, lse: as ``attention``, but that lse may have any strides with a contiguous last dimension.

    Returns:
        As ``attention`` over both. Either part may be empty: the other's result is passed on bit for bit.

    Raises:
        TypeError, ValueError, UnsupportedError, NotImplementedError: as ``attention``.
    """
    if unknown:
        refuse_name("cascade_attention", min(unknown))
    check.flag("return_lse", return_lse)
    check.check_tensors_given({}, {"out": out, "lse": lse})
    if lse is not None and not return_lse:
        raise TypeError(results.LSE_ALONE)
    axes = "batch, seqlen_q, num_heads, head_dim" if cu_seqlens_q is None else "total_q, num_heads, head_dim"
    tensors.check_dims("q", q, axes)
    for name, tensor in (("k_shared", k_shared), ("v_shared", v_shared)):
        tensors.check_dims(name, tensor, "seqlen_shared, num_heads_kv, head_dim")
    both: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
        "return_lse": True,
    }
    own: dict[str, Any] = {
        "causal": causal,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "seqused_k": seqused_k,
        "leftpad_k": leftpad_k,
        "page_table": page_table,
        "cache_batch_idx": cache_batch_idx,
    }
    if private_torch.any_autocast_enabled() and autocast.dtype_of(q) is not None:
        # Both parts in one dtype: a cache of own keys says which.
        q, k, v, said = autocast.operands(q, k, v, own)
        k_shared, v_shared = autocast.cast(k_shared, q.dtype), autocast.cast(v_shared, q.dtype)
        with autocast.off(q.device.type):
            output, softmax_lse = _both_parts(q, k_shared, v_shared, k, v, both, said, (out, lse))
    else:
        output, softmax_lse = _both_parts(q, k_shared, v_shared, k, v, both, own, (out, lse))
    return (output, softmax_lse) if return_lse else output


def _both_parts(
    q: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    k: Tensor,
    v: Tensor,
    both: Mapping[str, Any],
    own: Mapping[str, Any],
    to: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """The merged state. ``both`` and ``own``: what ``attention`` is told of both parts, of the own one;
    ``to``: out and lse."""
    *batch, seqlen, heads, _ = q.shape
    _check(q, k_shared, v_shared, k, v, own, to)
    rows = q.reshape(1, math.prod(q.shape[:-2]), *q.shape[-2:])
    with dispatcher.between_launches(q) as room:
        states: list[dict[str, Any]] = [{}, {}]
        if room is not None and not dispatcher.needs_gradient(q, k_shared, v_shared, k, v):
            for state, x, lse_shape in (
                (states[0], rows, (1, heads, rows.shape[1])),
                (states[1], q, (*batch, heads, seqlen)),
            ):
                state["out"] = room.empty((*x.shape[:-1], v_shared.shape[-1]), q.dtype)
                state["lse"] = room.empty(lse_shape, torch.float32)
            room.hold()
        shared, shared_lse = attention(rows, k_shared.unsqueeze(0), v_shared.unsqueeze(0), **both, **states[0])
        found, found_lse = attention(q, k, v, **own, **both, **states[1])
        # [num_heads, batch, seqlen_q] or [num_heads, total_q]: the batch comes first in a state.
        shared_lse = shared_lse.view(heads, *q.shape[:-2])
        if q.dim() == 4:
            shared_lse = shared_lse.transpose(0, 1)
        return merge_states(shared.view(found.shape), shared_lse, found, found_lse, out=to[0], lse=to[1])


def _check(
    q: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    k: Tensor,
    v: Tensor,
    own: Mapping[str, Any],
    to: tuple[Tensor | None, Tensor | None],
) -> None:
    """What neither part knows, before one runs: that their outputs are alike, and where both are written to."""
    check.check_tensor("v", v)
    if v.dim() > 0 and v.shape[-1] != v_shared.shape[-1]:
        raise ValueError(f"v_shared must have v's head_dim (last dimension) {v.shape[-1]}, got {v_shared.shape[-1]}")
    out, lse = to
    if (out is None and lse is None) or torch.compiler.is_compiling():
        return
    read = {"q": q, "k_shared": k_shared, "v_shared": v_shared, "k": k, "v": v} | dispatcher.tensors_of(own)
    check.check_tensors_given(read)  # others have no address
    results.check_before(out, lse, q, v.shape[-1], q.dtype, read, any_strides=True)
