"""RMSNorm, gated units and the MLP as ops: what they refuse, schemas, gradients, compiling, autocast."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import cutlass_fmha
from cutlass_fmha import explain_swiglu_mlp, geglu, gelu_and_mul, rms_norm, silu_and_mul, swiglu, swiglu_mlp

OPS = torch.ops.cutlass_fmha
X, W = torch.randn(2, 3, 8), torch.randn(8)
RSTD = torch.ones(2, 3)
UP, DOWN = torch.randn(12, 8), torch.randn(5, 6)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


# ---- what is refused ---------------------------------------------------------------------------------------

WIDE = torch.empty(2, 3, 1, 1, 9)
BAD: dict[type[Exception], list[tuple[Callable[[], object], str]]] = {
    TypeError: [
        (lambda: rms_norm([1.0]), "x must be a torch.Tensor, got list"),  # type: ignore[call-overload]
        (lambda: rms_norm(X, 3.0), "weight must be a torch.Tensor or None, got float"),  # type: ignore[call-overload]
        (lambda: rms_norm(X, out_dtype="half"), "out_dtype must be a torch.dtype or None, got str"),  # type: ignore[call-overload]
        (lambda: rms_norm(X, eps="1"), "eps must be a float, got str"),  # type: ignore[call-overload]
        (lambda: rms_norm(X, residual=X, out=X), "out must be a tuple (out, sum) with a residual"),  # type: ignore[call-overload]
        (lambda: swiglu(X, None), "up must be a torch.Tensor, got NoneType"),  # type: ignore[arg-type]
        (lambda: swiglu_mlp(X, UP, DOWN, recompute=1), "recompute must be a bool, got int"),  # type: ignore[arg-type]
    ],
    ValueError: [
        (lambda: rms_norm(X, eps=-1.0), "eps must be 0 or more, and finite, got -1.0"),
        (lambda: rms_norm(torch.tensor(1.0)), "x must have at least one dimension"),
        (lambda: rms_norm(X[..., :0]), "x must have rows of 1 to 65536 elements, got shape (2, 3, 0)"),
        (lambda: rms_norm(torch.empty(1, 65537)), "x must have rows of 1 to 65536 elements"),
        (lambda: rms_norm(X.int()), "x must be float16 or bfloat16 or float32 or float64 on cpu"),
        (lambda: rms_norm(X.transpose(1, 2)), "x must be contiguous in its last dimension"),
        (lambda: rms_norm(X, W[:7]), "weight must have shape (8,), as x's rows, got (7,)"),
        (lambda: rms_norm(X, W.half()), "weight must have x's dtype float32 or float32, got float16"),
        (lambda: rms_norm(X.half(), W.half(), W), "bias must have weight's dtype float16, got float32"),
        (lambda: rms_norm(X, W, residual=X[0]), "residual must have x's shape (2, 3, 8), got (3, 8)"),
        (lambda: rms_norm(X, residual=X.half()), "residual must have x's dtype float32, got float16"),
        (lambda: rms_norm(X, weight_offset=1.0), "weight_offset is added to weight, and there is none"),
        (lambda: rms_norm(X, W, weight_offset=float("nan")), "weight_offset must be finite, got nan"),
        (lambda: rms_norm(X.half(), out_dtype=torch.bfloat16), "out_dtype must be float16 or float32 for"),
        (lambda: rms_norm(X, out=X), "out must not share memory with x"),
        (lambda: rms_norm(X, out=X[0]), "out must have shape (2, 3, 8), got (3, 8)"),
        (lambda: rms_norm(X, out=W, out_dtype=torch.float16), "out_dtype must be None or out's dtype where"),
        (lambda: rms_norm(X[:, :, None, None], out=WIDE[..., :8]), "out must be contiguous with more than 3"),
        (lambda: OPS.rms_norm_backward(X, None, X, *[None] * 2, RSTD[0], 0.0), "rstd must be float32 (2, 3)"),
        (lambda: swiglu(X, X[0]), "up must have gate's shape (2, 3, 8), got (3, 8)"),
        (lambda: swiglu(X, X.half()), "up must have gate's dtype float32, got float16"),
        (lambda: silu_and_mul(X[..., :7]), "x must have rows of gate and up, an even number of elements"),
        (lambda: silu_and_mul(X, out=X[..., :4]), "out must not share memory with x"),
        (lambda: geglu(X, X, "erf"), 'approximate must be "none" or "tanh", got \'erf\''),
        (lambda: OPS.gated(X, None, "relu"), "activation must be one of silu, gelu, gelu_tanh, got 'relu'"),
        (lambda: OPS.gated_backward(X, X, None, "silu"), "dout must have shape (2, 3, 4), got (2, 3, 8)"),
        (lambda: swiglu_mlp(X, UP[:, :7], DOWN), "x must have rows of w_gate_up's 7 columns"),
        (lambda: swiglu_mlp(X, UP[:10], DOWN), "w_gate_up must have two rows for each of w_down's 6 columns"),
        (lambda: swiglu_mlp(X, UP, DOWN.half()), "w_down must have x's dtype float32, got float16"),
        (lambda: swiglu_mlp(X, UP, DOWN[0]), "w_down must have 2 dimensions, [dim_out, dim]"),
    ],
    NotImplementedError: [
        (lambda: rms_norm(X, double(8).float(), out=X + 0), "out and lse are not taken where a gradient is")
    ],
}


@pytest.mark.parametrize("error", BAD)
def test_bad_calls_are_refused(error: type[Exception]):
    for call, message in BAD[error]:
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_no_second_derivative_and_no_forward_mode():
    x = double(3, 4)
    up, down = double(6, 4), double(5, 3)
    for call in (rms_norm, silu_and_mul, lambda x: swiglu_mlp(x, up, down, recompute=True)):
        (once,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="can be differentiated once"):
            once.sum().backward()
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(call, (x.detach(),), (x.detach(),))


# ---- gradients ---------------------------------------------------------------------------------------------


def test_gradients_by_differences():
    x, weight, bias, residual = double(2, 3, 6), double(6), double(6), double(2, 3, 6)

    def sums(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Any:
        return rms_norm(x, weight, bias, residual=residual, weight_offset=1.0)

    assert gradcheck(sums, (x, weight, bias, residual)) and gradcheck(rms_norm, (x,))
    assert gradcheck(lambda x, r: rms_norm(x, residual=r)[1], (x, residual)), "the sum alone"
    for name in ("none", "tanh"):
        assert gradcheck(lambda g, u: geglu(g, u, name), (x, residual))  # noqa: B023
        assert gradcheck(lambda x: gelu_and_mul(x, name), (x,))  # noqa: B023
    assert gradcheck(swiglu, (x, residual)) and gradcheck(silu_and_mul, (x,))
    w_gate_up, w_down = double(8, 6), double(5, 4)
    for recompute in (False, True):
        for rows in (x, x[0, 0], x[:0]):
            assert gradcheck(lambda *t: swiglu_mlp(*t, recompute=recompute), (rows, w_gate_up, w_down))  # noqa: B023
    for call in (rms_norm, silu_and_mul):  # a sum's gradient is expanded, and so it stays without rows
        assert torch.autograd.grad(call(x[:0]).sum(), x)[0].abs().max() == 0


def test_nothing_is_kept_but_what_the_guide_says():
    kept: list[Tensor] = []
    x, w_gate_up, w_down = torch.randn(16, 8).requires_grad_(), UP.clone().requires_grad_(), DOWN
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_mlp(x, w_gate_up, w_down, recompute=True)
    assert (16, 6) not in {tuple(t.shape) for t in kept}


# ---- ops ---------------------------------------------------------------------------------------------------


def test_ops_agree_with_their_schemas():
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    check = torch.library.opcheck
    check(OPS.rms_norm.default, (x, weight, weight, x, 1e-6, 1.0, None))
    check(OPS.rms_norm.default, (X, None, None, None, 1e-6, 0.0, torch.bfloat16, True))
    check(OPS.rms_norm_out.default, (X, W, None, X, torch.empty_like(X), torch.empty_like(X), 1e-6, 0.0))
    check(OPS.rms_norm_backward.default, (X, X, X, W, W, RSTD, 1.0, [True, False]))
    for gate, up in ((x, x), (x, None)):
        check(OPS.gated.default, (gate, up, "silu"))
    check(OPS.gated_out.default, (X, None, torch.empty(2, 3, 4), "gelu"))
    check(OPS.gated_backward.default, (X[..., :4], X, None, "gelu_tanh", True))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_is_compiled_whole(recompute: bool):
    def block(x: Tensor, weight: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        normed, total = rms_norm(x, weight, residual=x * 2)
        return total[..., :5] + swiglu_mlp(normed, w_gate_up, w_down, recompute=recompute)

    given = [t.clone().requires_grad_() for t in (X, W, UP, DOWN)]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 2):
        inputs = [given[0][:, :rows], *given[1:]]
        found, expected = compiled(*inputs), block(*inputs)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), given) for out in (found, expected)))


def test_autocast_leaves_rows_alone_and_casts_products():
    w_gate_up, w_down = UP.clone().requires_grad_(), DOWN.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rms_norm(X, W).dtype == torch.float32
        assert swiglu(X, X.bfloat16()).dtype == torch.float32
        mixed = rms_norm(X.bfloat16(), W.bfloat16(), residual=X)
        torch.testing.assert_close(mixed, rms_norm(X.bfloat16().float(), W.bfloat16().float(), residual=X))
        found = [swiglu_mlp(X, w_gate_up, w_down, recompute=recompute) for recompute in (False, True)]
    assert found[0].dtype == torch.bfloat16 and torch.equal(*found)
    for out in found:
        for gradient in torch.autograd.grad(out.float().sum(), (w_gate_up, w_down)):
            assert gradient.dtype == torch.float32


def test_explain_says_what_runs_and_why():
    text = explain_swiglu_mlp(X, UP, DOWN)
    assert text.count("\n") == 3 and "one product [6, 8] x [8, 12] by torch's CPU library" in text
    assert "0.58 to 0.84" in text and "not measured" in text
    assert cutlass_fmha.explain_swiglu_mlp is explain_swiglu_mlp
