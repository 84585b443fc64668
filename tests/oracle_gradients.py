"""Gradients in dense fp64, and what a kernel's may differ from them. Shares nothing with the package.

The reference is what autograd makes of the formula of attention. ``unfused`` are the same gradients step by
step, with the roundings to the input's dtype that can't be avoided: of P and dS as operands, of the output
that the backward reads, and of the gradients. The tolerance is set per row of a head, of queries or keys:

    max |found - ref|  <=  2 max |unfused - ref|  +  2 ulp(max |ref|)  +  score term

or, in place of the first two, 4 deviations of what these roundings cost: the largest of many is never small by
accident. P is rounded once, as dV's operand; dS twice, by the P that it is a multiple of (times a softcap's slope,
before that product is rounded) and as operand of dQ and dK; the output once, for D. A deviation is taken as half an ulp
of each: beyond 4 of them is one of 10^10 such sums (Hoeffding), and 10,000 problems compare about so many. An element
of a bias's gradient may be off by the worst that P's rounding can do, and where it is broadcast by a sum in fp32.

float16 ends at 65504. A gradient beyond is infinite. So is dS as an operand: dQ of its query and dK of its key then
need not be finite, whatever they are multiplied by afterwards. A loss is scaled by such infinities: a finite number in
their place is only right where it is within the tolerance.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import oracle
import oracle_features
import torch
from operands import Call
from oracle import FP32_EPS, Errors
from oracle_features import DEVIATIONS, Features, Sequence
from torch import Tensor

#: fp32's least normal number: exponentials and products that are smaller may be 0, for GPUs flush them. A key
#: that hardly counts has no larger gradient; an output, divided by the sum of P, never gets there.
FLUSHED = 2.0**-126

#: Tensors of a call that may have gradients.
NAMES = ("q", "k", "v", "bias", "sinks")


def sequences(call: Call, **changed: Tensor) -> Iterator[Sequence]:
    q, k, v = (changed.pop(name, getattr(call, name)) for name in "qkv")
    yield from oracle_features.sequences(q, k, v, call.scale, call.causal, Features(**{**call.features, **changed}))


def reference(call: Call, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """The gradients in fp64; 0 of what is nobody's. dout: as the output; dlse: as the LSE."""
    given = call.features | {name: getattr(call, name) for name in "qkv"}
    leaves = {name: given[name].detach().double().requires_grad_() for name in NAMES if name in given}
    results = oracle_features.attention(scale=call.scale, causal=call.causal, **(given | leaves))
    pairs = [(x, g.double()) for x, g in zip(results, (dout, dlse), strict=True) if x.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}


class Terms(NamedTuple):
    """Of one sequence, heads first. [num_heads, queries, keys], but for those of a query."""

    p: Tensor
    kept: Tensor  # dropout's factor
    slope: Tensor  # of the softcap
    dp: Tensor
    term: Tensor  # [num_heads, queries, 1]: D
    ds: Tensor  # of the scores before the softcap


def terms(s: Sequence, dout: Tensor, dlse: Tensor | None, rounded: torch.dtype | None) -> Terms:
    """In fp64, or in fp32 with P, dS and the output rounded."""
    dtype = torch.float64 if rounded is None else torch.float32
    rows = slice(0, len(s.q))

    def round_(x: Tensor) -> Tensor:
        return x if rounded is None else x.to(rounded).to(dtype)

    p, lse = s.probabilities(rows, dtype)
    kept = torch.ones_like(p) if s.kept is None else s.kept.to(dtype) * s.factor
    slope = torch.ones_like(p)
    if s.features.softcap:
        plain = s.q.transpose(0, 1).to(dtype) @ s.per_query_head(s.k).to(dtype).transpose(1, 2) * s.scale
        slope = 1.0 - torch.tanh(plain / s.features.softcap) ** 2
    values = s.per_query_head(s.v).to(dtype)
    factors, p = round_(p * slope), round_(p)
    out = round_((p * kept) @ values)
    dp = dout @ values.transpose(1, 2)
    term = (out * dout).sum(-1, keepdim=True)
    if dlse is not None:
        term = term - dlse.to(dtype).masked_fill(lse == -math.inf, 0.0)[..., None]
    return Terms(p, kept, slope, dp, term, round_(factors * (dp * kept - term)))


def compare(
    call: Call, found: dict[str, Tensor], dout: Tensor, dlse: Tensor | None, product_error: float = 0.0
) -> Errors:
    """The worst of the gradients ``found``, in the shapes of what they are of, by ratio to its tolerance.
    product_error: half ulps of fp32 that each product may be off by besides, relative."""
    exact, errors = reference(call, dout, dlse), [Errors(0.0, 0.0)]
    summed = {name: torch.zeros_like(exact[name]) for name in NAMES[3:] if name in found}
    added = [torch.zeros_like(exact["bias"]) for _ in range(2)] if "bias" in found else []
    for name, x in found.items():
        if mistake := oracle._mistaken(f"d{name}", x, exact[name].shape, exact[name], x.dtype):
            return mistake
    # What is nobody's is 0, as is what is of queries without keys, and the other way around.
    nobodys = {name: torch.ones_like(exact[name], dtype=torch.bool) for name in "qkv"}
    for s, mine in zip(sequences(call), sequences(call, **nobodys), strict=True):
        if "sinks" in summed and dlse is not None:  # what no key gets of the LSE, a sum in fp32
            size = s.features.sinks.double().abs().nan_to_num(0.0, 0.0, 0.0) if len(s.k) == 0 else 0.0
            summed["sinks"] += (16 + 4 * size) * FP32_EPS * dlse[s.lse_place][:, : len(s.q)].double().abs().sum(-1)
        if len(s.q) and len(s.k):
            for x in (mine.q, mine.k, mine.v):
                x.zero_()
            errors += _errors(call, s, found, exact, dout, dlse, summed, added, product_error)
    for name, tolerance in summed.items():
        tolerance += oracle.ULPS * oracle.ulp(exact[name].abs(), found[name].dtype) + FLUSHED
        if name == "bias":  # the first addend meets 0; roundings of like addends are alike, too
            tolerance += FP32_EPS * (added[0] - 1.0).clamp_min(0.0) * added[1]
        errors.append(_judged(_difference(found[name], exact[name], tolerance), tolerance))
    for name, mask in nobodys.items():
        if (found[name].masked_fill(~mask, 0.0) != 0.0).any():
            return oracle._failed(f"d{name} of rows that are nobody's is not 0")
    return max(errors, key=lambda e: e.out_ratio)


def _judged(difference: Tensor, tolerance: Tensor) -> Errors:
    ratio = torch.where(difference == 0.0, 0.0, difference / tolerance).nan_to_num(math.inf, math.inf)
    return Errors(float(difference.max()), float(ratio.max())) if ratio.numel() else Errors(0.0, 0.0)


def _errors(
    call: Call, s: Sequence, found: dict[str, Tensor], exact: dict[str, Tensor], dout: Tensor,
    dlse: Tensor | None, summed_up: dict[str, Tensor], added: Any, product_error: float,
) -> list[Errors]:  # fmt: skip
    """Of q, k and v of a sequence; adds what those of bias and sinks may be off by to ``summed_up``, and what is
    summed of a bias's to ``added``."""
    dtype, rows, group = s.q.dtype, slice(0, len(s.q)), s.q.shape[1] // s.k.shape[1]
    q, k, v = s.q.transpose(0, 1).double(), s.per_query_head(s.k).double(), s.per_query_head(s.v).double()
    own_dlse, d = None if dlse is None else dlse[s.lse_place][:, rows], dout[s.out_place][rows].transpose(0, 1).double()
    t, low = terms(s, d, own_dlse, None), terms(s, d.float(), own_dlse, dtype)

    def summed(x: Tensor) -> Tensor:
        """Over the query heads that share a head of keys."""
        return x.unflatten(0, (-1, group)).sum(1)

    def products(ds: Tensor, p: Tensor, of: Callable[[Tensor], Tensor], scale: float) -> dict[str, Tensor]:
        """What dS and P say of the gradients, heads first, of ``of`` operands."""
        of_k, of_v = summed(ds.transpose(1, 2) @ of(q)) * scale, summed(p.transpose(1, 2) @ of(d))
        return {"q": ds @ of(k) * scale, "k": of_k, "v": of_v}

    unfused = products(low.ds, low.p * low.kept, Tensor.float, s.scale)
    # Roundings of P and dS, independent of each other; that of the output, alike for all keys of a query.
    eps, most = torch.finfo(dtype).eps, torch.finfo(dtype).max
    least = max(torch.finfo(dtype).smallest_normal * eps / 2, FLUSHED)
    weights = t.p * t.kept
    of_p = (t.p != 0.0) * (t.dp * t.kept - t.term) ** 2
    ds_variance = 2 * (eps / 2 * t.ds) ** 2 + (t.ds != 0.0) * least**2 + least**2 * of_p
    p_variance = (eps / 2 * weights) ** 2 + (weights != 0.0) * (least * t.kept) ** 2
    out = weights @ v
    of_output = (eps / 2 * out) ** 2 + (out != 0.0) * least**2
    term_variance = (of_output * d**2).sum(-1, keepdim=True) + (p_variance * t.dp**2).sum(-1, keepdim=True)
    variance = products(ds_variance, p_variance, torch.square, s.scale**2)
    slopes = t.p * t.slope
    variance["q"] += term_variance * (slopes @ k * s.scale) ** 2
    variance["k"] += summed((slopes**2 * term_variance).transpose(1, 2) @ q**2) * s.scale**2
    spread = {name: DEVIATIONS * x.sqrt() for name, x in variance.items()}
    if (s.k == s.k[:1]).all() and (s.v == s.v[:1]).all():  # P is alike, and dS: so are their roundings
        of_term = (of_output.sqrt() * d.abs()).sum(-1, keepdim=True)
        of_term += (p_variance.sqrt() * t.dp.abs()).sum(-1, keepdim=True)
        of_ds = 2 * ds_variance.sqrt() + slopes * of_term
        alike = products(of_ds, p_variance.sqrt(), torch.abs, abs(s.scale))
        spread = {name: torch.maximum(x, alike[name]) for name, x in spread.items()}
    # An error of a score, of the LSE or of a sum in fp32, of either sign.
    errors, average = oracle_features._score_errors(s, rows, t.p, (False, product_error))
    _, lse = s.probabilities(rows, torch.float64)
    average = (average + (16 + 4 * lse.abs().masked_fill(lse == -math.inf, 0.0)) * FP32_EPS)[..., None]
    score = errors + average
    norms = d.norm(dim=-1, keepdim=True) * v.norm(dim=-1)[:, None]
    product = product_error * FP32_EPS
    sums = (d.shape[-1] / 4 + 8) * FP32_EPS + product
    size = (t.dp * t.kept).abs() + t.term.abs()
    capped = 16 * FP32_EPS if s.features.softcap else 0.0
    wrong = t.p * ((score + capped) * size + sums * (norms * t.kept + (t.p * norms).sum(-1, keepdim=True)))
    wrong_ds, wrong_p = wrong + product * t.ds.abs(), weights * (score + product)
    allowed = products(wrong_ds, wrong_p, torch.abs, abs(s.scale))
    off = DEVIATIONS * term_variance.sqrt()
    if "bias" in summed_up:
        share = (eps / 2 * t.p + least) * of_p.sqrt() + t.p * off + wrong + FLUSHED * (t.ds != 0.0)  # as it is added
        # Of an element the score's own error, not the average.
        dot = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, None]
        _add_broadcast(summed_up["bias"], s, share + product * abs(s.scale) * dot * t.p * size)
        _add_partial(added, s, t.ds)
    if "sinks" in summed_up:
        sinks = s.features.sinks.double()[:, None, None]
        relative = 2 * average + sums + 4 * FP32_EPS * sinks.abs()
        error = off + relative * (t.term.abs() + norms.amax(-1, keepdim=True))
        p = (sinks - lse[..., None]).exp()
        summed_up["sinks"] += (p * error + p.clamp_max(FLUSHED) * t.term.abs()).sum((1, 2))

    # dS is infinite, or almost.
    infinite = t.ds.abs() * (1.0 + 4 * eps) + t.p * off + wrong > most
    beyond = {"q": infinite.any(2), "k": infinite.any(1).unflatten(0, (-1, group)).any(1)}
    beyond["v"] = torch.zeros_like(beyond["k"])
    errors = []
    for name in "qkv":
        mine = own(call, s, name, found[name]).transpose(0, 1).double()
        ref, infinite = own(call, s, name, exact[name]).transpose(0, 1), beyond[name][..., None]
        rounded = unfused[name].to(dtype).double().clamp(-most, most)
        tolerance = 2.0 * _largest((rounded - ref.clamp(-most, most)).masked_fill(infinite, 0.0))
        tolerance += oracle.ULPS * oracle.ulp(_largest(ref), dtype)
        tolerance = torch.maximum(tolerance, _largest(spread[name])) + _largest(allowed[name]) + FLUSHED
        difference = _difference(mine, ref, tolerance[..., None], most).masked_fill(infinite & ~mine.isfinite(), 0.0)
        errors.append(_judged(_largest(difference), tolerance))
    return errors


def _add_partial(added: Any, s: Sequence, ds: Tensor) -> None:
    """To the count of addends of a bias's gradient that are not 0, and the largest partial sum. One head's are summed
    in order, those of several heads or sequences at a time: none takes back what another has added."""
    _add_broadcast(added[0], s, (ds != 0.0).double())
    sizes = added[0][(None,) * (4 - added[0].dim())].shape
    along = [dim for dim in (1, 2) if sizes[1 + dim] == 1]
    if len(along) == 2:
        ds, along = ds.flatten(1)[:, None], [2]
    _add_broadcast(added[1], s, ds.cumsum(along[0]).abs().amax(along[0], keepdim=True) if along else ds.abs())


def _difference(found: Tensor, ref: Tensor, tolerance: Tensor, most: float | None = None) -> Tensor:
    """0 where what is beyond the dtype is infinite; infinite of what else is not finite."""
    most = torch.finfo(found.dtype).max if most is None else most
    difference = (found.double() - ref).abs().nan_to_num(math.inf, math.inf)
    return difference.masked_fill((ref.abs() + tolerance > most) & (found == ref.sign() * math.inf), 0.0)


def _add_broadcast(total: Tensor, s: Sequence, share: Tensor) -> None:
    """Adds [num_heads, queries, keys] of a sequence to what is broadcast to [batch, num_heads, ...]."""
    total = s.part(total, slice(None))
    total += share.sum_to_size(total.shape)


def own(call: Call, s: Sequence, name: str, x: Tensor) -> Tensor:
    """What of a gradient is the sequence's: as its q, k or v."""
    (found,) = (getattr(other, name) for other in sequences(call, **{name: x}) if other.number == s.number)
    return found


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1)
