"""The op ``rotary``, and what appending rows to a cache shares with it."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments import check, check_features, results, tensors
from cutlass_fmha.cpu.features import check_starts
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.ops import dispatcher

OPTIONS = "*, bool interleaved=False, Tensor? cu_seqlens=None"
SCHEMA = f"rotary(Tensor x, Tensor cos, Tensor sin, Tensor positions, {OPTIONS}) -> Tensor"
SCHEMA_OUT = f"rotary_out(Tensor x, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) out, {OPTIONS}) -> ()"


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
            f"rotary_cos must have at most half of {name}'s head_dim {x.shape[-1]} as columns, got {cos.shape[1]}"
        )


def check_rows(name: str, x: Tensor, cos: Tensor) -> None:
    """Each row of ``x`` has a position of its own, wherever they begin."""
    if x.shape[1] > cos.shape[0] and x.numel() > 0:
        raise ValueError(f"rotary_cos must have a position for each of {name}'s {x.shape[1]} rows, got {cos.shape[0]}")


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


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> None:
    axes = "batch, seqlen" if cu_seqlens is None else "total"
    tensors.check_dims("x", x, f"{axes}, num_heads, head_dim")
    tensors.check_alike({"x": x})
    check_table(cos, sin, "x", x)
    tensors.check_device("x", x, {"positions": positions, "cu_seqlens": cu_seqlens})
    if cu_seqlens is None:
        check_rows("x", x, cos)
    else:
        check_features.check_vector("cu_seqlens", cu_seqlens, None)
    tensors.check_vectors({"positions": positions}, sequences_of(x, cu_seqlens))


def sequences_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many sequences rows are of: entries of the batch, or packed ones."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def rows_of(x: Tensor, cu_seqlens: Tensor | None) -> tuple[slice, Tensor, Tensor]:
    """On the CPU: the rows of x that sequences have; of each row its sequence, its number there."""
    if cu_seqlens is None:
        shape = x.shape[:2]
        return (
            slice(None),
            torch.arange(shape[0])[:, None].expand(shape),
            torch.arange(shape[1]).expand(shape),
        )
    begins = cu_seqlens.to(torch.int64)
    sequences = torch.repeat_interleave(torch.arange(len(begins) - 1), begins.diff())
    rows = torch.arange(int(begins[0]), int(begins[-1]))
    return slice(int(begins[0]), int(begins[-1])), sequences, rows - begins[sequences]


def rotation(x: Tensor, advance: bool, table: _C.Rotary, cu_seqlens: Tensor | None) -> _C.RotaryParams:
    """What the binding wants to know of rows to rotate into a contiguous tensor, but for addresses."""
    p = _C.RotaryParams()
    p.batch, p.seqlen, p.num_heads, p.head_dim = x.shape if x.dim() == 4 else (1, *x.shape)
    row = p.num_heads * p.head_dim
    p.x_stride, p.out_stride = helpers.strides(x), (p.seqlen * row, row, p.head_dim)
    p.advance, p.rotary = advance, table
    if cu_seqlens is not None:
        p.sequences = sequences_of(x, cu_seqlens)
    return p


def set_addresses(
    p: _C.RotaryParams,
    x: Tensor,
    out: Tensor,
    first: Tensor,
    before: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """Those of a ``rotation``. The sequences' first positions: first - before."""
    p.x, p.out, table = x.data_ptr(), out.data_ptr(), p.rotary
    p.first_position, p.before_position = first.data_ptr(), helpers.address(before)
    table.cos, table.sin = cos.data_ptr(), sin.data_ptr()
    if cu_seqlens is not None:
        p.cu_seqlens = cu_seqlens.data_ptr()


def _cuda(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    def prepare() -> helpers.Helper[_C.RotaryParams]:
        _check(x, cos, sin, positions, cu_seqlens)
        return helpers.helper("rotary", rotation(x, True, table_of(cos, sin, interleaved), cu_seqlens), x)

    plan = kept("rotary", (x, cos, sin, positions, interleaved, cu_seqlens), prepare)
    out = x.new_empty(x.shape)
    p = plan.params.copy()
    set_addresses(p, x, out, positions, None, cos, sin, cu_seqlens)
    helpers.launch(plan, p)
    return out


def _check_out(x: Tensor, out: Tensor) -> None:
    results.check_result("out", out, tuple(x.shape), x.dtype, ("x", x))


def _check_apart(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, out: Tensor, cu_seqlens: Tensor | None
) -> None:
    read = {"x": x, "cos": cos, "sin": sin, "positions": positions, "cu_seqlens": cu_seqlens}
    results.check_apart(results.placed({"out": out}), results.placed(read))


def _cuda_out(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> None:
    def prepare() -> helpers.Helper[_C.RotaryParams]:
        _check(x, cos, sin, positions, cu_seqlens)
        _check_out(x, out)
        p = rotation(x, True, table_of(cos, sin, interleaved), cu_seqlens)
        p.out_stride = helpers.strides(out)
        return helpers.helper("rotary", p, x)

    plan = kept("rotary_out", (x, cos, sin, positions, out, interleaved, cu_seqlens), prepare)
    _check_apart(x, cos, sin, positions, out, cu_seqlens)
    p = plan.params.copy()
    set_addresses(p, x, out, positions, None, cos, sin, cu_seqlens)
    helpers.launch(plan, p)


def _cpu_out(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> None:
    if dispatcher.simulated():
        return _cuda_out(x, cos, sin, positions, out, interleaved=interleaved, cu_seqlens=cu_seqlens)
    _check(x, cos, sin, positions, cu_seqlens)
    _check_out(x, out)
    _check_apart(x, cos, sin, positions, out, cu_seqlens)
    out.copy_(_cpu(x, cos, sin, positions, interleaved=interleaved, cu_seqlens=cu_seqlens))
    return None


def _fake_out(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> None:
    _check(x, cos, sin, positions, cu_seqlens)
    _check_out(x, out)


def _cpu(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    if dispatcher.simulated():
        return _cuda(x, cos, sin, positions, interleaved=interleaved, cu_seqlens=cu_seqlens)
    _check(x, cos, sin, positions, cu_seqlens)
    if cu_seqlens is not None:
        check_starts("cu_seqlens", cu_seqlens, x.shape[0])
    rows, sequences, numbers = rows_of(x, cu_seqlens)
    out = x.new_empty(x.shape)
    out[rows] = rotate(x[rows], cos, sin, positions.to(torch.int64)[sequences] + numbers, interleaved)
    return out


def _fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    _check(x, cos, sin, positions, cu_seqlens)
    return x.new_empty(x.shape)


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake})
dispatcher.register(SCHEMA_OUT, {"CUDA": _cuda_out, "CPU": _cpu_out, "fake": _fake_out})
dispatcher.register_writes("rotary_out", ("out",))
