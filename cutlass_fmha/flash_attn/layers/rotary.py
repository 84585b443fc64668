"""flash_attn.layers.rotary: rotary embedding with gradients, of packed rows too, and in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_fmha.attention import contiguous_rows
from cutlass_fmha.rotary import rotary


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """``x``, [batch, seqlen, num_heads, head_dim], or packed [total, ...] with cu_seqlens, rotated.

    cos, sin: [positions, rotary_dim / 2]. seqlen_offsets: the position of each sequence's first row, int or
    int32 or int64 [batch]. A row that a tensor of offsets leads beyond the table is left as it is, as
    flash_attn does it; ``cutlass_fmha.rotary`` makes NaN of it. inplace: x is written, and returned.

    Raises ValueError where offsets are an int and lead beyond the table; what ``cutlass_fmha.rotary`` raises.
    """
    if cu_seqlens is not None and max_seqlen is None:
        raise ValueError("cu_seqlens is only taken with max_seqlen, which says how long a table must be")
    out: Tensor = _Rotate.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)  # type: ignore[no-untyped-call]
    return out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates queries and keys in place in [batch, seqlen, 3, num_heads, head_dim], or in [batch, seqlen,
    num_heads_q + 2 num_heads_kv, head_dim] with num_heads_q. Keys may have a table of their own."""
    if qkv.dim() == 4 and num_heads_q is None:
        raise ValueError("qkv of 4 dimensions needs num_heads_q, how many of its heads are queries")
    tables = (cos, sin, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    out: Tensor = _RotateParts.apply(qkv, *tables, interleaved, seqlen_offsets, num_heads_q)  # type: ignore[no-untyped-call]
    return out


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates keys in place in [batch, seqlen, 2, num_heads, head_dim]."""
    out: Tensor = _RotateParts.apply(kv, None, None, cos, sin, interleaved, seqlen_offsets, None)  # type: ignore[no-untyped-call]
    return out


def _rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    seqlen = x.shape[1] if cu_seqlens is None or max_seqlen is None else int(max_seqlen)
    cos, sin = (table if table.dtype == x.dtype else table.float() for table in (cos, sin))
    cos, sin = cos.contiguous(), sin.contiguous()
    if isinstance(offsets, Tensor):
        # Positions beyond the table are those of rows of (1, 0) behind it: no host has to look at them.
        offsets = offsets.clamp(max=cos.shape[0]).to(torch.int32).contiguous()
        rest = (seqlen, cos.shape[1])
        cos, sin = torch.cat((cos, cos.new_ones(rest))), torch.cat((sin, sin.new_zeros(rest)))
    elif offsets + seqlen > cos.shape[0]:
        raise ValueError(
            f"cos and sin have {cos.shape[0]} positions, and {seqlen} rows begin at position {offsets}"
        )
    return rotary(contiguous_rows("x", x), cos, sin, offsets, interleaved=interleaved, cu_seqlens=cu_seqlens)


class _Rotate(torch.autograd.Function):
    """The gradient is turned back: by the same angles, with -sin."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        inplace: bool,
        offsets: int | Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor:
        ctx.tables, ctx.rest = (cos, sin), (interleaved, offsets, cu_seqlens, max_seqlen)
        out = _rotated(x, cos, sin, *ctx.rest)
        if not inplace:
            return out
        ctx.mark_dirty(x)
        return x.copy_(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.tables
        return _rotated(grads[0], cos, -sin, *ctx.rest), *[None] * 7


class _RotateParts(torch.autograd.Function):
    """Queries and keys, or keys alone, in place in one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cos_k: Tensor,
        sin_k: Tensor,
        interleaved: bool,
        offsets: int | Tensor,
        num_heads_q: int | None,
    ) -> Tensor:
        ctx.tables, ctx.rest = ((cos, sin), (cos_k, sin_k)), (interleaved, offsets)
        ctx.num_heads_q = num_heads_q
        ctx.mark_dirty(packed)
        return _turn_parts(packed, ctx.tables, num_heads_q, ctx.rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = tuple((cos, None if sin is None else -sin) for cos, sin in ctx.tables)
        return _turn_parts(grads[0].clone(), back, ctx.num_heads_q, ctx.rest), *[None] * 7


def _turn_parts(packed: Tensor, tables: Any, num_heads_q: int | None, rest: Any) -> Tensor:
    if packed.dim() == 5:
        parts = packed.unbind(2)[:-1]
    else:
        heads, heads_q = packed.shape[2], num_heads_q or 0
        parts = (packed[:, :, :heads_q], packed[:, :, heads_q : (heads + heads_q) // 2])
    for part, (cos, sin) in zip(parts, tables[-len(parts) :], strict=True):
        part.copy_(_rotated(part, cos, sin, *rest))
    return packed
