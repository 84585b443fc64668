"""torch.func's transforms of the package's functions: what torch.autograd finds, one by one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensors import randn
from torch import Tensor, func

import cutlass_fmha
from cutlass_fmha.flash_attn.layers.rotary import apply_rotary_emb

HEADS = 4
STARTS = torch.tensor([0, 2, 2, 7], dtype=torch.int32)


double = partial(randn, dtype=torch.float64)
COS, SIN = double(7, 4, seed=8).cos(), double(7, 4, seed=9).sin()


def flat(found: Any) -> Tensor:
    return torch.cat([x.flatten() for x in (found if isinstance(found, tuple) else (found,))])


def of_rows(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, 8))


def attended(x: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    q = of_rows(x)[None]
    given = {"causal": True, "bias": bias, "sinks": sinks, "dropout_p": 0.25, "dropout_seed": 3}
    return flat(cutlass_fmha.attention(q, q[:, :, :2] / 2, q[:, :, :2] / 3, return_lse=True, **given))


def packed(x: Tensor, _: Tensor, sinks: Tensor) -> Tensor:
    q = of_rows(x)
    lengths = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 5, "max_seqlen_k": 5}
    return flat(cutlass_fmha.attention(q, q / 2, q / 3, window=(2, 0), sinks=sinks, **lengths))


def normed(x: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    return flat(cutlass_fmha.rms_norm(x, bias.flatten()[:32], residual=x * 2)) * sinks.sum()


def turned(x: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    q, cos, sin = of_rows(x)[None], COS.to(x.dtype), SIN.to(x.dtype)
    q, k = cutlass_fmha.rotary_qk(q, q[:, :, :2], cos, sin)
    return flat(cutlass_fmha.qk_norm_rope(q, k, None, bias.flatten()[:8], sinks.repeat(2), cos=cos, sin=sin))


def gated(x: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    product = cutlass_fmha.silu_and_mul(x) * cutlass_fmha.geglu(x[:, :16], x[:, 16:] * sinks.sum())
    up, down = bias.flatten()[:32].view(2, 16), bias.flatten()[32:35].view(3, 1)
    return cutlass_fmha.swiglu_mlp(product, up, down, recompute=True).flatten()


FUNCTIONS = (attended, packed, normed, turned, gated)
X, BIAS, SINKS = double(7, 32), double(1, HEADS, 7, 7, seed=1), double(HEADS, seed=2)
MANY = double(3, 7, 32, seed=4)
Function = Callable[..., Tensor]


def by_autograd(number: Function, x: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in (x, BIAS, SINKS)]
    return torch.autograd.grad(number(*leaves), leaves, materialize_grads=True)


def squares(call: Function) -> Function:
    return lambda *given: call(*given).square().sum()


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(flat(found), flat(wanted), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("call", FUNCTIONS)
def test_transforms_are_autograds(call: Function) -> None:
    wanted = by_autograd(squares(call), X)
    assert wanted[0].abs().max() > 0
    close(func.grad(squares(call), argnums=(0, 1, 2))(X, BIAS, SINKS), wanted)
    out, pull = func.vjp(call, X, BIAS, SINKS)
    close(pull(2 * out), wanted)
    jacobian = func.jacrev(call)(X, BIAS, SINKS)  # a vjp for each result
    for n in (0, len(jacobian) // 2, len(jacobian) - 1):
        close(jacobian[n], by_autograd(lambda *given, n=n: call(*given)[n], X)[0])
    x, bias, sinks = (torch.stack(each) for each in zip(*(by_autograd(squares(call), x) for x in MANY), strict=True))
    over, given = {"in_dims": (0, None, None)}, (MANY, BIAS, SINKS)
    close(torch.vmap(func.grad(squares(call), argnums=(0, 2)), **over)(*given), (x, sinks))
    of_all = func.grad(lambda *given: torch.vmap(squares(call), **over)(*given).sum(), argnums=(0, 1, 2))
    close(of_all(*given), (x, bias.sum(0), sinks.sum(0)))
    if call in (attended, normed, gated):
        with pytest.raises(NotImplementedError, match="can be differentiated once"):
            func.grad(lambda x: func.grad(squares(call))(x, BIAS, SINKS).sum())(X)


def mixed(x: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    half = x.bfloat16() * sinks.sum()
    return flat((cutlass_fmha.swiglu(half, x * bias.sum()), *cutlass_fmha.rms_norm(x, residual=half)))


@pytest.mark.parametrize("call", [*FUNCTIONS, mixed])
def test_what_is_kept_was_cast_by_autocast(call: Function) -> None:
    leaves = [x.float() for x in (X, BIAS, SINKS)]
    with torch.autocast("cpu", torch.bfloat16):
        out, pull = func.vjp(call, *leaves)
        given = [x.clone().requires_grad_() for x in leaves]
        wanted = call(*given)
    found = torch.autograd.grad(wanted, given, torch.ones_like(wanted), materialize_grads=True)
    assert torch.equal(out, wanted) and torch.equal(flat(pull(torch.ones_like(out))), flat(found))


def masked(q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """Of eight keys, which kernels read at once where 16-bit biases and masks lie so: it is looked at."""
    return flat(cutlass_fmha.attention(q, q, q / 2, mask=mask, bias=bias).float()).square().sum()


def test_masks_and_biases_have_no_address_in_transforms() -> None:
    q, bias = double(3, 1, 8, 4, 8).bfloat16(), double(3, 1, 4, 8, 8, seed=1).bfloat16()
    mask = double(3, 1, 1, 8, 8, seed=2) > -0.5
    leaves = q.clone().requires_grad_(), bias.clone().requires_grad_()
    each = [masked(a, m, b) for a, m, b in zip(leaves[0], mask, leaves[1], strict=True)]
    wanted = torch.autograd.grad(torch.stack(each).sum(), leaves)
    gradient = func.grad(masked, argnums=(0, 2))
    mapped = torch.autograd.grad(torch.vmap(masked)(leaves[0], mask, leaves[1]).sum(), leaves)
    for found in (torch.vmap(gradient)(q, mask, bias), mapped):
        assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, gradient(q[0], mask[0], bias[0]), (x[0] for x in wanted)))


def test_what_needs_no_derivative_goes_on() -> None:
    """Beside others, in both modes, and where a result has a place."""
    q, one = of_rows(MANY)[:, None], torch.ones((), dtype=torch.float64)

    def scaled(s: Tensor) -> Tensor:
        return s * torch.vmap(lambda x: cutlass_fmha.attention(x, x, x))(q).sum()

    wanted = cutlass_fmha.attention(q[:, 0], q[:, 0], q[:, 0]).sum()
    close(func.jvp(scaled, (one,), (one,))[1], wanted)
    close(func.grad(scaled)(one), wanted)
    room = torch.empty_like(q[:, 0])
    into = func.grad(lambda s: s * cutlass_fmha.attention(q[:, 0], q[:, 0], q[:, 0], out=room).sum())
    close(into(one), wanted)
    with pytest.raises(NotImplementedError, match="out and lse are not taken where a gradient is"):
        func.grad(lambda x: cutlass_fmha.attention(x, x, x, out=room).sum())(q[:, 0])
    with pytest.raises(NotImplementedError, match="in forward mode"):
        func.jvp(torch.vmap(lambda x: cutlass_fmha.attention(x, x, x)), (q,), (q,))


def test_flash_attns_rotary_and_a_compiler_around() -> None:
    x, both = double(2, 7, 2, 8), double(2, 1, 32, seed=5)

    def rotated(x: Tensor) -> Tensor:
        return apply_rotary_emb(x, COS, SIN).square().mul(x).sum()

    leaf = x.clone().requires_grad_()
    wanted = torch.autograd.grad(rotated(leaf), leaf)
    close(func.grad(rotated)(x), wanted)
    torch.compiler.reset()
    close(torch.compile(func.grad(rotated), backend="aot_eager")(x), wanted)
    many = torch.vmap(func.grad(lambda x: gated(x, BIAS, SINKS).sum()))
    close(torch.compile(many, backend="aot_eager")(both), many(both))


def test_what_has_no_derivative_is_refused() -> None:
    q, slopes = of_rows(X)[None], randn(HEADS, seed=3)

    def biased(q: Tensor, slopes: Tensor) -> Tensor:
        return cutlass_fmha.attention(q, q, q, alibi_slopes=slopes).sum()

    sentence = "no backward yet for alibi_slopes: pass it detached"
    with pytest.raises(NotImplementedError, match=sentence):
        func.grad(biased, argnums=1)(q, slopes)
    with pytest.raises(NotImplementedError, match=sentence):  # vmap hides that it is asked for
        func.grad(lambda s: torch.vmap(biased, in_dims=(None, 0))(q, s).sum())(slopes[None])
    func.grad(biased)(q, slopes)
    with pytest.raises(NotImplementedError, match="no backward yet for cos"):
        func.grad(lambda cos: flat(cutlass_fmha.rotary_qk(q, q, cos, SIN)).sum())(COS)
    with pytest.raises(NotImplementedError, match="in forward mode"):
        func.jvp(lambda cos: flat(cutlass_fmha.rotary_qk(q, q, cos, SIN)), (COS,), (COS,))
    for call in FUNCTIONS:
        given = (lambda x, call=call: call(x, BIAS, SINKS)), (X,), (X,)
        for transform in (func.jvp, lambda f, x, _: func.linearize(f, *x), lambda f, x, _: func.jacfwd(f)(*x)):
            with pytest.raises(NotImplementedError, match="in forward mode"):
                transform(*given)
    with pytest.raises(NotImplementedError, match="its functions, with torch.func.grad"):
        func.grad(lambda q: torch.ops.cutlass_fmha.forward(q, q, q, 1.0, "none", False, None)[0].sum())(q)


def test_rotations_have_derivatives_of_every_order() -> None:
    q = of_rows(X)[None]

    def energy(q: Tensor) -> Tensor:
        return flat(cutlass_fmha.rotary_qk(q, q, COS, SIN)).pow(3).sum()

    leaf = q.clone().requires_grad_()
    (once,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    close(func.grad(lambda q: func.grad(energy)(q).sum())(q), torch.autograd.grad(once.sum(), leaf))
