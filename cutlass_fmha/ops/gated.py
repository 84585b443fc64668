"""The ops ``gated`` and ``gated_backward``: an activation of one half of a projection times the other."""

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
from cutlass_fmha.ops import dispatcher, rows

SCHEMA = "gated(Tensor gate, Tensor? up, str activation) -> Tensor"
SCHEMA_OUT = "gated_out(Tensor gate, Tensor? up, Tensor(a!) out, str activation) -> ()"
SCHEMA_BACKWARD = (
    "gated_backward(Tensor dout, Tensor gate, Tensor? up, str activation, bool product=False) "
    "-> (Tensor dgate, Tensor dup, Tensor product)"
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: Elements of a row.
MAX_DIM = 2**29

Three = tuple[Tensor, Tensor, Tensor]


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up: without the latter they are the halves of gate's rows."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def _names(up: Tensor | None) -> tuple[str, str]:
    return ("x", "x") if up is None else ("gate", "up")


def _check(gate: Tensor, up: Tensor | None, activation: str) -> tuple[int, ...]:
    """The output's shape. Raises TypeError or ValueError."""
    name = _names(up)[0]
    rows.check_rows(name, gate, MAX_DIM)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(
                f"x must have rows of gate and up, an even number of elements, got shape {tuple(gate.shape)}"
            )
        tensors.check_alike({"x": gate})
        return (*gate.shape[:-1], gate.shape[-1] // 2)
    check.check_optional_tensor("up", up)
    rows.check_like("up", up, "gate", gate)
    tensors.check_alike({"gate": gate, "up": up})
    return tuple(gate.shape)


# ---- forward -----------------------------------------------------------------------------------------------


def _one_row(shape: Sequence[int], *given: Tensor) -> bool:
    """Whether tensors of this shape are some elements one after the other."""
    return 0 < math.prod(shape) < 2**31 and all(x.is_contiguous() for x in given)


def _describe(p: Any, gate: Tensor, up: Tensor, others: dict[str, Tensor], activation: str) -> None:
    """Sizes and strides, of the halves and of ``others`` by the names of their strides."""
    given = {"gate_stride": gate, "up_stride": up, **others}
    p.activation = activation
    if _one_row(gate.shape, *given.values()):
        p.sizes, p.dim = (1, 1, 1), gate.numel()
        return
    p.sizes, p.dim = rows.sizes(gate), gate.shape[-1]
    for name, x in given.items():
        setattr(p, name, rows.strides(x))


def _as_rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    first, second = _halves(rows.as_rows(gate), None if up is None else rows.as_rows(up))
    return first, second


def _prepare(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> helpers.Helper[_C.GatedParams]:
    p = _C.GatedParams()
    _describe(p, gate, up, {"out_stride": out}, activation)
    return helpers.helper("gated", p, gate)


def _launch(plan: helpers.Helper[_C.GatedParams], gate: Tensor, up: Tensor | None, out: Tensor) -> None:
    first, second = _as_rows(gate, up)
    p = plan.params.copy()
    p.gate, p.up, p.out = first.data_ptr(), second.data_ptr(), out.data_ptr()
    helpers.launch(plan, p)


def _cuda(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    def prepare() -> tuple[helpers.Helper[_C.GatedParams], tuple[int, ...]]:
        shape = _check(gate, up, activation)
        halves = _as_rows(gate, up)
        return _prepare(*halves, torch.empty(halves[0].shape, device="meta"), activation), shape

    plan, shape = kept("gated", (gate, up, activation), prepare)
    out = gate.new_empty(shape)
    _launch(plan, gate, up, out)
    return out


def _check_out(gate: Tensor, shape: tuple[int, ...], out: Tensor, name: str) -> None:
    results.check_result("out", out, shape, gate.dtype, (name, gate))
    if out.dim() > rows.LEADING + 1 and not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous with more than {rows.LEADING} leading dimensions, "
            f"got strides {tuple(out.stride())}"
        )


def _check_apart(gate: Tensor, up: Tensor | None, out: Tensor) -> None:
    first, second = _names(up)
    results.check_apart(results.placed({"out": out}), results.placed({first: gate, second: gate if up is None else up}))


def _cuda_out(gate: Tensor, up: Tensor | None, out: Tensor, activation: str) -> None:
    def prepare() -> helpers.Helper[_C.GatedParams]:
        _check_out(gate, _check(gate, up, activation), out, _names(up)[0])
        return _prepare(*_as_rows(gate, up), rows.as_rows(out), activation)

    plan = kept("gated_out", (gate, up, out, activation), prepare)
    _check_apart(gate, up, out)
    _launch(plan, gate, up, out)


def _activation(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def _slope(x: Tensor, activation: str) -> Tensor:
    """The activation's derivative."""
    if activation == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    inner, step = x, torch.ones_like(x)
    if activation == "gelu_tanh":
        c = 2 * math.sqrt(2 / math.pi)
        inner, step = c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x * x)
    s = torch.sigmoid(inner)
    return s * (1 + x * (1 - s) * step)


def _cpu(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if dispatcher.simulated():
        return _cuda(gate, up, activation)
    out = gate.new_empty(_check(gate, up, activation))
    compute = rows.computed_in(gate.dtype)
    first, second = (x.to(compute) for x in _halves(gate, up))
    return out.copy_(_activation(first, activation) * second)


def _cpu_out(gate: Tensor, up: Tensor | None, out: Tensor, activation: str) -> None:
    if dispatcher.simulated():
        return _cuda_out(gate, up, out, activation)
    _fake_out(gate, up, out, activation)
    _check_apart(gate, up, out)
    out.copy_(_cpu(gate, up, activation))
    return None


def _fake(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    return gate.new_empty(_check(gate, up, activation))


def _fake_out(gate: Tensor, up: Tensor | None, out: Tensor, activation: str) -> None:
    _check_out(gate, _check(gate, up, activation), out, _names(up)[0])


# ---- backward ----------------------------------------------------------------------------------------------


def _check_backward(dout: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[int, ...]:
    shape = _check(gate, up, activation)
    check.check_tensor("dout", dout)
    if tuple(dout.shape) != shape:
        raise ValueError(f"dout must have shape {shape}, got {tuple(dout.shape)}")
    tensors.check_alike({_names(up)[0]: gate, "dout": dout})
    return shape


def _empty_gradients(gate: Tensor, up: Tensor | None, shape: tuple[int, ...], product: bool) -> Three:
    dup = gate.new_empty(0 if up is None else shape)
    return gate.new_empty(gate.shape), dup, gate.new_empty(shape if product else 0)


def _cuda_backward(dout: Tensor, gate: Tensor, up: Tensor | None, activation: str, product: bool = False) -> Three:
    def prepare() -> tuple[helpers.Helper[_C.GatedBackwardParams], tuple[int, ...]]:
        shape = _check_backward(dout, gate, up, activation)
        (first, second), to = _as_rows(gate, up), torch.empty(gate.shape, device="meta")
        dgate, dup = _as_rows(to, None if up is None else to)
        p = _C.GatedBackwardParams()
        others = {"dout_stride": rows.as_rows(dout), "dgate_stride": dgate, "dup_stride": dup}
        others["out_stride"] = torch.empty(first.shape, device="meta")
        _describe(p, first, second, others, activation)
        return helpers.helper("gated_backward", p, gate), shape

    plan, shape = kept("gated_backward", (dout, gate, up, activation), prepare)
    found = _empty_gradients(gate, up, shape, product)
    (first, second), upstream = _as_rows(gate, up), rows.as_rows(dout)  # may be copies: kept until the launch
    dgate, dup = _halves(found[0], None if up is None else found[1])
    p = plan.params.copy()
    p.dout, p.gate, p.up = upstream.data_ptr(), first.data_ptr(), second.data_ptr()
    p.dgate, p.dup, p.out = dgate.data_ptr(), dup.data_ptr(), found[2].data_ptr() if product else 0
    helpers.launch(plan, p)
    return found


def _cpu_backward(dout: Tensor, gate: Tensor, up: Tensor | None, activation: str, product: bool = False) -> Three:
    if dispatcher.simulated():
        return _cuda_backward(dout, gate, up, activation, product)
    shape = _check_backward(dout, gate, up, activation)
    found = _empty_gradients(gate, up, shape, product)
    compute = rows.computed_in(gate.dtype)
    first, second = (x.to(compute) for x in _halves(gate, up))
    dgate, dup = _halves(found[0], None if up is None else found[1])
    of, gradient = _activation(first, activation), dout.to(compute)
    dgate.copy_(gradient * second * _slope(first, activation))
    dup.copy_(gradient * of)
    if product:
        found[2].copy_(of * second)
    return found


def _fake_backward(dout: Tensor, gate: Tensor, up: Tensor | None, activation: str, product: bool = False) -> Three:
    return _empty_gradients(gate, up, _check_backward(dout, gate, up, activation), product)


def _casts(dtype: torch.dtype, gate: Tensor, up: Tensor | None, *rest: Any) -> autocast.Arguments:
    """Autocast's rule for products: the wider of two dtypes, and nothing is cast where they are the same."""
    if up is not None and torch.float32 in (gate.dtype, up.dtype):
        gate, up = autocast.cast(gate, torch.float32), autocast.cast(up, torch.float32)
    return (gate, up, *rest), {}


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, _casts)
dispatcher.register(SCHEMA_OUT, {"CUDA": _cuda_out, "CPU": _cpu_out, "fake": _fake_out}, _casts)
dispatcher.register_writes("gated_out", ("out",))
dispatcher.register(SCHEMA_BACKWARD, {"CUDA": _cuda_backward, "CPU": _cpu_backward, "fake": _fake_backward})


# ---- autograd ----------------------------------------------------------------------------------------------


def _keep(ctx: Any, given: Sequence[Any], found: Tensor) -> None:
    gate, up, ctx.activation = given
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    dgate, dup, _ = dispatcher.call("gated_backward", dispatcher.rows_of_gradient(dout), gate, up, ctx.activation)
    needs = ctx.needs_input_grad[1:3]
    return dgate if needs[0] else None, dup if needs[1] else None


rows.differentiable("gated", _keep, _gradients)
dispatcher.register_once("gated_backward", "a gated unit")
