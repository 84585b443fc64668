"""What the kernels beside attention compute, in fp64. Shares nothing with the package. Shapes are those of the public
functions: outputs [batch, seqlen_q, num_heads, head_dim_v] or packed, LSEs [batch, num_heads, seqlen_q]."""

import math

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
