"""Gated units (Shazeer 2020): SwiGLU and GEGLU, and the MLP that they stand in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cutlass_fmha import autocast
from cutlass_fmha.arguments import check, results, tensors
from cutlass_fmha.ops import dispatcher

_APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, elementwise, with silu(x) = x / (1 + exp(-x)).

    Args:
        gate, up: [..., dim] of one shape, dtype (float16, bfloat16 or float32, on the CPU also float64) and
            device; any strides with a contiguous last dimension. With more than three leading dimensions that
            can't be viewed as one, they are copied first.
        out: of their shape and dtype, contiguous in the last dimension: written to and returned. It shares no
            memory with another tensor of the call, and is not taken where a gradient is wanted.

    Returns:
        ``out``, or a new contiguous tensor. Computed in float32 (of float64: in float64) and rounded once.
        The gradients of gate and up come from one pass over what was given: nothing else is kept.

    Raises:
        TypeError, ValueError: an argument is of another type, or does not fit; the sentence says which.
        NotImplementedError: a second derivative, or one in forward mode.
    """
    return _gated(gate, up, "silu", out)


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``swiglu`` of the two halves of x's rows: [..., 2 dim] becomes [..., dim]."""
    return _packed(x, "silu", out)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    """gelu(gate) * up, as ``swiglu``. approximate: torch's "none", by erf, or "tanh"."""
    return _gated(gate, up, _gelu(approximate), out)


def gelu_and_mul(x: Tensor, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    """``geglu`` of the two halves of x's rows: [..., 2 dim] becomes [..., dim]."""
    return _packed(x, _gelu(approximate), out)


def _gelu(approximate: object) -> str:
    if isinstance(approximate, str) and approximate in _APPROXIMATE:
        return _APPROXIMATE[approximate]
    raise ValueError(f'approximate must be "none" or "tanh", got {check.shown(approximate)}')


def _gated(gate: Tensor, up: Tensor, activation: str, out: Tensor | None) -> Tensor:
    check.check_tensors_given({"gate": gate, "up": up}, {"out": out})
    return _call(gate, up, activation, out)


def _packed(x: Tensor, activation: str, out: Tensor | None) -> Tensor:
    check.check_tensors_given({"x": x}, {"out": out})
    return _call(x, None, activation, out)


def _call(gate: Tensor, up: Tensor | None, activation: str, out: Tensor | None) -> Tensor:
    if out is not None:
        torch.ops.cutlass_fmha.gated_out(gate, up, out, activation)
        return out
    output: Tensor = dispatcher.call("gated", gate, up, activation)
    return output


# ---- the MLP -----------------------------------------------------------------------------------------------


def swiglu_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, *, recompute: bool = False, out: Tensor | None = None
) -> Tensor:
    """silu(x @ w_gate.T) * (x @ w_up.T) @ w_down.T, with gate and up as one product.

    Args:
        x: [..., dim_in]; float16, bfloat16 or float32 (on the CPU also float64).
        w_gate_up: [2 dim, dim_in], as torch.nn.Linear has it: gate's rows before up's.
        w_down: [dim_out, dim].
        recompute: a gradient's pass computes silu(gate) * up again beside the gradients of gate and up, in
            the same kernel, so that it is not kept: rows * dim elements less.
        out: [..., dim_out] of the output's dtype, contiguous in the last dimension: written to and returned.
            It shares no memory with another tensor of the call, and is not taken where a gradient is wanted.

    Returns:
        ``out``, or a new tensor [..., dim_out]. The products are torch's (cuBLAS on a GPU), also under
        autocast; ``explain_swiglu_mlp`` says why.

    Raises:
        TypeError, ValueError: an argument is of another type, or does not fit; the sentence says which.
    """
    _check_mlp(x, w_gate_up, w_down)
    check.flag("recompute", recompute)
    if out is not None:
        return _mlp_to(x, w_gate_up, w_down, out)
    both = linear(x, w_gate_up)
    wanted = torch.is_grad_enabled() and (dispatcher.requires_grad(both) or dispatcher.requires_grad(w_down))
    if recompute and wanted:
        if autocast.dtype_of(x) is not None:
            w_down = autocast.cast(w_down, both.dtype)
        output: Tensor = _GatedProduct.apply(both, w_down)  # type: ignore[no-untyped-call]
        return output
    return linear(silu_and_mul(both), w_down)


def _mlp_to(x: Tensor, w_gate_up: Tensor, w_down: Tensor, out: Tensor) -> Tensor:
    given = {"x": x, "w_gate_up": w_gate_up, "w_down": w_down}
    if dispatcher.needs_gradient(*given.values(), out):
        raise NotImplementedError(results.NO_GRADIENT)
    dtype = autocast.cast(x.new_empty(0), autocast.dtype_of(x) or x.dtype).dtype
    results.check_result("out", out, (*x.shape[:-1], w_down.shape[0]), dtype, ("x", x))
    results.check_apart_before({"out": out}, given)
    product = silu_and_mul(linear(x, w_gate_up))
    if torch.compiler.is_compiling() or not out.is_contiguous():
        return out.copy_(linear(product, w_down))
    rows = product.view(-1, product.shape[-1])
    torch.mm(rows, autocast.cast(w_down, dtype).mT, out=out.view(-1, out.shape[-1]))
    return out


def _check_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
    check.check_tensors_given({"x": x, "w_gate_up": w_gate_up, "w_down": w_down})
    tensors.check_dims("w_gate_up", w_gate_up, "2 * dim, dim_in")
    tensors.check_dims("w_down", w_down, "dim_out, dim")
    tensors.check_device("x", x, {"w_gate_up": w_gate_up, "w_down": w_down})
    cast = autocast.DTYPES if autocast.dtype_of(x) is not None else ()
    for name, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if weight.dtype != x.dtype and not (weight.dtype in cast and x.dtype in cast):
            own, got = check.dtype_name(x.dtype), check.dtype_name(weight.dtype)
            raise ValueError(f"{name} must have x's dtype {own}, got {got}")
    if x.dim() < 1 or x.shape[-1] != w_gate_up.shape[1]:
        raise ValueError(f"x must have rows of w_gate_up's {w_gate_up.shape[1]} columns, got shape {tuple(x.shape)}")
    if w_gate_up.shape[0] != 2 * w_down.shape[1]:
        raise ValueError(
            f"w_gate_up must have two rows for each of w_down's {w_down.shape[1]} columns, gate's before "
            f"up's, got shape {tuple(w_gate_up.shape)}"
        )


class _GatedProduct(torch.autograd.Function):
    """silu_and_mul(both) @ w_down.T, of which only the arguments are kept."""

    generate_vmap_rule = True  # but no jvp, as the others have: compilers trace this one, and no function with a jvp

    @staticmethod
    def forward(both: Tensor, w_down: Tensor) -> Tensor:
        return linear(silu_and_mul(both), w_down)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        both, w_down = ctx.saved_tensors
        of_both, of_weight = ctx.needs_input_grad
        # Who wants a derivative of this is told by the op: once_differentiable looks at dout alone.
        dproduct = dout @ w_down
        dboth, _, product = dispatcher.call(
            "gated_backward", dispatcher.rows_of_gradient(dproduct), both, None, "silu", of_weight
        )
        dweight = None
        if of_weight:
            dout, product = (torch.atleast_2d(x).flatten(0, -2) for x in (dout, product))
            dweight = dout.mT @ product
        return dboth if of_both else None, dweight


def explain_swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> str:
    """What ``swiglu_mlp`` runs for a call, and why, a line each. Runs nothing; raises what that does."""
    _check_mlp(x, w_gate_up, w_down)
    rows_of_x, dim_in = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    dim, dim_out = w_down.shape[1], w_down.shape[0]
    library = "cuBLAS" if x.is_cuda else "torch's CPU library"
    return "\n".join(
        (
            f"gate and up: one product [{rows_of_x}, {dim_in}] x [{dim_in}, {2 * dim}] by {library}",
            f"silu(gate) * up: the kernel gated, [{rows_of_x}, {2 * dim}] to [{rows_of_x}, {dim}]",
            f"down: a product [{rows_of_x}, {dim}] x [{dim}, {dim_out}] by {library}",
            "why: a CUTLASS product with SwiGLU in its epilogue had 0.58 to 0.84 of cuBLAS's speed on an "
            "H200, which costs more than the elementwise pass, so none is built; on sm_89 and sm_120 this "
            "was not measured",
        )
    )
