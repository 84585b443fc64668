"""The ops ``rotary_qk``, ``rotary_qk_`` and ``rotary_qk_out``: queries and keys rotated by one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import _C, private_torch
from cutlass_fmha.arguments import results
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.ops import angles, dispatcher
from cutlass_fmha.ops.angles import Angles

#: inverse: by minus the angles, which is the gradient.
SCHEMA = f"rotary_qk(Tensor q, Tensor k, *, {angles.SCHEMA}, bool inverse=False) -> (Tensor q, Tensor k)"
SCHEMA_IN_PLACE = f"rotary_qk_(Tensor(a!) q, Tensor(b!) k, *, {angles.SCHEMA}, bool inverse=False) -> ()"
SCHEMA_OUT = (
    f"rotary_qk_out(Tensor q, Tensor k, Tensor(a!) q_out, Tensor(b!) k_out, *, {angles.SCHEMA}, "
    "bool inverse=False) -> ()"
)

IN_PLACE = (
    "inplace is not taken where a gradient is wanted, and q or k requires one: call without it, under "
    "torch.no_grad() or with detached tensors"
)


def _check(q: Tensor, k: Tensor, a: Angles) -> None:
    angles.check_qk(q, k, a)
    if not a.there:
        raise ValueError("there is nothing to rotate by: pass cos and sin, or inv_freq")


def _check_written(q: Tensor, k: Tensor, out: dict[str, Tensor], a: Angles) -> None:
    """``out``: what q and k become, under the names that a caller knows."""
    _check(q, k, a)
    for (name, to), x in zip(out.items(), (q, k), strict=True):
        results.check_result(name, to, tuple(x.shape), x.dtype, ("q", q))


def _check_apart(out: dict[str, Tensor], read: dict[str, Tensor], a: Angles) -> None:
    names = ("cos", "sin", "inv_freq", "offsets", "positions", "cu_seqlens")
    angles_read = {name: getattr(a, name) for name in names}
    results.check_apart(results.placed(out), results.placed({**read, **angles_read}))


def _prepare(
    q: Tensor, k: Tensor, out: tuple[Tensor, Tensor], a: Angles, inverse: bool
) -> helpers.Helper[_C.RopeParams]:
    p = _C.RopeParams()
    angles.describe(p, q, a)
    p.inverse = inverse
    for rows, x, to in ((p.q, q, out[0]), (p.k, k, out[1])):
        angles.describe_rows(rows, x, to)
    return helpers.helper("rope", p, q)


def _launch(plan: helpers.Helper[_C.RopeParams], q: Tensor, k: Tensor, out: tuple[Tensor, Tensor], a: Angles) -> None:
    p = plan.params.copy()
    angles.set_angles(p, a)
    p.q.x, p.k.x = q.data_ptr(), k.data_ptr()
    p.q.out, p.k.out = out[0].data_ptr(), out[1].data_ptr()
    helpers.launch(plan, p)


def _cuda(q: Tensor, k: Tensor, *, inverse: bool = False, **said: Any) -> tuple[Tensor, Tensor]:
    a = Angles(**said)

    def prepare() -> helpers.Helper[_C.RopeParams]:
        _check(q, k, a)
        out = q.new_empty(q.shape, device="meta"), k.new_empty(k.shape, device="meta")
        return _prepare(q, k, out, a, inverse)

    plan = kept("rotary_qk", (q, k, *a.key, inverse), prepare)
    angles.check_start(q, a)
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch(plan, q, k, out, a)
    return out


def _cuda_into(q: Tensor, k: Tensor, out: dict[str, Tensor], read: dict[str, Tensor], a: Angles, inverse: bool) -> None:
    to = one, other = tuple(out.values())

    def prepare() -> helpers.Helper[_C.RopeParams]:
        _check_written(q, k, out, a)
        return _prepare(q, k, (one, other), a, inverse)

    name = "rotary_qk_out" if read else "rotary_qk_"
    plan = kept(name, (q, k, *(to if read else ()), *a.key, inverse), prepare)
    angles.check_start(q, a)
    _check_apart(out, read, a)
    _launch(plan, q, k, (one, other), a)


def _cuda_in_place(q: Tensor, k: Tensor, *, inverse: bool = False, **said: Any) -> None:
    _cuda_into(q, k, {"q": q, "k": k}, {}, Angles(**said), inverse)


def _cuda_out(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, *, inverse: bool = False, **said: Any) -> None:
    _cuda_into(q, k, results.both(q_out, k_out), {"q": q, "k": k}, Angles(**said), inverse)


def _cpu(q: Tensor, k: Tensor, *, inverse: bool = False, **said: Any) -> tuple[Tensor, Tensor]:
    if dispatcher.simulated():
        return _cuda(q, k, inverse=inverse, **said)
    a = Angles(**said)
    _check(q, k, a)
    angles.check_start(q, a)
    rows, positions = angles.rows_and_positions(q, a)
    out = q.new_zeros(q.shape), k.new_zeros(k.shape)
    for x, to in ((q, out[0]), (k, out[1])):
        to[rows] = angles.turn(x[rows], positions, a, inverse)
    return out


def _cpu_in_place(q: Tensor, k: Tensor, *, inverse: bool = False, **said: Any) -> None:
    if dispatcher.simulated():
        return _cuda_in_place(q, k, inverse=inverse, **said)
    a = Angles(**said)
    _check_written(q, k, {"q": q, "k": k}, a)
    angles.check_start(q, a)
    _check_apart({"q": q, "k": k}, {}, a)
    rows, positions = angles.rows_and_positions(q, a)
    for x in (q, k):
        x[rows] = angles.turn(x[rows], positions, a, inverse)
    return None


def _cpu_out(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, *, inverse: bool = False, **said: Any) -> None:
    if dispatcher.simulated():
        return _cuda_out(q, k, q_out, k_out, inverse=inverse, **said)
    a, out = Angles(**said), results.both(q_out, k_out)
    _check_written(q, k, out, a)
    _check_apart(out, {"q": q, "k": k}, a)
    for to, x in zip((q_out, k_out), _cpu(q, k, inverse=inverse, **said), strict=True):
        to.copy_(x)
    return None


def _fake(q: Tensor, k: Tensor, *, inverse: bool = False, **said: Any) -> tuple[Tensor, Tensor]:
    a = Angles(**said)
    _check(q, k, a)
    angles.check_start(q, a)
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_in_place(q: Tensor, k: Tensor, *, inverse: bool = False, **said: Any) -> None:
    a = Angles(**said)
    _check_written(q, k, {"q": q, "k": k}, a)
    angles.check_start(q, a)


def _fake_out(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, *, inverse: bool = False, **said: Any) -> None:
    a = Angles(**said)
    _check_written(q, k, results.both(q_out, k_out), a)
    angles.check_start(q, a)


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, angles.casts)
dispatcher.register(
    SCHEMA_IN_PLACE, {"CUDA": _cuda_in_place, "CPU": _cpu_in_place, "fake": _fake_in_place}, angles.casts
)
dispatcher.register(SCHEMA_OUT, {"CUDA": _cuda_out, "CPU": _cpu_out, "fake": _fake_out}, angles.casts)
dispatcher.register_writes("rotary_qk_", ("q", "k"))
dispatcher.register_writes("rotary_qk_out", ("q_out", "k_out"))


# ---- autograd ----------------------------------------------------------------------------------------------


class _RotaryQK(dispatcher.Differentiable):
    """The gradient is turned back: the op itself, which so has gradients of every order."""

    @staticmethod
    def forward(keyset: Any, said: dict[str, Any], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        op = torch.ops.cutlass_fmha.rotary_qk.default
        found: tuple[Tensor, Tensor] = private_torch.after_autograd(op, keyset, q, k, **said)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, said, _, _ = inputs
        given = {name: x for name, x in said.items() if isinstance(x, Tensor)}
        ctx.save_for_backward(*given.values())
        ctx.names, ctx.said = tuple(given), {name: x for name, x in said.items() if name not in given}

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        said = {**ctx.said, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}
        said["inverse"] = not said.get("inverse", False)
        return (
            None,
            None,
            *dispatcher.call("rotary_qk", *map(dispatcher.rows_of_gradient, (dq, dk)), **said),
        )


def _autograd(keyset: Any, q: Tensor, k: Tensor, **said: Any) -> tuple[Tensor, Tensor]:
    others = dispatcher.tensors_of(said)
    found: tuple[Tensor, Tensor]
    if not dispatcher.needs_gradient(q, k, *others.values()):
        op = torch.ops.cutlass_fmha.rotary_qk.default
        found = private_torch.after_autograd(op, keyset, q, k, **said)
        return found
    dispatcher.check_differentiable(keyset, {"q": q, "k": k}, others)
    found = _RotaryQK.apply(keyset, said, q, k)  # type: ignore[no-untyped-call]
    return found


def _autograd_in_place(keyset: Any, q: Tensor, k: Tensor, **said: Any) -> None:
    if dispatcher.needs_gradient(q, k, *dispatcher.tensors_of(said).values()):
        raise NotImplementedError(IN_PLACE)
    private_torch.after_autograd(torch.ops.cutlass_fmha.rotary_qk_.default, keyset, q, k, **said)


dispatcher.register_gradients("rotary_qk", _autograd)
dispatcher.register_gradients("rotary_qk_", _autograd_in_place)
