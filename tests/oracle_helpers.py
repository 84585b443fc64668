"""What the kernels beside attention compute, in fp64. Shares nothing with the package. Shapes are those of the public
functions: outputs [batch, seqlen_q, num_heads, head_dim_v] or packed, LSEs [batch, num_heads, seqlen_q]. Of rows also
gradients, by autograd, and how large the terms are."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import oracle
import torch
from torch import Tensor

#: Of what was allowed, the largest part that a comparison found.
worst = 0.0


def roundings(dtype: torch.dtype) -> tuple[float, float, float]:
    """Half an ulp, relative, half the smallest number, and what a few operations in fp32 (of float64: fp64) add."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.smallest_normal * info.eps / 2, 2.0**-48 if dtype == torch.float64 else 2.0**-20


def assert_merged(output: Tensor, lse: Tensor | None, parts: list[tuple[Tensor, Tensor]]) -> None:
    """One state of several. A part whose LSE is -inf does not exist, whatever its output is."""
    lses = torch.stack([x.double().mT for _, x in parts])  # as outputs, without head_dim
    outputs = torch.stack([o.double() for o, _ in parts]).masked_fill((lses == -math.inf)[..., None], 0.0)
    weights, expected_lse = oracle._softmax(lses.movedim(0, -1))
    assert_close(output, (weights.movedim(-1, 0)[..., None] * outputs).sum(0), outputs.abs().amax(0))
    if lse is not None:
        expected_lse = expected_lse.mT
        finite = expected_lse.isfinite()
        assert torch.equal(lse.double()[~finite], expected_lse[~finite])
        error = (lse.double() - expected_lse)[finite].abs()
        allowed = 2.0**-22 * (1.0 + expected_lse[finite].abs())
        assert (error <= allowed).all(), f"the LSE is off by {float((error - allowed).max())} too much"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [batch, seqlen, num_heads, head_dim] with positions[batch, seqlen], as complex numbers in fp64."""
    x, dim, pair = x.double(), 2 * cos.shape[1], -1 if interleaved else -2
    parts = x[..., :dim].unflatten(-1, (dim // 2, 2) if interleaved else (2, dim // 2))
    angles = torch.complex(cos[positions].double(), sin[positions].double())[..., None, :]
    turned = torch.complex(parts.select(pair, 0), parts.select(pair, 1)) * angles
    return torch.cat((torch.stack((turned.real, turned.imag), pair).flatten(-2), x[..., dim:]), -1)


def assert_rotated(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> None:
    """``out`` is x rotated with one rounding; what is not rotated has x's bits."""
    largest, dim = x.double().abs().amax(-1, keepdim=True).expand(x.shape), 2 * cos.shape[1]
    assert_close(out, rotate(x, cos, sin, positions, interleaved), largest)
    assert torch.equal(bits(out[..., dim:]), bits(x[..., dim:]))


def places(
    cache_seqlens: Tensor, seqlen_new: int | list[int], rows: int, entries: int,
    cache_batch_idx: Tensor | None = None, page_table: Tensor | None = None,
) -> dict[tuple[int, int], tuple[int, int]]:  # fmt: skip
    """(batch, new row) -> (entry or page of the cache, row in it), for those that have a place there.

    seqlen_new: of all sequences, or of each. rows: of an entry or of a page. entries: how many there are.
    """
    found = {}
    for b, first in enumerate(cache_seqlens.tolist()):
        for i in range(seqlen_new if isinstance(seqlen_new, int) else seqlen_new[b]):
            entry, at = b if cache_batch_idx is None else int(cache_batch_idx[b]), first + i
            if page_table is not None:
                entry = int(page_table[b, at // rows]) if 0 <= at < rows * page_table.shape[1] else -1
                at %= rows
            if 0 <= entry < entries and 0 <= at < rows and first >= 0:
                found[b, i] = entry, at
    return found


def bits(x: Tensor) -> Tensor:
    """A tensor's elements as integers: NaN is equal to itself, and 0 is not -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@torch.no_grad()
def assert_close(out: Tensor, expected: Tensor, largest: Tensor) -> None:
    global worst
    half_ulp, smallest, relative = roundings(out.dtype)
    allowed = half_ulp * expected.abs() + smallest + relative * largest
    error = (out.double() - expected).abs()
    ratio = float((error / allowed.clamp(min=2.0**-1000)).max()) if error.numel() else 0.0
    assert ratio <= 1.0, f"off by {ratio} times what is allowed"  # NaN is not, either
    worst = max(worst, ratio)


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
