"""What the kernels on rows compute, in fp64: results, gradients by autograd, and how large the terms are."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from oracle_helpers import assert_close, roundings
from torch import Tensor


class Expected(NamedTuple):
    """A tensor in fp64, and what rounding errors of its computation are relative to."""

    value: Tensor
    largest: Tensor

    def check(self, found: Tensor) -> None:
        assert_close(found.cpu(), self.value, self.largest)


def in_fp64(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.detach().cpu().double().requires_grad_() for x in tensors]


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    y = x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (weight + weight_offset)
    return y if bias is None else y + bias


class RmsNorm:
    """All of a call and of its gradients. The sum is rounded to x's dtype, as it is kept."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
        weight_offset: float, dout: Tensor, dsum: Tensor | None,
    ) -> None:  # fmt: skip
        self.sum = x.cpu() if residual is None else (x.cpu().double() + residual.cpu().double()).to(x.dtype)
        s, w, b, d, ds = in_fp64(self.sum, weight, bias, dout, torch.zeros_like(dout) if dsum is None else dsum)
        out = rms_norm(s, w, b, eps, weight_offset)
        out.backward(d)
        with torch.no_grad():
            factor = torch.ones(x.shape[-1], dtype=torch.float64) if w is None else w + weight_offset
            y = rms_norm(s, None, None, eps, 0.0)
            rstd, scaled = 1 / torch.sqrt((s**2).mean(-1, keepdim=True) + eps), (d * factor).abs()
            term = rstd * (scaled + y.abs() * (scaled * y.abs()).mean(-1, keepdim=True))
            self.out = Expected(out.detach(), (y * factor).abs() + (0 if b is None else b.abs()))
            self.dx = Expected(s.grad + ds, term + ds.abs())
            terms = [x.abs().reshape(-1, x.shape[-1]).sum(0) for x in (d * y, d)]
            self.dweight = None if w is None else Expected(w.grad, terms[0])
            self.dbias = None if b is None else Expected(b.grad, terms[1])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


class Gated:
    def __init__(self, gate: Tensor, up: Tensor, name: str, dout: Tensor) -> None:
        g, u, d = in_fp64(gate, up, dout)
        out = ACTIVATIONS[name](g) * u
        out.backward(d)
        with torch.no_grad():
            self.out = Expected(out.detach(), (g * u).abs())
            self.dgate = Expected(g.grad, (d * u).abs() * (1 + g.abs()) ** (4 if name == "gelu_tanh" else 2))
            self.dup = Expected(u.grad, (d * g).abs())


class Mlp:
    """swiglu_mlp and its gradients: its own, of x and of both weights. What is rounded on the way (gate, up, their
    product, what comes back to them) is followed to first order, and twice what that comes to is allowed."""

    def __init__(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor, dout: Tensor) -> None:
        half_ulp, smallest, computed = roundings(x.dtype)

        def product(op: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
            """Of values and their errors, [2, rows, columns]."""
            value, size = op(a[0], b[0]), op(a[0].abs(), b[0].abs())
            error = op(a[1], b[0].abs()) + op(a[0].abs(), b[1]) + computed * size
            return torch.stack((value, error + half_ulp * value.abs() + smallest))

        of_rows = (t.detach().cpu().double().reshape(-1, t.shape[-1]) for t in (x, w_gate_up, w_down, dout))
        x, w_gate_up, w_down, dout = (torch.stack((t, torch.zeros_like(t))) for t in of_rows)
        gate, up = product(torch.matmul, x, w_gate_up.mT).chunk(2, -1)
        share = torch.sigmoid(gate[0])
        silu = torch.stack((gate[0] * share, 1.1 * gate[1]))
        slope = torch.stack((share * (1 + gate[0] * (1 - share)), 0.5 * gate[1]))
        between = product(torch.mul, silu, up)
        back = product(torch.matmul, dout, w_down)
        both = torch.cat((product(torch.mul, product(torch.mul, back, up), slope), product(torch.mul, back, silu)), -1)
        pairs = (between, w_down.mT), (both, w_gate_up), (both.mT, x), (dout.mT, between)
        found = (product(torch.matmul, a, b) for a, b in pairs)
        self.all = [Expected(value, 2 * error / computed) for value, error in found]
