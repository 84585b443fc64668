"""The op ``qk_norm_rope``: RMSNorm of each head of q and k, and rotary, in one launch; its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import _C, private_torch
from cutlass_fmha.arguments import check, results, tensors
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.launch import helpers, workspace
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.ops import angles, dispatcher
from cutlass_fmha.ops.angles import Angles

NORM = "Tensor? q_weight=None, Tensor? k_weight=None, *, float eps=1e-06, float weight_offset=0., "
SCHEMA = f"qk_norm_rope(Tensor q, Tensor k, {NORM}{angles.SCHEMA}) -> (Tensor q, Tensor k)"
SCHEMA_BACKWARD = (
    f"qk_norm_rope_backward(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, {NORM}{angles.SCHEMA}) "
    "-> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)"
)
SCHEMA_OUT = f"qk_norm_rope_out(Tensor q, Tensor k, Tensor(a!) q_out, Tensor(b!) k_out, {NORM}{angles.SCHEMA}) -> ()"
#: Blocks of the backward that an SM has at a time: 128 registers to a thread.
BLOCKS_OF_SM = 4

Four = tuple[Tensor, Tensor, Tensor, Tensor]


class Norm(NamedTuple):
    """x becomes x / sqrt(mean(x^2) + eps) (weight + weight_offset), each head by itself; no weight: 1."""

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0

    @property
    def weights(self) -> dict[str, Tensor]:
        named = {"q_weight": self.q_weight, "k_weight": self.k_weight}
        return {name: x for name, x in named.items() if x is not None}


def _check_norm(q: Tensor, n: Norm) -> None:
    if not (0.0 <= n.eps < math.inf):
        raise ValueError(f"eps must be 0 or more, and finite, got {n.eps}")
    if not math.isfinite(n.weight_offset):
        raise ValueError(f"weight_offset must be finite, got {n.weight_offset}")
    tensors.check_device("q", q, n.weights)
    for name, weight in n.weights.items():
        check.check_tensor(name, weight)
        if tuple(weight.shape) != (q.shape[-1],):
            raise ValueError(f"{name} must have shape ({q.shape[-1]},), as q's heads, got {tuple(weight.shape)}")
        if weight.dtype not in (q.dtype, torch.float32):
            raise ValueError(
                f"{name} must have q's dtype {check.dtype_name(q.dtype)} or float32, "
                f"got {check.dtype_name(weight.dtype)}"
            )
        tensors.check_rows(name, weight)


def check_normed(q: Tensor, k: Tensor, n: Norm, a: Angles) -> None:
    angles.check_qk(q, k, a)
    _check_norm(q, n)


def describe(p: _C.RopeParams, q: Tensor, n: Norm, a: Angles) -> None:
    angles.describe(p, q, a)
    p.norm, p.eps, p.weight_offset = True, n.eps, n.weight_offset
    for rows, weight in ((p.q, n.q_weight), (p.k, n.k_weight)):
        rows.weight_float32 = weight is not None and weight.dtype == torch.float32


def set_norm(p: _C.RopeParams, n: Norm, a: Angles) -> None:
    angles.set_angles(p, a)
    p.q.weight, p.k.weight = helpers.address(n.q_weight), helpers.address(n.k_weight)


def normalized(x: Tensor, weight: Tensor | None, n: Norm) -> Tensor:
    """In float32 (of float64: that), not rounded."""
    x = x.to(angles.computed_in(x))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + n.eps)
    return x if weight is None else x * (weight.to(x.dtype) + n.weight_offset)


# ---- without a cache ---------------------------------------------------------------------------------------


def _cuda(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> tuple[Tensor, Tensor]:
    return _run(q, k, Norm(q_weight, k_weight, eps, weight_offset), Angles(**said))


def _run(q: Tensor, k: Tensor, n: Norm, a: Angles, given: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """A launch, whose results go to what is given, if anything is."""

    def prepare() -> helpers.Helper[_C.RopeParams]:
        check_normed(q, k, n, a)
        p = _C.RopeParams()
        describe(p, q, n, a)
        if given is not None:
            _check_out(q, k, given)
        to = given or [x.new_empty(x.shape, device="meta") for x in (q, k)]
        for rows, x, out in zip((p.q, p.k), (q, k), to, strict=True):
            angles.describe_rows(rows, x, out)
        return helpers.helper("rope", p, q)

    plan = kept("qk_norm_rope", (q, k, *n, *a.key, *(given or ())), prepare)
    angles.check_start(q, a)
    if given is not None:
        check_apart(results.both(*given), q, k, n, a)
    out = given or (q.new_empty(q.shape), k.new_empty(k.shape))
    p = plan.params.copy()
    set_norm(p, n, a)
    p.q.x, p.k.x, p.q.out, p.k.out = q.data_ptr(), k.data_ptr(), out[0].data_ptr(), out[1].data_ptr()
    helpers.launch(plan, p)
    return out


def _cpu(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> tuple[Tensor, Tensor]:
    if dispatcher.simulated():
        return _cuda(q, k, q_weight, k_weight, eps=eps, weight_offset=weight_offset, **said)
    n, a = Norm(q_weight, k_weight, eps, weight_offset), Angles(**said)
    check_normed(q, k, n, a)
    angles.check_start(q, a)
    rows, positions = angles.rows_and_positions(q, a)
    out = q.new_zeros(q.shape), k.new_zeros(k.shape)
    for x, weight, to in ((q, q_weight, out[0]), (k, k_weight, out[1])):
        to[rows] = angles.turn(normalized(x[rows], weight, n), positions, a).to(x.dtype)
    return out


def _fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> tuple[Tensor, Tensor]:
    a = Angles(**said)
    check_normed(q, k, Norm(q_weight, k_weight, eps, weight_offset), a)
    angles.check_start(q, a)
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _check_out(q: Tensor, k: Tensor, given: tuple[Tensor, Tensor]) -> None:
    for (name, to), x in zip(results.both(*given).items(), (q, k), strict=True):
        results.check_result(name, to, tuple(x.shape), x.dtype, ("q", q))


def check_apart(written: dict[str, Tensor], q: Tensor, k: Tensor, n: Norm, a: Angles) -> None:
    read = {"q": q, "k": k, **n.weights, **a._asdict()}
    results.check_apart(results.placed(written), results.placed(dispatcher.tensors_of(read)))


def _out(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> tuple[Tensor, Tensor, Norm, Angles, tuple[Tensor, Tensor]]:
    """What the op ``qk_norm_rope_out`` is told."""
    return q, k, Norm(q_weight, k_weight, eps, weight_offset), Angles(**said), (q_out, k_out)


def _cuda_out(*args: Any, **said: Any) -> None:
    _run(*_out(*args, **said))


def _cpu_out(*args: Any, **said: Any) -> None:
    q, k, n, a, given = _out(*args, **said)
    if dispatcher.simulated():
        _run(q, k, n, a, given)
        return
    _check_out(q, k, given)
    check_apart(results.both(*given), q, k, n, a)
    for to, x in zip(given, _cpu(q, k, **n._asdict(), **a._asdict()), strict=True):
        to.copy_(x)


def _fake_out(*args: Any, **said: Any) -> None:
    q, k, n, a, given = _out(*args, **said)
    check_normed(q, k, n, a)
    _check_out(q, k, given)
    angles.check_start(q, a)


# ---- backward ----------------------------------------------------------------------------------------------


def _check_backward(dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, n: Norm, a: Angles) -> None:
    check_normed(q, k, n, a)
    tensors.check_alike({"q": q, "dq_out": dq_out, "dk_out": dk_out})
    for name, x, like in (("dq_out", dq_out, q), ("dk_out", dk_out, k)):
        if x.shape != like.shape:
            raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(x.shape)}")


def _gradients(q: Tensor, k: Tensor, n: Norm) -> Four:
    """To be written; of a weight that there is not, an empty one."""
    weights = [q.new_empty(0) if w is None else w.new_empty(w.shape) for w in (n.q_weight, n.k_weight)]
    return q.new_empty(q.shape), k.new_empty(k.shape), weights[0], weights[1]


def _cuda_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> Four:
    n, a = Norm(q_weight, k_weight, eps, weight_offset), Angles(**said)

    def prepare() -> helpers.Helper[_C.RopeBackwardParams]:
        _check_backward(dq_out, dk_out, q, k, n, a)
        p = _C.RopeBackwardParams()
        describe(p, q, n, a)
        for rows, x, dy in ((p.q, q, dq_out), (p.k, k, dk_out)):
            angles.describe_rows(rows, x, x.new_empty(x.shape, device="meta"))
            rows.gradient_stride = helpers.strides(dy)
        p.parts = BLOCKS_OF_SM * devices.of_index(q.get_device()).sm_count if q.is_cuda else BLOCKS_OF_SM
        return helpers.helper("rope_backward", p, q)

    plan = kept("qk_norm_rope_backward", (dq_out, dk_out, q, k, *n, *a.key), prepare)
    angles.check_start(q, a)
    p = plan.params.copy()
    set_norm(p, n, a)
    found = _gradients(q, k, n)
    p.q.x, p.k.x, p.q.out, p.k.out = q.data_ptr(), k.data_ptr(), found[0].data_ptr(), found[1].data_ptr()
    p.q.gradient, p.k.gradient = dq_out.data_ptr(), dk_out.data_ptr()
    with workspace.Scratch(q.device) as scratch:
        kept_alive = []
        for rows, x, weight, gradient in ((p.q, q, q_weight, found[2]), (p.k, k, k_weight, found[3])):
            if x.numel() == 0:
                gradient.zero_()  # there are no rows that leave parts
            elif weight is not None:
                kept_alive.append(scratch.empty((p.parts_of(rows), q.shape[-1]), torch.float32))
                rows.partial, rows.weight_gradient = kept_alive[-1].data_ptr(), gradient.data_ptr()
        scratch.check()
        helpers.launch(plan, p)
    return found


def _cpu_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> Four:
    if dispatcher.simulated():
        return _cuda_backward(dq_out, dk_out, q, k, q_weight, k_weight, eps=eps, weight_offset=weight_offset, **said)
    n, a = Norm(q_weight, k_weight, eps, weight_offset), Angles(**said)
    _check_backward(dq_out, dk_out, q, k, n, a)
    angles.check_start(q, a)
    rows, positions = angles.rows_and_positions(q, a)
    found = _gradients(q, k, n)
    for x, dy, weight, dx, dw in (
        (q, dq_out, q_weight, found[0], found[2]),
        (k, dk_out, k_weight, found[1], found[3]),
    ):
        dtype = angles.computed_in(x)
        own = x[rows].to(dtype)
        turned = angles.turn(dy[rows].to(dtype), positions, a, inverse=True)
        per_norm = torch.rsqrt(own.square().mean(-1, keepdim=True) + eps)
        normal = own * per_norm
        by_weight = turned if weight is None else turned * (weight.to(dtype) + weight_offset)
        dx.zero_()
        dx[rows] = (per_norm * (by_weight - normal * (by_weight * normal).mean(-1, keepdim=True))).to(x.dtype)
        if weight is not None:
            dw.copy_((turned * normal).flatten(0, -2).sum(0))
    return found


def _fake_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **said: Any,
) -> Four:
    n = Norm(q_weight, k_weight, eps, weight_offset)
    _check_backward(dq_out, dk_out, q, k, n, Angles(**said))
    return _gradients(q, k, n)


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, angles.casts)
dispatcher.register(
    SCHEMA_BACKWARD, {"CUDA": _cuda_backward, "CPU": _cpu_backward, "fake": _fake_backward}, angles.casts
)
dispatcher.register(SCHEMA_OUT, {"CUDA": _cuda_out, "CPU": _cpu_out, "fake": _fake_out}, angles.casts)
dispatcher.register_writes("qk_norm_rope_out", ("q_out", "k_out"))


# ---- autograd ----------------------------------------------------------------------------------------------


class _QKNormRope(dispatcher.Differentiable):
    """Keeps what came in: the norms are computed anew."""

    @staticmethod
    def forward(
        keyset: Any,
        said: dict[str, Any],
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        op = torch.ops.cutlass_fmha.qk_norm_rope.default
        found: tuple[Tensor, Tensor] = private_torch.after_autograd(op, keyset, q, k, q_weight, k_weight, **said)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, said, *operands = inputs
        given = dispatcher.tensors_of(said)
        ctx.save_for_backward(*operands, *given.values())
        ctx.names, ctx.said = tuple(given), {name: x for name, x in said.items() if name not in given}
        ctx.workspace = workspace.in_use(operands[0].device)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        q, k, q_weight, k_weight, *given = ctx.saved_tensors
        said = {**ctx.said, **dict(zip(ctx.names, given, strict=True))}
        out = map(dispatcher.rows_of_gradient, (dq, dk))
        with workspace.inside(ctx.workspace):
            dq, dk, *of_weights = dispatcher.call("qk_norm_rope_backward", *out, q, k, q_weight, k_weight, **said)
        of_weights = [None if w is None else x for w, x in zip((q_weight, k_weight), of_weights, strict=True)]
        return None, None, dq, dk, *of_weights


def _autograd(
    keyset: Any,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    **said: Any,
) -> tuple[Tensor, Tensor]:
    others = dispatcher.tensors_of(said)
    found: tuple[Tensor, Tensor]
    if not dispatcher.needs_gradient(q, k, q_weight, k_weight, *others.values()):
        op = torch.ops.cutlass_fmha.qk_norm_rope.default
        found = private_torch.after_autograd(op, keyset, q, k, q_weight, k_weight, **said)
        return found
    given = {"q": q, "k": k} | Norm(q_weight, k_weight).weights
    dispatcher.check_differentiable(keyset, given, others)
    found = _QKNormRope.apply(keyset, said, q, k, q_weight, k_weight)  # type: ignore[no-untyped-call]
    return found


dispatcher.register_gradients("qk_norm_rope", _autograd)
dispatcher.register_once("qk_norm_rope_backward", "qk_norm_rope")
