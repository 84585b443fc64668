"""What a result may differ from dense fp64 attention by. Shares nothing with the package.

The tolerance is relative to what the dtype allows, and set per query row: one that averages 1000 values is 30 times
smaller than one that sees a single key, beside which an error of its size would hide.

    max_d |out - ref|  <=  2 max_d |unfused - ref|  +  2 ulp(max_d |ref|)  +  score term

``unfused`` is the same attention done step by step with the roundings that cannot be avoided in the input
dtype (P as an operand of P V, and the output); everything else in fp32, as the kernels have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CAUSAL = ("none", "top-left", "bottom-right")

# The output is rounded once (half an ulp) and P once; that the unfused math happens to round a row's P luckily must
# not fail a kernel that does not. test_oracle.py shows that defects don't stay below.
ULPS = 2
FP32_EPS = 2.0**-24  # half an ulp of fp32, relative


def visible(seqlen_q: int, seqlen_k: int, causal: str) -> Tensor:
    """[seqlen_q, seqlen_k] bool: True where query i sees key j."""
    diagonal = {"none": seqlen_k, "top-left": 0, "bottom-right": seqlen_k - seqlen_q}[causal]
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(diagonal)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and its log-sum-exp; 0 and -inf for rows of -inf, whose gradients are 0."""
    maximum = scores.detach().amax(dim=-1, keepdim=True)
    # A row without keys has the maximum -inf, and -inf - -inf is NaN; exp(-inf - 0) is 0.
    p = torch.exp(scores - maximum.masked_fill(maximum == -math.inf, 0.0))
    total = p.sum(dim=-1, keepdim=True)
    total = total.masked_fill(total == 0.0, 1.0)
    # Divided by the sum, not exp(score - lse): in an LSE of 1e30 the logarithm of the sum is lost.
    return p / total, (maximum + total.log()).squeeze(-1)


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at ``magnitude`` (fp64, >= 0), subnormal or not."""
    info = torch.finfo(dtype)
    # Without the guard, torch 2.11 fails here when another device is current.
    with torch.cuda.device_of(magnitude):
        _, exponent = torch.frexp(magnitude.clamp_min(info.tiny))  # mantissa * 2^exponent, from [1/2, 1)
        return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


class Errors(NamedTuple):
    """How far an output is from fp64: absolute, and as a ratio to the tolerance (at most 1 passes)."""

    out: float
    out_ratio: float
    lse: float = 0.0
    lse_ratio: float = 0.0
    complaint: str = ""

    @property
    def worst(self) -> float:
        return max(self.out_ratio, self.lse_ratio)

    def check(self) -> Errors:
        assert self.worst <= 1.0, self.complaint or (
            f"output is off by {self.out:.3g}, {self.out_ratio:.3g} times the tolerance; "
            f"softmax_lse by {self.lse:.3g}, {self.lse_ratio:.3g} times the tolerance"
        )
        return self


def _failed(complaint: str) -> Errors:
    return Errors(*(math.inf,) * 4, complaint)


def _mistaken(
    name: str, x: Tensor, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
) -> Errors | None:
    """None where a result has this shape, and ``like``'s dtype, if no other is given, and device."""
    found, expected = (list(x.shape), x.dtype, x.device), (list(shape), dtype or like.dtype, like.device)
    return None if found == expected else _failed(f"{name} is {found}, expected {expected}")


def _lse_tolerance(ref_lse: Tensor, seqlen_k: int, score_error: Tensor, start: Tensor | None) -> Tensor:
    """[batch, num_heads, seqlen_q]. LSE = log(sum of p) + maximum, all in fp32:

    - the sum of seqlen_k numbers, each addition rounded by half an ulp at most: seqlen_k * 2^-24 relative, which the
      logarithm makes absolute; the hardware's exp2 and log2 add 2 ulp each (CUDA Programming Guide, intrinsics);
    - the maximum, at most |LSE| + log(seqlen_k) large, is scaled to log2 units and back: 4 roundings. Where a row
      starts at a score, its sink, that stays the reference until a sum of exponentials exceeds 2^20;
    - the error of the scores, which shifts the result by itself.
    """
    magnitude = ref_lse.abs() + math.log(seqlen_k)
    if start is not None:
        kept = start.abs() * (ref_lse - start < math.log(2**20))
        magnitude = torch.maximum(magnitude, kept.nan_to_num(0.0))
    return FP32_EPS * (seqlen_k + 12 + 4.0 * magnitude) + score_error


def _difference(actual: Tensor, ref: Tensor) -> Tensor:
    """|actual - ref|; 0 where both are NaN or the same infinity, infinite where only one of them is."""
    actual = actual.double()
    same = (actual == ref) | (actual.isnan() & ref.isnan())
    return (actual - ref).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)


def _worst(difference: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
    """(largest difference, largest ratio to the tolerance). A NaN tolerance belongs to a NaN reference."""
    ratio = (difference / tolerance.nan_to_num(0.0)).masked_fill(difference == 0.0, 0.0)
    return difference.max(), ratio.max()
