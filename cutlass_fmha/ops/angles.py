"""What ops on queries and keys share: which rows there are, and the angles that each is turned by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast
from cutlass_fmha.arguments import check, check_features, tensors
from cutlass_fmha.cpu.features import check_starts
from cutlass_fmha.launch import helpers
from cutlass_fmha.ops.rotary import check_positions, check_rows, check_table, rotate, rows_of, table_of

#: Of a schema, as ``Angles`` has them.
SCHEMA = (
    "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, SymInt start=0, Tensor? offsets=None, "
    "Tensor? positions=None, Tensor? cu_seqlens=None, bool interleaved=False"
)


class Angles(NamedTuple):
    """Row i of a sequence has position start + offsets[sequence] + i, or its own of ``positions``.

    Its angles are row ``position`` of cos and sin, or position * inv_freq; without any, nothing is turned.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    inv_freq: Tensor | None = None
    start: int = 0
    offsets: Tensor | None = None
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    interleaved: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on: ``start`` is of a call."""
        return (*self[:3], *self[4:])

    @property
    def there(self) -> bool:
        return self.cos is not None or self.inv_freq is not None


def given(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    inv_freq: Tensor | None,
    interleaved: bool,
    offsets: Tensor | int | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    others: Mapping[str, object] | None = None,
) -> Angles:
    """What a public function is told, checked as far as an op's schema would not."""
    named = {"cos": cos, "sin": sin, "inv_freq": inv_freq, "positions": positions, "cu_seqlens": cu_seqlens}
    check.check_tensors_given({"q": q, "k": k}, {**named, **(others or {})})
    check.flag("interleaved", interleaved)
    if offsets is None or isinstance(offsets, Tensor):
        return Angles(cos, sin, inv_freq, 0, offsets, positions, cu_seqlens, interleaved)
    start = check.integer("offsets", offsets, ", an int32 tensor [batch] or None")
    if not -(2**31) <= start < 2**31:
        raise ValueError(f"offsets must fit in 32 bits, got {start}")
    if positions is not None:
        raise ValueError(BOTH)
    return Angles(cos, sin, inv_freq, start, None, positions, cu_seqlens, interleaved)


BOTH = "offsets and positions exclude each other: positions are those of all rows"


def sequences_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Rows without a batch are of one sequence, where nothing tells them apart."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    return x.shape[0] if x.dim() == 4 else 1


def check_qk(q: Tensor, k: Tensor, a: Angles) -> None:
    """Raises TypeError or ValueError, naming what is at fault."""
    check.check_tensors_given({"q": q, "k": k})
    if q.dim() not in (3, 4):
        raise ValueError(
            "q must have shape [batch, seqlen, num_heads, head_dim] or [total, num_heads, head_dim], "
            f"got {tuple(q.shape)}"
        )
    if k.dim() != q.dim():
        raise ValueError(f"k must have q's {q.dim()} dimensions, got shape {tuple(k.shape)}")
    tensors.check_alike({"q": q, "k": k})
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"k must have q's shape but for the heads, {tuple(q.shape[:-2])} and head_dim {q.shape[-1]}, "
            f"got {tuple(k.shape[:-2])} and {k.shape[-1]}"
        )
    if max(q.shape) > check.MAX_SEQLEN:
        raise ValueError(f"q must have sizes of 2**29 at most, got {tuple(q.shape)}")
    check_angles(q, a)


def check_angles(q: Tensor, a: Angles) -> None:
    """Angles for the rows of ``q``."""
    packed = q.dim() == 3
    vectors = {"offsets": a.offsets, "positions": a.positions, "cu_seqlens": a.cu_seqlens}
    tensors.check_device("q", q, {**vectors, "inv_freq": a.inv_freq})
    if a.cu_seqlens is not None:
        check_features.check_vector("cu_seqlens", a.cu_seqlens, None)
        if not packed:
            raise ValueError(f"q must be packed, [total, num_heads, head_dim], got shape {tuple(q.shape)}")
    if (a.cos is None) != (a.sin is None):
        raise ValueError("cos and sin go together")
    if a.cos is not None and a.inv_freq is not None:
        raise ValueError("cos and sin are a table of what inv_freq says: pass one of the two")
    if not a.there:
        if a.offsets is not None or a.positions is not None or a.start != 0:
            raise ValueError("offsets and positions are for angles: pass cos and sin, or inv_freq")
        return
    if a.offsets is not None and a.positions is not None:
        raise ValueError(BOTH)
    tensors.check_vectors({"offsets": a.offsets}, sequences_of(q, a.cu_seqlens))
    if (rows := a.positions) is not None:
        if rows.dtype != torch.int32 or rows.shape != q.shape[:-2]:
            raise ValueError(
                f"positions must be int32 with a number for each row, {tuple(q.shape[:-2])}, got "
                f"{check.dtype_name(rows.dtype)} of shape {tuple(rows.shape)}"
            )
        if a.start != 0:
            raise ValueError(BOTH)
    if a.inv_freq is not None:
        _check_frequencies(a.inv_freq, q)
    elif a.cos is not None and a.sin is not None:
        check_table(a.cos, a.sin, "q", q)
        if a.positions is None and a.cu_seqlens is None:
            check_rows("q", q if q.dim() == 4 else q[None], a.cos)


def _check_frequencies(inv_freq: Tensor, q: Tensor) -> None:
    tensors.check_dims("inv_freq", inv_freq, "rotary_dim / 2")
    tensors.check_rows("inv_freq", inv_freq)
    if inv_freq.dtype != torch.float32 or 2 * inv_freq.shape[0] > q.shape[-1]:
        raise ValueError(
            f"inv_freq must be float32, of at most half of q's head_dim {q.shape[-1]}, got "
            f"{check.dtype_name(inv_freq.dtype)} of shape {tuple(inv_freq.shape)}"
        )


def check_start(q: Tensor, a: Angles) -> None:
    """Where the host knows the positions, the table must have them."""
    if a.cos is not None and a.offsets is None and a.positions is None:
        rows = q.shape[1] if q.dim() == 4 else q.shape[0]
        if q.numel() > 0:
            check_positions(a.cos, a.start, rows if a.cu_seqlens is None else 1)


# ---- on the CPU --------------------------------------------------------------------------------------------


def computed_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_and_positions(q: Tensor, a: Angles) -> tuple[slice, Tensor]:
    """The rows that sequences have, and the position of each."""
    if a.cu_seqlens is not None:
        check_starts("cu_seqlens", a.cu_seqlens, q.shape[0])
    single = q.dim() == 3 and a.cu_seqlens is None
    rows, sequences, numbers = rows_of(q[None] if single else q, a.cu_seqlens)
    if a.positions is not None:
        return rows, a.positions[rows].to(torch.int64)
    if single:
        sequences, numbers = sequences[0], numbers[0]
    first = 0 if a.offsets is None else a.offsets.to(torch.int64)[sequences]
    return rows, a.start + first + numbers


def turn(x: Tensor, positions: Tensor, a: Angles, inverse: bool = False) -> Tensor:
    """Rows [..., num_heads, head_dim] at int64 positions [...], by their angles or by minus those."""
    if a.cos is not None and a.sin is not None:
        return rotate(x, a.cos, -a.sin if inverse else a.sin, positions, a.interleaved)
    if a.inv_freq is None:
        return x
    # The angle is a float32 number, as tables have it.
    angles = (positions.float()[..., None] * a.inv_freq).to(computed_in(x)).flatten(0, -2)
    number = torch.arange(len(angles)).view(positions.shape)
    sin = angles.sin()
    return rotate(x, angles.cos(), -sin if inverse else sin, number, a.interleaved)


# ---- for the kernels ---------------------------------------------------------------------------------------


def describe(p: _C.RopeParams, q: Tensor, a: Angles) -> None:
    """What the binding wants to know of rows and angles, but for addresses."""
    p.batch, p.seqlen = q.shape[:2] if q.dim() == 4 else (1, q.shape[0])
    p.head_dim = q.shape[-1]
    if a.cu_seqlens is not None:
        p.sequences = sequences_of(q, a.cu_seqlens)
    if a.positions is not None:
        of_batch, of_row = a.positions.stride() if q.dim() == 4 else (0, *a.positions.stride())
        p.positions_stride = of_batch, of_row
    if a.cos is not None and a.sin is not None:
        p.rotary = table_of(a.cos, a.sin, a.interleaved)
    elif a.inv_freq is not None:
        p.rotary.dim, p.rotary.interleaved = 2 * a.inv_freq.shape[0], a.interleaved


def describe_rows(rows: _C.RopeRows, x: Tensor, out: Tensor) -> None:
    rows.num_heads, rows.head_dim = x.shape[-2:]
    rows.x_stride, rows.out_stride = helpers.strides(x), helpers.strides(out)


def set_angles(p: _C.RopeParams, a: Angles) -> None:
    """A call's own."""
    p.start = a.start
    for field, tensor in (
        ("first_position", a.offsets),
        ("positions", a.positions),
        ("cu_seqlens", a.cu_seqlens),
        ("inv_freq", a.inv_freq),
    ):
        if tensor is not None:
            setattr(p, field, tensor.data_ptr())
    if a.cos is not None and a.sin is not None:
        p.rotary.cos, p.rotary.sin = a.cos.data_ptr(), a.sin.data_ptr()


# ---- autocast ----------------------------------------------------------------------------------------------


def casts(dtype: torch.dtype, *args: Any, **said: Any) -> autocast.Arguments:
    """As of elementwise ops, nothing is cast; but a table in another dtype loses nothing in float32."""
    own = args[0].dtype
    for name in ("cos", "sin"):
        if isinstance(said.get(name), Tensor) and said[name].dtype != own:
            said[name] = autocast.cast(said[name], torch.float32)
    return args, said
