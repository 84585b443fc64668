"""Dense attention in fp64, and what a kernel's output may differ from it. Shares nothing with the package.

Shapes are those of the op: query and output [batch, seqlen_q, num_heads, head_dim], key and value [batch,
seqlen_k, num_heads_kv, head_dim], softmax_lse [batch, num_heads, seqlen_q], natural log. Everything runs on
the device of its inputs, in chunks of query rows, so that a long sequence needs no seqlen_q x seqlen_k
matrix.

The tolerance is relative to what the dtype allows, and set per query row, because a row that averages 1000
values is 30 times smaller than one that sees a single key, and an error of its whole size would hide behind
the latter:

    max_d |out - ref|  <=  2 max_d |unfused - ref|  +  2 ulp(max_d |ref|)  +  score term

``unfused`` is the same attention done step by step with the roundings that cannot be avoided in the input
dtype (P as an operand of P V, and the output); everything else in fp32, as the kernels have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CAUSAL = ("none", "top-left", "bottom-right")

# The output is rounded once (half an ulp) and P once; that the unfused math happens to round a row's P
# luckily must not fail a kernel that does not. test_oracle.py shows that a correct online softmax stays below
# and defects do not.
ULPS = 2
FP32_EPS = 2.0**-24  # half an ulp of fp32, relative

_CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}


def visible(seqlen_q: int, seqlen_k: int, causal: str, device: torch.device | str = "cpu") -> Tensor:
    """[seqlen_q, seqlen_k] bool: True where query i sees key j."""
    if causal not in CAUSAL:
        raise ValueError(f"causal must be one of {CAUSAL}, got {causal!r}")
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal == "none":
        return mask
    return mask.tril(0 if causal == "top-left" else seqlen_k - seqlen_q)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Query ranges whose scores stay below the device's chunk size."""
    batch, seqlen_q, heads, _ = q.shape
    per_row = max(1, batch * heads * k.shape[1])
    step = max(1, _CHUNK_ELEMENTS[q.device.type] // per_row)
    for begin in range(0, seqlen_q, step):
        yield slice(begin, min(begin + step, seqlen_q))


def _heads_first(q: Tensor, kv: Tensor) -> Tensor:
    """Key or value as [batch, num_heads, seqlen_k, head_dim], repeated for the query heads that share it."""
    if kv.shape[2] == 0 or q.shape[2] % kv.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {kv.shape[2]} key heads")
    return kv.transpose(1, 2).repeat_interleave(q.shape[2] // kv.shape[2], dim=1)


def _softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension, 0 for rows without a key, and its log-sum-exp, -inf for those."""
    scores = scores.masked_fill(~mask, -math.inf)
    maximum = scores.amax(dim=-1, keepdim=True)
    # A row without keys has the maximum -inf, and -inf - -inf is NaN. Any finite subtrahend gives exp(-inf) =
    # 0.
    p = torch.exp(scores - maximum.masked_fill(maximum == -math.inf, 0.0))
    total = p.sum(dim=-1, keepdim=True)
    # Divided by the sum, not exp(score - lse): in an LSE of 1e30 the logarithm of the sum is lost.
    return p / total.masked_fill(total == 0.0, 1.0), (maximum + total.log()).squeeze(-1)


def _default_scale(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: str = "none"
) -> tuple[Tensor, Tensor]:
    """Attention in fp64: (output, softmax_lse), of the shapes above."""
    return _attention(q, k, v, scale, causal, torch.float64, torch.float64)


def unfused(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: str = "none") -> Tensor:
    """The same in the input's dtype: fp32 scores and softmax, P and the output rounded to the dtype."""
    return _attention(q, k, v, scale, causal, torch.float32, q.dtype)[0]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, compute: torch.dtype,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All in ``compute``, P and the output rounded."""
    scale = _default_scale(q, scale)
    out = torch.zeros(q.shape, dtype=rounded, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=compute, device=q.device)
    if out.numel() == 0 or k.shape[1] == 0:
        return out, lse
    mask = visible(q.shape[1], k.shape[1], causal, q.device)
    keys, values = _heads_first(q, k).to(compute).transpose(-1, -2), _heads_first(q, v).to(compute)
    for rows in _chunks(q, k):
        scores = (q[:, rows].transpose(1, 2).to(compute) @ keys) * scale
        p, lse[:, :, rows] = _softmax(scores, mask[rows])
        out[:, rows] = (p.to(rounded).to(compute) @ values).transpose(1, 2).to(rounded)
    return out, lse


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at ``magnitude`` (fp64, >= 0), subnormal or not."""
    info = torch.finfo(dtype)
    # Without the guard, torch 2.11 fails here when another device is current.
    with torch.cuda.device_of(magnitude):
        _, exponent = torch.frexp(
            magnitude.clamp_min(info.tiny)
        )  # magnitude = mantissa * 2^exponent, mantissa in [1/2, 1)
        return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


@dataclass(frozen=True)
class Errors:
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
        """Raise AssertionError unless everything is within the tolerance."""
        if self.complaint:
            raise AssertionError(self.complaint)
        if not self.worst <= 1.0:
            raise AssertionError(
                f"output is off by {self.out:.3g}, {self.out_ratio:.3g} times the tolerance; "
                f"softmax_lse by {self.lse:.3g}, {self.lse_ratio:.3g} times the tolerance"
            )
        return self


def _score_error(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[batch, num_heads, seqlen_q] bound on |fp32 score - score|, the scale included.

    Partial sums of q k are at most |q| |k|. A tensor core adds 16 products at a time and truncates, which
    costs an ulp (two half ulps) where rounding costs half: head_dim / 8 half ulps, and two more for the scale
    and the exponent.
    """
    # A key of -inf makes scores of -inf, which have no error; the other keys' norms bound the finite scores.
    k_norm = k.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).amax(dim=1)  # [batch, num_heads_kv]
    k_norm = k_norm.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    q_norm = q.double().norm(dim=-1).transpose(1, 2)
    bound: Tensor = (q.shape[-1] / 8 + 2) * FP32_EPS * abs(scale) * q_norm * k_norm.unsqueeze(-1)
    return bound


def _row_max(x: Tensor) -> Tensor:
    """[batch, seqlen, heads, head_dim] -> [batch, heads, seqlen]."""
    return x.amax(dim=-1).transpose(1, 2)


def compare(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: str = "none",
    lse: Tensor | None = None, exact_scores: bool = False,
) -> Errors:  # fmt: skip
    """Errors of ``out`` and, when given, of ``lse``.

    exact_scores: every product and sum of Q K^T is exact in fp32 whatever the order, so no error of the
    scores is granted. Huge scores are only comparable that way: their rounding errors alone would decide the
    softmax.
    """
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        return _failed(f"output is {_describe(out)}, expected {_describe(q)}")
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    if lse is not None and (tuple(lse.shape) != lse_shape or lse.dtype != torch.float32):
        return _failed(f"softmax_lse is {_describe(lse)}, expected {list(lse_shape)} float32")
    if out.numel() == 0:
        return Errors(0.0, 0.0)

    scale = _default_scale(q, scale)
    ref, ref_lse = attention(q, k, v, scale, causal)
    if k.shape[1] == 0:
        out_tolerance, lse_tolerance = torch.zeros_like(ref_lse), torch.zeros_like(ref_lse)
    else:
        score_error = _score_error(q, k, scale)
        if exact_scores:
            score_error = torch.zeros_like(score_error)
        out_tolerance = _out_tolerance(unfused(q, k, v, scale, causal), ref, v, score_error)
        lse_tolerance = _lse_tolerance(ref_lse, k.shape[1], score_error)
    masked = ref_lse == -math.inf  # exactly zero, no tolerance at all
    out_tolerance = out_tolerance.masked_fill(masked, 0.0)

    errors = [*_worst(_difference(out, ref).amax(-1).transpose(1, 2), out_tolerance)]
    if lse is not None:
        errors += _worst(_difference(lse, ref_lse), lse_tolerance.masked_fill(masked, 0.0))
    return Errors(*torch.stack(errors).tolist())  # one synchronisation for everything


def assert_close(*arguments: Any, **named: Any) -> Errors:
    """``compare(...).check()``: the errors, or AssertionError."""
    return compare(*arguments, **named).check()


def _failed(complaint: str) -> Errors:
    return Errors(math.inf, math.inf, math.inf, math.inf, complaint)


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _out_tolerance(same_dtype: Tensor, ref: Tensor, v: Tensor, score_error: Tensor) -> Tensor:
    """[batch, num_heads, seqlen_q]."""
    tolerance = 2.0 * _row_max((same_dtype.double() - ref).abs()) + ULPS * ulp(_row_max(ref.abs()), v.dtype)
    # An error e of every score changes each p by a factor of at most exp(e), up or down, and their sum as
    # well.
    v_max = v.double().abs().amax(dim=(1, 3)).repeat_interleave(ref.shape[2] // v.shape[2], dim=1)
    return tolerance + 2.0 * score_error.clamp_max(1.0) * v_max.unsqueeze(-1)


def _lse_tolerance(
    ref_lse: Tensor, seqlen_k: int, score_error: Tensor, start: Tensor | None = None
) -> Tensor:
    """[batch, num_heads, seqlen_q]. LSE = log(sum of p) + maximum, all in fp32:

    - the sum of seqlen_k numbers, each addition rounded by half an ulp at most: seqlen_k * 2^-24 relative,
      which the logarithm makes absolute; exp2 and log2 of the hardware add 2 ulp each (CUDA Programming
      Guide, intrinsics);
    - the maximum, at most |LSE| + log(seqlen_k) large, is scaled to log2 units and back: 4 roundings. Where
      a row starts at a score, its sink, that stays the reference until a sum of exponentials exceeds 2^20;
    - the error of the scores, which shifts the result by itself.
    """
    magnitude = ref_lse.abs() + math.log(seqlen_k)
    if start is not None:
        kept = start.abs() * (ref_lse - start < math.log(2**20))
        magnitude = torch.maximum(magnitude, kept.nan_to_num(0.0))
    magnitude += 1.0
    return FP32_EPS * (seqlen_k + 8 + 4.0 * magnitude) + score_error


def _difference(actual: Tensor, ref: Tensor) -> Tensor:
    """|actual - ref|; 0 where both are NaN or the same infinity, infinite where only one of them is."""
    actual = actual.double()
    same = (actual == ref) | (actual.isnan() & ref.isnan())
    return (actual - ref).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)


def _worst(difference: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
    """(largest difference, largest ratio to the tolerance). A NaN tolerance belongs to a NaN reference."""
    ratio = (difference / tolerance.nan_to_num(0.0)).masked_fill(difference == 0.0, 0.0)
    return difference.max(), ratio.max()
