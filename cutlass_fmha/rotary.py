"""Rotary embedding, RoFormer (Su et al. 2021): pairs of elements, turned by angles that the position has."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha.arguments import check, check_features, results, tensors
from cutlass_fmha.ops import angles, dispatcher
from cutlass_fmha.ops.rotary import check_positions, sequences_of


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | int,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates queries or keys: the pair (a, b) number r becomes (a cos - b sin, a sin + b cos).

    ``with_kv_cache`` does it to new keys and queries by itself.

    Args:
        x: [batch, seqlen, num_heads, head_dim], or with cu_seqlens [total, num_heads, head_dim]; float16,
            bfloat16 or float32 (on the CPU also float64), any strides with a contiguous last dimension.
        cos, sin: [positions, rotary_dim / 2] of x's dtype or float32: row p is for position p, column r for
            pair r. rotary_dim, any even number up to head_dim, is how many elements of a row are rotated.
        positions: int32 [batch], the position of each sequence's first row; those of the others follow it. An
            int is that of all sequences.
        interleaved: pairs are elements 2r and 2r + 1; otherwise r and r + rotary_dim / 2.
        cu_seqlens: int32 [batch + 1], where the sequences of a packed x begin. Rows of none are undefined in
            the output.
        out: of x's shape and dtype, contiguous in its last dimension: written to and returned. It shares no
            memory with another tensor of the call, x included.

    Returns:
        ``out``, or a new contiguous tensor, computed in float32 and rounded once. The host does not read
        ``positions`` on a GPU: a row whose position cos and sin do not have becomes NaN as far as it is
        rotated, and nothing outside of them is read.

    Raises:
        TypeError: an argument is of another type.
        ValueError: shapes, dtypes or devices that do not fit, or a row whose position the host knows, from an
            int or a tensor on the CPU, and cos and sin do not have; the sentence says which.
        NotImplementedError: an input requires a gradient.
    """
    check.check_tensors_given({"x": x, "cos": cos, "sin": sin}, {"cu_seqlens": cu_seqlens, "out": out})
    check.flag("interleaved", interleaved)
    if cu_seqlens is not None:
        check_features.check_vector("cu_seqlens", cu_seqlens, None)
    if not isinstance(positions, Tensor):
        tensors.check_dims("x", x, f"{'batch, seqlen' if cu_seqlens is None else 'total'}, num_heads, head_dim")
        sequences = sequences_of(x, cu_seqlens)
        first, positions = positions, tensors.vector_of("positions", positions, sequences, x.device)
        check_positions(cos, first, x.shape[1] if cu_seqlens is None else min(1, x.shape[0]))
    if out is not None:
        torch.ops.cutlass_fmha.rotary_out(x, cos, sin, positions, out, interleaved=interleaved, cu_seqlens=cu_seqlens)
        return out
    output: Tensor = torch.ops.cutlass_fmha.rotary(
        x, cos, sin, positions, interleaved=interleaved, cu_seqlens=cu_seqlens
    )
    return output


def rotary_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    inv_freq: Tensor | None = None,
    interleaved: bool = False,
    offsets: Tensor | int | None = None,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inplace: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys as ``rotary`` does, in one launch.

    Args:
        q: [batch, seqlen, num_heads, head_dim] or packed, [total, num_heads, head_dim]; float16, bfloat16 or
            float32 (on the CPU also float64), any strides with a contiguous last dimension.
        k: the same rows, with num_heads_kv heads: any number.
        cos, sin: as ``rotary``.
        inv_freq: float32 [rotary_dim / 2], in place of cos and sin: the angle of pair r is position *
            inv_freq[r], rounded to float32 as in tables that are made so, which is good to positions of 2^24.
            Scalings of frequencies are the caller's.
        interleaved: as ``rotary``.
        offsets: int32 [batch] or an int, the position of each sequence's first row; None: 0. Those of the
            others follow it.
        positions: int32 [batch, seqlen] or [total], the position of each row, in place of offsets.
        cu_seqlens: int32 [batch + 1], where the sequences of packed rows begin; None: they are one.
        inplace: q and k are written to and returned; no two of their elements may share memory.
        out: (q, k) of their shapes and dtype, contiguous in the last dimension, to write to and return. They
            share no memory with another tensor of the call.

    Returns:
        ``out``, or new contiguous tensors (q, k), without ``inplace``; computed in float32 and rounded once.
        Rows of no sequence become 0; in place they are left alone. The host does not read offsets and
        positions on a GPU: a row whose position cos and sin do not have becomes NaN as far as it is rotated.

    Gradients of q and k, in reverse mode, of any order; not in place, nor with ``out``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: shapes, dtypes or devices that do not fit, or a row whose position the host knows and cos
            and sin do not have; the sentence says which.
        NotImplementedError: a gradient that there is not is wanted.
    """
    a = angles.given(q, k, cos, sin, inv_freq, interleaved, offsets, positions, cu_seqlens)
    if check.flag("inplace", inplace) and out is not None:
        raise ValueError("inplace and out exclude each other: both say where the results go")
    if inplace:
        torch.ops.cutlass_fmha.rotary_qk_(q, k, **a._asdict())
        return q, k
    if out is not None:
        torch.ops.cutlass_fmha.rotary_qk_out(q, k, *results.pair_of(out), **a._asdict())
        return out
    one, other = dispatcher.call("rotary_qk", q, k, **a._asdict())
    return one, other
