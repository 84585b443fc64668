"""The ops ``rms_norm`` and ``rms_norm_backward``: RMSNorm (Zhang and Sennrich 2019), of a sum where asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast
from cutlass_fmha.arguments import check, results, tensors
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.launch.workspace import Scratch
from cutlass_fmha.ops import dispatcher, rows

TENSORS = "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual"
SCHEMA = (
    f"rms_norm({TENSORS}, float eps, float weight_offset, ScalarType? out_dtype, bool return_rstd=False) "
    "-> (Tensor out, Tensor sum, Tensor rstd)"
)
SCHEMA_OUT = f"rms_norm_out({TENSORS}, Tensor(a!) out, Tensor(b!)? sum, float eps, float weight_offset) -> ()"
SCHEMA_BACKWARD = (
    "rms_norm_backward(Tensor dout, Tensor? dsum, Tensor x, Tensor? weight, Tensor? bias, Tensor rstd, "
    "float weight_offset, bool[2] wanted=[True, True]) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)

#: Elements of a row.
MAX_DIM = 65536

#: Thread blocks of the backward that an SM has room for.
BLOCKS_PER_SM = 1

Three = tuple[Tensor, Tensor, Tensor]


def _check_factors(x: Tensor, weight: Tensor | None, bias: Tensor | None, weight_offset: float) -> None:
    """weight and bias of rows ``x``."""
    tensors.check_device("x", x, {"weight": weight, "bias": bias})
    for name, factor in (("weight", weight), ("bias", bias)):
        if factor is None:
            continue
        if factor.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape ({x.shape[-1]},), as x's rows, got {tuple(factor.shape)}")
        tensors.check_rows(name, factor)
        if factor.dtype not in (x.dtype, torch.float32):
            allowed = " or ".join(dict.fromkeys((check.dtype_name(x.dtype), "float32")))
            raise ValueError(f"{name} must have x's dtype {allowed}, got {check.dtype_name(factor.dtype)}")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise ValueError(
            f"bias must have weight's dtype {check.dtype_name(weight.dtype)}, got {check.dtype_name(bias.dtype)}"
        )
    if weight is None and weight_offset != 0.0:
        raise ValueError("weight_offset is added to weight, and there is none: pass weight")
    if not math.isfinite(weight_offset):
        raise ValueError(f"weight_offset must be finite, got {weight_offset}")


def _check_dtype(x: Tensor, dtype: torch.dtype) -> None:
    """That of the output."""
    allowed = check.CUDA_DTYPES if x.dtype == torch.float32 else (x.dtype, torch.float32)
    if dtype not in allowed:
        raise ValueError(
            f"out_dtype must be {' or '.join(map(check.dtype_name, dict.fromkeys(allowed)))} for "
            f"{check.dtype_name(x.dtype)}, got {check.dtype_name(dtype)}"
        )


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """The output's dtype. Raises TypeError or ValueError."""
    rows.check_rows("x", x, MAX_DIM)
    check.check_tensors_given({}, {"weight": weight, "bias": bias, "residual": residual})
    if residual is not None:
        rows.check_like("residual", residual, "x", x)
    tensors.check_alike({"x": x} if residual is None else {"x": x, "residual": residual})
    _check_factors(x, weight, bias, weight_offset)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be 0 or more, and finite, got {eps}")
    dtype = x.dtype if out_dtype is None else out_dtype
    _check_dtype(x, dtype)
    return dtype


def _empty(x: Tensor, residual: Tensor | None, dtype: torch.dtype, return_rstd: bool) -> Three:
    """Results to be written; those that nobody asked for are empty."""
    rstd = x.shape[:-1] if return_rstd else (0,)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(rstd, dtype=rows.computed_in(x.dtype)),
    )


# ---- forward -----------------------------------------------------------------------------------------------


def _prepare(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
) -> helpers.Helper[_C.RmsNormParams]:
    p = _C.RmsNormParams()
    p.sizes, p.dim = rows.sizes(x), x.shape[-1]
    p.x_stride = rows.strides(x)
    if residual is not None:
        p.residual_stride = rows.strides(residual)
    made = torch.empty(x.shape, device="meta")
    p.out_stride = p.sum_stride = rows.strides(made)
    p.eps, p.weight_offset = eps, weight_offset
    p.out_type = check.dtype_name(dtype)
    factor = bias if weight is None else weight
    p.weight_type = check.dtype_name(x.dtype if factor is None else factor.dtype)
    return helpers.helper("rms_norm", p, x)


def _launch(
    plan: helpers.Helper[_C.RmsNormParams],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    sum: Tensor | None,
    rstd: Tensor | None,
) -> None:
    p = plan.params.copy()
    p.x, p.out = x.data_ptr(), out.data_ptr()
    p.weight, p.bias = helpers.address(weight), helpers.address(bias)
    p.residual, p.sum, p.rstd = helpers.address(residual), helpers.address(sum), helpers.address(rstd)
    helpers.launch(plan, p)


def _cuda(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    return_rstd: bool = False,
) -> Three:
    def prepare() -> tuple[helpers.Helper[_C.RmsNormParams], torch.dtype]:
        dtype = _check(x, weight, bias, residual, eps, weight_offset, out_dtype)
        given = rows.as_rows(x), weight, bias, None if residual is None else rows.as_rows(residual)
        return _prepare(*given, eps, weight_offset, dtype), dtype

    said = (x, weight, bias, residual, eps, weight_offset, out_dtype)
    plan, dtype = kept("rms_norm", said, prepare)
    found = _empty(x, residual, dtype, return_rstd)
    if x.dim() > rows.LEADING + 1:
        x, residual = rows.as_rows(x), None if residual is None else rows.as_rows(residual)
    sum, rstd = None if residual is None else found[1], found[2] if return_rstd else None
    _launch(plan, x, weight, bias, residual, found[0], sum, rstd)
    return found


def _check_out(x: Tensor, residual: Tensor | None, out: Tensor, sum: Tensor | None) -> None:
    _check_dtype(x, out.dtype)
    results.check_result("out", out, tuple(x.shape), out.dtype, ("x", x))
    if (sum is None) != (residual is None):
        raise ValueError("sum is written where there is a residual: pass both or neither")
    if sum is not None:
        results.check_result("sum", sum, tuple(x.shape), x.dtype, ("x", x))
    for name, to in (("out", out), ("sum", sum)):
        if to is not None and to.dim() > rows.LEADING + 1 and not to.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with more than {rows.LEADING} leading dimensions, "
                f"got strides {tuple(to.stride())}"
            )


def _check_apart(given: dict[str, Tensor | None], to: dict[str, Tensor | None]) -> None:
    results.check_apart(results.placed(to), results.placed(given))


def _cuda_out(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    sum: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    def prepare() -> helpers.Helper[_C.RmsNormParams]:
        _check(x, weight, bias, residual, eps, weight_offset, None)
        _check_out(x, residual, out, sum)
        given = rows.as_rows(x), weight, bias, None if residual is None else rows.as_rows(residual)
        plan = _prepare(*given, eps, weight_offset, out.dtype)
        plan.params.out_stride = rows.strides(rows.as_rows(out))
        if sum is not None:
            plan.params.sum_stride = rows.strides(rows.as_rows(sum))
        return plan

    plan = kept("rms_norm_out", (x, weight, bias, residual, out, sum, eps, weight_offset), prepare)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    _check_apart(given, {"out": out, "sum": sum})
    residual = None if residual is None else rows.as_rows(residual)
    _launch(plan, rows.as_rows(x), weight, bias, residual, out, sum, None)


def _cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    return_rstd: bool = False,
) -> Three:
    if dispatcher.simulated():
        return _cuda(x, weight, bias, residual, eps, weight_offset, out_dtype, return_rstd)
    dtype = _check(x, weight, bias, residual, eps, weight_offset, out_dtype)
    compute = rows.computed_in(x.dtype)
    out, sum, rstd = _empty(x, residual, dtype, return_rstd)
    if residual is not None:
        torch.add(x, residual, out=sum)
        x = sum
    numbers = x.to(compute)
    factor = (numbers.square().mean(-1) + eps).rsqrt()
    y = numbers * factor.unsqueeze(-1)
    if weight is not None:
        y = y * (weight.to(compute) + weight_offset)
    if bias is not None:
        y = y + bias.to(compute)
    out.copy_(y)
    return out, sum, rstd.copy_(factor) if return_rstd else rstd


def _cpu_out(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    sum: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    if dispatcher.simulated():
        return _cuda_out(x, weight, bias, residual, out, sum, eps, weight_offset)
    _fake_out(x, weight, bias, residual, out, sum, eps, weight_offset)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    _check_apart(given, {"out": out, "sum": sum})
    found = _cpu(x, weight, bias, residual, eps, weight_offset, out.dtype)
    out.copy_(found[0])
    if sum is not None:
        sum.copy_(found[1])
    return None


def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    return_rstd: bool = False,
) -> Three:
    dtype = _check(x, weight, bias, residual, eps, weight_offset, out_dtype)
    return _empty(x, residual, dtype, return_rstd)


def _fake_out(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    sum: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    _check(x, weight, bias, residual, eps, weight_offset, None)
    _check_out(x, residual, out, sum)


# ---- backward ----------------------------------------------------------------------------------------------


def _check_backward(
    dout: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
) -> None:
    rows.check_rows("x", x, MAX_DIM)
    given = {"dout": dout, "dsum": dsum}
    check.check_tensors_given({"dout": dout, "rstd": rstd}, {"dsum": dsum, "weight": weight, "bias": bias})
    tensors.check_device("x", x, {**given, "rstd": rstd})
    tensors.check_alike({"x": x} if dsum is None else {"x": x, "dsum": dsum})
    _check_factors(x, weight, bias, weight_offset)
    for name, gradient in given.items():
        if gradient is not None:
            rows.check_like(name, gradient, "x", x)
            tensors.check_rows(name, gradient)
    _check_dtype(x, dout.dtype)
    wanted = rows.computed_in(x.dtype)
    if rstd.shape != x.shape[:-1] or rstd.dtype != wanted or not rstd.is_contiguous():
        raise ValueError(
            f"rstd must be {check.dtype_name(wanted)} {tuple(x.shape[:-1])}, contiguous, "
            f"got {check.dtype_name(rstd.dtype)} {tuple(rstd.shape)}"
        )


def _empty_gradients(x: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Sequence[bool]) -> Three:
    """Of weight and bias, empty where nobody wants them."""
    dweight, dbias = (
        torch.empty_like(factor, memory_format=torch.contiguous_format)
        if factor is not None and need
        else x.new_empty(0)
        for factor, need in zip((weight, bias), wanted, strict=True)
    )
    return x.new_empty(x.shape), dweight, dbias


def _prepare_backward(
    dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, weight_offset: float, wanted: bool
) -> helpers.Helper[_C.RmsNormBackwardParams]:
    p = _C.RmsNormBackwardParams()
    p.sizes, p.dim = rows.sizes(x), x.shape[-1]
    p.x_stride, p.dout_stride = rows.strides(x), rows.strides(dout)
    p.dx_stride = rows.strides(torch.empty(x.shape, device="meta"))
    if dsum is not None:
        p.dsum_stride = rows.strides(dsum)
    p.weight_offset = weight_offset
    p.out_type = check.dtype_name(dout.dtype)
    p.weight_type = check.dtype_name(x.dtype if weight is None else weight.dtype)
    p.parts = helpers.resident_blocks(x, BLOCKS_PER_SM)
    return helpers.helper("rms_norm_backward", p, x)


def _cuda_backward(
    dout: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    wanted: Sequence[bool] = (True, True),
) -> Three:
    of_weight = weight is not None and wanted[0]

    def prepare() -> helpers.Helper[_C.RmsNormBackwardParams]:
        _check_backward(dout, dsum, x, weight, bias, rstd, weight_offset)
        first, other = rows.as_rows(dout), None if dsum is None else rows.as_rows(dsum)
        return _prepare_backward(first, other, rows.as_rows(x), weight, weight_offset, of_weight)

    said = (dout, dsum, x, weight, bias, rstd, weight_offset, of_weight)
    plan = kept("rms_norm_backward", said, prepare)
    dx, dweight, dbias = found = _empty_gradients(x, weight, bias, wanted)
    if dbias.numel():
        dims = list(range(dout.dim() - 1))
        dbias.copy_(torch.sum(dout, dims, dtype=torch.float32) if dims else dout)
    if x.numel() == 0:
        dweight.zero_()
        return found
    if x.dim() > rows.LEADING + 1:
        dout, x = rows.as_rows(dout), rows.as_rows(x)
        dsum = None if dsum is None else rows.as_rows(dsum)
    p = plan.params.copy()
    p.dout, p.dsum, p.x, p.dx = dout.data_ptr(), helpers.address(dsum), x.data_ptr(), dx.data_ptr()
    p.weight, p.rstd = helpers.address(weight), rstd.data_ptr()
    if not of_weight:
        helpers.launch(plan, p)
        return found
    p.dweight = dweight.data_ptr()
    with Scratch(x.device) as scratch:
        p.partial = scratch.floats(p.partial_floats())
        helpers.launch(plan, p)
    return found


def _cpu_backward(
    dout: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    wanted: Sequence[bool] = (True, True),
) -> Three:
    if dispatcher.simulated():
        return _cuda_backward(dout, dsum, x, weight, bias, rstd, weight_offset, wanted)
    _check_backward(dout, dsum, x, weight, bias, rstd, weight_offset)
    compute = rows.computed_in(x.dtype)
    dx, dweight, dbias = _empty_gradients(x, weight, bias, wanted)
    normal, gradient = x.to(compute) * rstd.unsqueeze(-1), dout.to(compute)
    scaled = gradient if weight is None else gradient * (weight.to(compute) + weight_offset)
    found = rstd.unsqueeze(-1) * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    dx.copy_(found if dsum is None else found + dsum.to(compute))
    leading = list(range(x.dim() - 1))
    for to, terms in ((dweight, gradient * normal), (dbias, gradient)):
        if to.numel():
            to.copy_(terms.sum(leading) if leading else terms)
    return dx, dweight, dbias


def _fake_backward(
    dout: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    wanted: Sequence[bool] = (True, True),
) -> Three:
    _check_backward(dout, dsum, x, weight, bias, rstd, weight_offset)
    return _empty_gradients(x, weight, bias, wanted)


def _casts(
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *rest: Any,
) -> autocast.Arguments:
    """Autocast's rule for sums, as of ``gated``: nothing is cast where x and residual have one dtype."""
    given = x, weight, bias, residual
    if residual is not None and residual.dtype != x.dtype:
        given = tuple(autocast.cast(each, torch.float32) for each in given)  # type: ignore[assignment]
    return (*given, *rest), {}


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, _casts)
dispatcher.register(SCHEMA_OUT, {"CUDA": _cuda_out, "CPU": _cpu_out, "fake": _fake_out}, _casts)
dispatcher.register_writes("rms_norm_out", ("out", "sum"))
dispatcher.register(SCHEMA_BACKWARD, {"CUDA": _cuda_backward, "CPU": _cpu_backward, "fake": _fake_backward})


# ---- autograd ----------------------------------------------------------------------------------------------


def _keep(ctx: Any, given: Sequence[Any], found: Three) -> None:
    x, weight, bias, residual, _, ctx.weight_offset, *_ = given
    _, sum, rstd = found
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x if residual is None else sum, weight, bias, rstd)
    ctx.residual = residual is not None
    ctx.dtype = found[0].dtype


def _gradients(ctx: Any, dout: Tensor | None, dsum: Tensor | None, drstd: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:5]
    dsum = dsum if ctx.residual else None
    if dout is None:  # the sum alone was used
        dout = torch.zeros(x.shape, dtype=ctx.dtype, device=x.device)
    dx, dweight, dbias = dispatcher.call(
        "rms_norm_backward",
        dispatcher.rows_of_gradient(dout),
        None if dsum is None else dispatcher.rows_of_gradient(dsum),
        x,
        weight,
        bias,
        rstd,
        ctx.weight_offset,
        [needs[1], needs[2]],
    )
    found = (dx, dweight, dbias, dx)
    return tuple(each if need else None for each, need in zip(found, needs, strict=True))


rows.differentiable("rms_norm", _keep, _gradients, lambda given: (*given[:7], True))
dispatcher.register_once("rms_norm_backward", "rms_norm")
