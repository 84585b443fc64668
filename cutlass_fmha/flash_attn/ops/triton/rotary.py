"""flash_attn.ops.triton.rotary: rotary embedding; flash_attn.layers.rotary has gradients in place, too."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha.arguments import check, tensors
from cutlass_fmha.contiguous import contiguous_rows
from cutlass_fmha.ops import dispatcher
from cutlass_fmha.ops.angles import Angles


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """``x``, [batch, seqlen, num_heads, head_dim], or packed [total, ...] with cu_seqlens, rotated.

    As flash_attn.layers.rotary.apply_rotary_emb. conjugate: by minus the angles. inplace: x is written and
    returned, which NotImplementedError says no to where a gradient is wanted.
    """
    check.check_tensors_given({"x": x})
    rest = (seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace, conjugate)
    return turn(x, x[..., :0, :], cos, sin, *rest)[0]


def turn(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both, in one launch. Where there is only one, k has no heads."""
    check.check_tensors_given({"cos": cos, "sin": sin}, {"cu_seqlens": cu_seqlens})
    if cu_seqlens is None:
        tensors.check_dims("x", q, "batch, seqlen, num_heads, head_dim")
        seqlen = q.shape[1]
    elif max_seqlen is None:
        raise ValueError("cu_seqlens is only taken with max_seqlen, which says how long a table must be")
    else:
        seqlen = int(max_seqlen)
    tables = (table if table.dtype == q.dtype else table.float() for table in (cos, sin))
    cos, sin = (table.detach().contiguous() for table in tables)  # which have no gradients
    said = Angles(cos, sin, cu_seqlens=cu_seqlens, interleaved=interleaved)
    if isinstance(seqlen_offsets, Tensor):
        # Positions beyond the table are those of rows of (1, 0) behind it: no host has to look at them.
        rest = (seqlen, cos.shape[1])
        said = said._replace(
            offsets=seqlen_offsets.clamp(max=cos.shape[0]).to(torch.int32).contiguous(),
            cos=torch.cat((cos, cos.new_ones(rest))),
            sin=torch.cat((sin, sin.new_zeros(rest))),
        )
    elif check.integer("seqlen_offsets", seqlen_offsets, " or an int32 tensor") + seqlen > cos.shape[0]:
        raise ValueError(
            f"cos and sin have {cos.shape[0]} positions, and {seqlen} rows begin at position {seqlen_offsets}"
        )
    else:
        said = said._replace(start=seqlen_offsets)
    dense: tuple[Tensor, Tensor] = (contiguous_rows("x", q), contiguous_rows("x", k))
    # A compiler finds out by itself what need not be copied, and traces the gradient of a copy only.
    copied = torch.compiler.is_compiling() and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if not inplace or copied:
        dense = dispatcher.call("rotary_qk", *dense, **said._asdict(), inverse=conjugate)
        if not inplace:
            return dense
    else:
        torch.ops.cutlass_fmha.rotary_qk_(*dense, **said._asdict(), inverse=conjugate)
    for x, written in zip((q, k), dense, strict=True):
        if written is not x:  # a copy
            x.copy_(written)
    return q, k
