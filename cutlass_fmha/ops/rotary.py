"""The op ``rotary``, and what appending rows to a cache shares with it."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments import check, tensors
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.ops import dispatcher

SCHEMA = "rotary(Tensor x, Tensor cos, Tensor sin, Tensor positions, *, bool interleaved=False) -> Tensor"


def check_table(cos: Tensor, sin: Tensor, name: str, x: Tensor) -> None:
    """cos and sin for the rows of ``x``, which ``name`` names."""
    tensors.check_device(name, x, {"rotary_cos": cos, "rotary_sin": sin})
    for table_name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        tensors.check_dims(table_name, table, "positions, rotary_dim / 2")
        tensors.check_rows(table_name, table)
        if table.dtype not in (x.dtype, torch.float32):
            raise ValueError(
                f"{table_name} must have {name}'s dtype {check.dtype_name(x.dtype)} or float32, "
                f"got {check.dtype_name(table.dtype)}"
            )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"rotary_sin must have rotary_cos's shape {tuple(cos.shape)} and dtype "
            f"{check.dtype_name(cos.dtype)}, got {tuple(sin.shape)} and {check.dtype_name(sin.dtype)}"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"rotary_cos must have at most half of {name}'s head_dim {x.shape[-1]} as columns, "
            f"got {cos.shape[1]}"
        )


def check_rows(name: str, x: Tensor, cos: Tensor) -> None:
    """Each row of ``x`` has a position of its own, wherever they begin."""
    if x.shape[1] > cos.shape[0] and x.numel() > 0:
        raise ValueError(
            f"rotary_cos must have a position for each of {name}'s {x.shape[1]} rows, got {cos.shape[0]}"
        )


def check_positions(cos: Tensor, first: int, rows: int) -> None:
    """``rows`` positions from ``first`` on."""
    tensors.check_dims("rotary_cos", cos, "positions, rotary_dim / 2")
    if rows > 0 and not 0 <= first <= cos.shape[0] - rows:
        raise ValueError(
            f"rotary_cos has positions 0 to {cos.shape[0] - 1}, and a row has position "
            f"{first if first < 0 else first + rows - 1}"
        )


def table_of(cos: Tensor, sin: Tensor, interleaved: bool) -> _C.Rotary:
    """The binding's view of a table, but for addresses."""
    table = _C.Rotary()
    table.cos_stride, table.sin_stride = cos.stride(0), sin.stride(0)
    table.positions, table.dim = cos.shape[0], 2 * cos.shape[1]
    table.interleaved, table.float32 = interleaved, cos.dtype == torch.float32
    return table


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """What the kernels compute, on CPU tensors: x [..., num_heads, head_dim] at int64 positions [...]."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if positions.numel():
        least = int(positions.min())
        check_positions(cos, least, int(positions.max()) - least + 1)
    c, s = (table.to(dtype)[positions].unsqueeze(-2) for table in (cos, sin))
    dim = 2 * cos.shape[1]
    rotated = x[..., :dim].to(dtype)
    halves = rotated[..., : dim // 2], rotated[..., dim // 2 :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else halves
    turned = (a * c - b * s, a * s + b * c)
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((pairs.to(x.dtype), x[..., dim:]), -1)


# ---- the op ------------------------------------------------------------------------------------------------


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    tensors.check_dims("x", x, "batch, seqlen, num_heads, head_dim")
    tensors.check_alike({"x": x})
    check_table(cos, sin, "x", x)
    check_rows("x", x, cos)
    tensors.check_device("x", x, {"positions": positions})
    tensors.check_vectors({"positions": positions}, x.shape[0])


def rotation(x: Tensor, advance: bool, table: _C.Rotary) -> _C.RotaryParams:
    """What the binding wants to know of rows to rotate into a contiguous tensor, but for addresses and what
    sequences packed ones are."""
    p = _C.RotaryParams()
    p.batch, p.seqlen, p.num_heads, p.head_dim = x.shape if x.dim() == 4 else (1, *x.shape)
    row = p.num_heads * p.head_dim
    p.x_stride, p.out_stride = helpers.strides(x), (p.seqlen * row, row, p.head_dim)
    p.advance, p.rotary = advance, table
    return p


def set_addresses(
    p: _C.RotaryParams,
    x: Tensor,
    out: Tensor,
    first: Tensor,
    before: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Those of a ``rotation``. The rows' first positions: first - before."""
    p.x, p.out = x.data_ptr(), out.data_ptr()
    p.first_position, p.before_position = first.data_ptr(), helpers.address(before)
    p.rotary.cos, p.rotary.sin = cos.data_ptr(), sin.data_ptr()


def _cuda(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    def prepare() -> helpers.Helper[_C.RotaryParams]:
        _check(x, cos, sin, positions)
        return helpers.helper("rotary", rotation(x, True, table_of(cos, sin, interleaved)), x)

    plan = kept("rotary", (x, cos, sin, positions, interleaved), prepare)
    out = x.new_empty(x.shape)
    p = plan.params.copy()
    set_addresses(p, x, out, positions, None, cos, sin)
    helpers.launch(plan, p)
    return out


def _cpu(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    if dispatcher.simulated():
        return _cuda(x, cos, sin, positions, interleaved=interleaved)
    _check(x, cos, sin, positions)
    following = positions.to(torch.int64)[:, None] + torch.arange(x.shape[1])
    return rotate(x, cos, sin, following, interleaved)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    _check(x, cos, sin, positions)
    return x.new_empty(x.shape)


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake})
