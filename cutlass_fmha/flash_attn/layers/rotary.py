"""flash_attn.layers.rotary: rotary embedding with gradients, of packed rows too, and in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cutlass_fmha.flash_attn.flash_attn_interface import check_parts
from cutlass_fmha.flash_attn.ops.triton.rotary import apply_rotary, turn


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
    said: Any = {"cos": cos, "sin": sin, "interleaved": interleaved, "seqlen_offsets": seqlen_offsets}
    said |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    return _in_place(x, partial(apply_rotary, **said, inplace=True)) if inplace else apply_rotary(x, **said)


apply_rotary_emb_func = apply_rotary_emb


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Of each pair (a, b) of the last dimension (-b, a), by torch's operators."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """``apply_rotary_emb`` by torch's operators. cos, sin: a row for each of x's, [seqlen, rotary_dim / 2] or
    [batch, seqlen, rotary_dim / 2]."""
    width = 2 * cos.shape[-1]
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    turned = x[..., :width] * cos.unsqueeze(-2) + rotate_half(x[..., :width], interleaved) * sin.unsqueeze(-2)
    return torch.cat((turned, x[..., width:]), -1)


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
    if qkv.dim() == 4 and (num_heads_q is None or qkv.shape[2] < num_heads_q or (qkv.shape[2] - num_heads_q) % 2):
        raise ValueError(
            "qkv of 4 dimensions needs num_heads_q, how many of its heads are queries; half of the others "
            f"are keys: got {num_heads_q} of {qkv.shape[2]}"
        )
    rest: Any = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets, "inplace": True}
    return _in_place(qkv, partial(_turn_qk, (cos, sin), (cos_k, sin_k), num_heads_q, rest))


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates keys in place in [batch, seqlen, 2, num_heads, head_dim]."""
    rest: Any = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets, "inplace": True}
    return _in_place(kv, partial(_turn_k, (cos, sin), rest))


class RotaryEmbedding(nn.Module):
    """Rotary embedding in place, with tables that grow with what they are asked for.

    Args:
        dim: elements of a row that are rotated, an even number up to head_dim.
        base: the angle of pair r is position / base^(2r / dim).
        interleaved: pairs are neighbours, otherwise halves.
        scale_base: of xPos (Sun et al. 2022), whose queries shrink with the position as its keys grow; None:
            no scale. It is 1 in the middle of the table.
        device: of the frequencies.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        # Names that subclasses elsewhere know.
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _pairs(self, device: Any) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(self._pairs(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        return (self._pairs(device) / self.dim + 0.4) / 1.4

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Makes tables of that many positions, unless there are as long ones for the device and the dtype."""
        old = self._cos_cached
        if (
            old is not None
            and seqlen <= self._seq_len_cached
            and (old.device, old.dtype) == (device, dtype)
            and not (self.training and old.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        # In float32, also where the module was made another dtype.
        exact = self.inv_freq.dtype == torch.float32
        angles = torch.outer(positions, self.inv_freq if exact else self._compute_inv_freq(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self._compute_scale(device) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotates queries and keys in place, and returns what it was given.

        qkv: as ``apply_rotary_emb_qkv_``; with kv, [batch, seqlen, 2, num_heads, head_dim], the queries,
        [batch, seqlen, num_heads, head_dim], and (qkv, kv) is returned. seqlen_offset: the position of each
        sequence's first row, an int or a tensor [batch], with which max_seqlen says how many positions the
        tables need.

        Raises ValueError where there are no tables yet, and a tensor without max_seqlen; what
        ``apply_rotary_emb_qkv_`` raises.
        """
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor: pass max_seqlen, how many positions it leads to")
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        assert cos is not None and sin is not None
        rest: Any = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **rest)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **rest)
        keys = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
        return q, apply_rotary_emb_kv_(kv, *keys, **rest)


def _in_place(x: Tensor, turn: Any, conjugate: bool = False) -> Tensor:
    """``turn(x, conjugate=...)`` writes to x. Its gradient is turned back, by minus the angles."""
    if torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        out: Tensor = _InPlace.apply(x, turn, conjugate)  # type: ignore[no-untyped-call]
        return out
    turn(x, conjugate=conjugate)
    return x


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Any, conjugate: bool) -> Tensor:
        ctx.turn, ctx.conjugate = turn, conjugate
        # As there, a leaf may be written to as well: its gradient is that of what it was before.
        if not (x if x._base is None else x._base).is_leaf:
            ctx.mark_dirty(x)
        turn(x, conjugate=conjugate)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _in_place(grads[0].clone(), ctx.turn, not ctx.conjugate), None, None


def _turn_k(table: Any, rest: Any, kv: Tensor, *, conjugate: bool) -> None:
    check_parts("kv", kv, 2, 2)
    rest = {**rest, "conjugate": conjugate}
    apply_rotary(kv.select(2, 0), *table, **rest)


def _turn_qk(table: Any, table_k: Any, num_heads_q: int | None, rest: Any, qkv: Tensor, *, conjugate: bool) -> None:
    """By one table in one launch."""
    if qkv.dim() != 4 or num_heads_q is None:
        check_parts("qkv", qkv, 2, 3)
        q, k = qkv.select(2, 0), qkv.select(2, 1)  # of unbind's views a compiler lets nobody write one
    else:
        q, k = qkv.narrow(2, 0, num_heads_q), qkv.narrow(2, num_heads_q, (qkv.shape[2] - num_heads_q) // 2)
    rest = {**rest, "conjugate": conjugate}
    if table_k[0] is None and table_k[1] is None:
        turn(q, k, *table, **rest)
        return
    apply_rotary(q, *table, **rest)
    apply_rotary(k, *(own if other is None else other for own, other in zip(table, table_k, strict=True)), **rest)
