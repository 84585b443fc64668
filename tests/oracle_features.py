"""Dense fp64 of everything that a call may say, one sequence after the other.

Shares nothing with the package. Arguments and shapes are those of ``cutlass_fmha.attention`` in the "bshd" layout;
``causal`` is the op's. Sequences are cut out of packed tensors, caches and pages first. What is left is one dense
attention for each, over [num_heads, queries, keys], with one mask for everything that hides a key.
"""

import functools
import math
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import torch
from oracle import FP32_EPS, Errors
from torch import Tensor

# Features that say the same of each sequence and head.
SAME_FOR_ALL = {"window", "softcap", "max_seqlen_q", "max_seqlen_k", "num_splits", "batch_invariant"}

# Rounding P costs half an ulp of each product, independently of each other: four standard deviations of their
# sum. It decides where a head has few elements: the largest of many is never small by accident.
DEVIATIONS = 4.0

#: Relative error of a rounding in the arithmetic of a dtype, fp32 but of fp64: reference and result have errors there.
HALF_ULP = {torch.float64: 2.0**-52}
#: How many scores are computed at a time.
CHUNK = {"cpu": 2**22, "cuda": 2**26}


#: ``attention``'s keyword arguments, of which the last change no result.
ARGUMENTS = (
    *("window", "mask", "bias", "prefix_lengths", "block_mask", "softcap", "alibi_slopes", "sinks", "dropout_p"),
    *("dropout_seed", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "page_table"),
    *("cache_batch_idx", "max_seqlen_q", "max_seqlen_k", "num_splits", "batch_invariant"),
)
Features = namedtuple("Features", ARGUMENTS, defaults=(None,) * len(ARGUMENTS))


@dataclass(frozen=True)
class Sequence:
    """One sequence: its queries and keys in use, and where its output stands. ``rows``: a range of queries."""

    features: Any
    scale: float
    causal: str
    number: int
    q: Tensor  # [n_q, num_heads, head_dim]
    k: Tensor  # [n_k, num_heads_kv, head_dim]
    v: Tensor  # [n_k, num_heads_kv, head_dim_v]
    out_place: tuple[Any, ...]  # of all of its rows, used or not
    lse_place: tuple[Any, ...]

    def chunks(self) -> Iterator[slice]:
        n_q, heads = self.q.shape[:2]
        step = max(1, CHUNK[self.q.device.type] // max(1, heads * len(self.k)))
        return (slice(begin, min(begin + step, n_q)) for begin in range(0, n_q if heads else 0, step))

    def per_query_head(self, kv: Tensor) -> Tensor:
        """[num_heads, n_k, head_dim]: repeated for the query heads that share a head of key or value."""
        return kv.transpose(0, 1).repeat_interleave(self.q.shape[1] // kv.shape[1], dim=0)

    def distance(self, rows: slice) -> Tensor:
        """[queries, keys] of i + offset - j: how far before its query a key stands."""
        offset = 0 if self.causal == "top-left" else len(self.k) - len(self.q)
        i = torch.arange(len(self.q), device=self.q.device)[rows, None]
        return i + offset - torch.arange(len(self.k), device=self.q.device)

    def visible(self, rows: slice) -> Tensor:
        f, distance = self.features, self.distance(rows)
        left, right = (math.inf if side in (None, -1) else side for side in f.window or (None, None))
        right = right if self.causal == "none" else min(right, 0)
        seen = (distance <= left) & (distance >= -right)
        if f.prefix_lengths is not None:
            seen |= torch.arange(len(self.k), device=self.q.device) < f.prefix_lengths[self.number]
        seen = seen[None] if f.mask is None else seen & self.part(f.mask, rows)
        return seen if f.block_mask is None else seen & self.blocks[:, rows]

    def part(self, x: Tensor, rows: slice) -> Tensor:
        """What of a mask or a bias is the sequence's: [num_heads or 1, queries or 1, keys or 1]."""
        x = x[(None,) * (4 - x.dim())]
        x = x[self.number if x.shape[0] > 1 else 0]
        x = x[:, : len(self.q)][:, rows] if x.shape[1] > 1 else x
        return x[:, :, : len(self.k)] if x.shape[2] > 1 else x

    @functools.cached_property
    def blocks(self) -> Tensor:
        """[num_heads, n_q, n_k] bool: the block lists as a dense mask."""
        counts, indices, (block_m, block_n) = self.features.block_mask
        counts, indices = (x[self.number if len(x) > 1 else 0] for x in (counts, indices))
        keys = torch.arange(len(self.k), device=self.q.device) // block_n
        seen = torch.zeros(self.q.shape[1], counts.shape[1], len(self.k), dtype=torch.bool, device=self.q.device)
        for entry in range(indices.shape[2]):
            seen |= (indices[..., entry, None] == keys) & (entry < counts)[..., None]
        return seen.repeat_interleave(block_m, 1)[:, : len(self.q)]

    def scores(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """[num_heads, queries, keys], with everything that is added; in ``dtype`` throughout."""
        f, keys = self.features, self.per_query_head(self.k).to(dtype)
        scores = (self.q[rows].transpose(0, 1).to(dtype) @ keys.transpose(1, 2)) * self.scale
        if f.softcap:
            scores = f.softcap * torch.tanh(scores / f.softcap)
        if f.bias is not None:
            scores = scores + self.part(f.bias, rows).to(dtype)
        if f.alibi_slopes is not None:
            scores = scores - self.slopes.to(dtype) * self.distance(rows).abs()
        return scores

    @property
    def slopes(self) -> Tensor:
        slopes: Any = self.features.alibi_slopes
        return (slopes[self.number] if slopes.dim() == 2 else slopes)[:, None, None]

    def probabilities(self, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[num_heads, queries, keys], and the log-sum-exp. A sink is one more key, whose value is 0."""
        scores, seen, sinks = self.scores(rows, dtype), self.visible(rows), self.features.sinks
        if sinks is None:
            sinks = scores.new_full(scores.shape[:1], -math.inf)
        column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:2], 1)
        p, lse = oracle._softmax(torch.cat([scores.masked_fill(~seen, -math.inf), column], dim=-1))
        return p[..., :-1], lse

    @functools.cached_property
    def kept(self) -> Tensor | None:
        """[num_heads, n_q, n_k] bool: which probabilities dropout leaves."""
        f, sizes = self.features, (self.q.shape[1], len(self.q), len(self.k))
        if not f.dropout_p:
            return None
        keep = kept(int(f.dropout_seed) % 2**64, dropped_of_65536(f.dropout_p), self.number, *sizes)
        return torch.from_numpy(keep).to(self.q.device)

    def dropped(self, p: Tensor, rows: slice) -> Tensor:
        return p if self.kept is None else p * self.kept[:, rows]

    @property
    def factor(self) -> float:
        return 1.0 / (1.0 - dropped_of_65536(self.features.dropout_p) / 65536)


def sequences(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, f: Any) -> Iterator[Sequence]:
    cu_q = None if f.cu_seqlens_q is None else f.cu_seqlens_q.tolist()
    batch = q.shape[0] if cu_q is None else len(cu_q) - 1
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b in range(batch):
        place = b if cu_q is None else slice(cu_q[b], cu_q[b + 1])
        used = None if f.seqused_q is None else int(f.seqused_q[b])
        lse_place = (b,) if cu_q is None else (slice(None), place)
        keys, values = _rows(k, b, f), _rows(v, b, f)
        yield Sequence(f, scale, causal, b, q[place][:used], keys, values, (place,), lse_place)


def _rows(kv: Tensor, b: int, f: Any) -> Tensor:
    """The rows of key or value that are the sequence's, [n_k, num_heads_kv, head_dim]."""
    used = None if f.seqused_k is None else int(f.seqused_k[b])
    if f.page_table is not None:  # which means nothing behind the pages in use, and of NaN what a window left behind
        pages = None if used is None else -(-used // kv.shape[1])
        rows = kv[f.page_table[b][:pages].long()].flatten(0, 1).nan_to_num(0.0, math.inf, -math.inf)
    elif f.cu_seqlens_k is not None:
        rows = kv[int(f.cu_seqlens_k[b]) : int(f.cu_seqlens_k[b + 1])]
    else:
        rows = kv[b if f.cache_batch_idx is None else int(f.cache_batch_idx[b])]
    return rows[:used][0 if f.leftpad_k is None else int(f.leftpad_k[b]) :]


def dropped_of_65536(dropout_p: float | None) -> int:
    """How many of the numbers of 16 bits drop: never all, and as fp16 no limit tells 0 and -0 apart."""
    count = min(65535, round(65536 * (dropout_p or 0.0)))
    return 31746 if count == 31745 else count


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-7 (Salmon, Moraes, Dror and Shaw 2011) on arrays of 32-bit words, kept in uint64."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(7):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (b >> half) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def kept(seed: int, threshold: int, batch: int, heads: int, n_q: int, n_k: int) -> np.ndarray:
    """[heads, n_q, n_k] bool: which probabilities of sequence ``batch`` dropout leaves."""
    h, i, j = np.arange(heads)[:, None, None], np.arange(n_q)[:, None], np.arange(n_k)
    counter = (i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2, batch * heads + h, 0)
    words = np.stack(np.broadcast_arrays(*philox((seed & 0xFFFFFFFF, seed >> 32), counter)))
    which = np.broadcast_to(i // 8 % 2 * 2 + j // 8 % 2, words.shape[1:])
    word = np.take_along_axis(words, which[None], axis=0)[0]
    # As fp16, the greatest drop. Where that would take what is no number, they alone are kept.
    values = np.nan_to_num(np.arange(1 << 16, dtype=np.uint16).view(np.float16), nan=-np.inf, posinf=np.inf)
    rank = np.argsort(np.argsort(-values))
    keeps = rank >= threshold if threshold <= np.sum(values > -np.inf) else rank < 65536 - threshold
    return keeps[word >> (j % 2 * 16).astype(np.uint64) & np.uint64(0xFFFF)]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: str = "none", **features: Any
) -> tuple[Tensor, Tensor]:
    """Attention in fp64: (output, softmax_lse). Rows that no sequence covers are NaN in both."""
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=torch.float64, device=q.device)
    lse = torch.full(_lse_shape(q), math.nan, dtype=torch.float64, device=q.device)
    for s in sequences(q, k, v, scale, causal, Features(**features)):
        out[s.out_place], lse[s.lse_place] = 0.0, -math.inf  # also of the rows that are not in use
        values = s.per_query_head(s.v).double()
        for rows in s.chunks():
            p, lse[s.lse_place][:, rows] = s.probabilities(rows, torch.float64)
            out[s.out_place][rows] = (s.dropped(p, rows) @ values * s.factor).transpose(0, 1)
    return out, lse


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


def compare(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
    causal: str = "none", exact_scores: bool = False, product_error: float = 0.0, **features: Any,
) -> Errors:  # fmt: skip
    """Errors of ``out`` and, when given, of ``lse``. An error of a score counts as much as its key's probability does.
    float32 and float64 are granted the roundings of their sums.

    exact_scores: every product and sum of Q K^T is exact in fp32 whatever the order, so no error of the scores is
        granted. Huge scores are only comparable that way: their rounding errors alone would decide the softmax.
    product_error: half ulps of fp32 that each product of q k and of p v may be off by besides, relative.
    """
    mistake = oracle._mistaken("output", out, [*q.shape[:-1], v.shape[-1]], q)
    if lse is not None:
        mistake = mistake or oracle._mistaken("softmax_lse", lse, _lse_shape(q), q, torch.float32)
    if mistake:
        return mistake
    if q.dim() == 4 and len(q) > 1 and SAME_FOR_ALL.issuperset(features):
        out, q, k, v = map(_as_heads, (out, q, k, v))
        lse = None if lse is None else lse.flatten(0, 1)[None]
    fours = [torch.zeros(4, dtype=torch.float64, device=q.device)]
    for s in sequences(q, k, v, scale, causal, Features(**features)):
        fours.append(_unused_rows(s, out, lse))
        fours += [_errors(s, rows, out, lse, (exact_scores, product_error)) for rows in s.chunks()]
    return Errors(*torch.stack(fours).nan_to_num(math.inf, math.inf).amax(0).tolist())


def _as_heads(x: Tensor) -> Tensor:
    """[batch, seqlen, num_heads, head_dim] -> [1, seqlen, batch * num_heads, head_dim]: where sequences are as much
    alike as heads, one is computed for all; one after the other, 70,000 would take minutes."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _unused_rows(s: Sequence, out: Tensor, lse: Tensor | None) -> Tensor:
    """[4]: infinite where output or LSE of a row that is not in use isn't 0 or -inf."""
    wrong = (out[s.out_place][len(s.q) :] != 0.0).any()
    lse_wrong = torch.zeros_like(wrong) if lse is None else (lse[s.lse_place][:, len(s.q) :] != -math.inf).any()
    return torch.where(torch.stack([wrong, wrong, lse_wrong, lse_wrong]), math.inf, 0.0).double()


def _errors(s: Sequence, rows: slice, out: Tensor, lse: Tensor | None, granted: tuple[bool, float]) -> Tensor:
    p, ref_lse = s.probabilities(rows, torch.float64)
    values, weights = s.per_query_head(s.v).double(), s.dropped(p, rows) * s.factor
    ref = weights @ values
    score_error = _score_errors(s, rows, p, granted)[1]
    most = torch.finfo(out.dtype).max
    tolerance = 2.0 * _row_max(_unfused(s, rows).double().clamp(-most, most) - ref.clamp(-most, most))
    tolerance += _rounding(s, ref, weights, values, granted)
    if len(s.k):
        largest = values.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=(1, 2)).unsqueeze(-1)
        tolerance += 2.0 * s.factor * score_error.clamp_max(1.0) * largest
    tolerance = tolerance.masked_fill(p.sum(-1) == 0.0, 0.0)  # exactly zero, no tolerance at all
    ours = out[s.out_place][: len(s.q)][rows].transpose(0, 1)
    # What dropout scales up may be too large for the dtype: then it is infinite, or the largest number.
    overflow = (ref.abs() + tolerance.unsqueeze(-1) > most) & (ours.double().clamp(-most, most) == ref.sign() * most)
    errors = oracle._worst(oracle._difference(ours, ref).masked_fill(overflow, 0.0).amax(-1), tolerance)
    start = None if s.features.sinks is None else s.features.sinks.double()[:, None]
    lse_tolerance = oracle._lse_tolerance(ref_lse, len(s.k) + 1, score_error, start)
    found = ref_lse if lse is None else lse[s.lse_place][:, : len(s.q)][:, rows]
    difference = oracle._difference(found, ref_lse)
    return torch.stack([*errors, *oracle._worst(difference, lse_tolerance.masked_fill(ref_lse == -math.inf, 0.0))])


def _unfused(s: Sequence, rows: slice) -> Tensor:
    """[num_heads, queries, head_dim_v] in the input's dtype: P and the output rounded to it."""
    compute = torch.float64 if s.q.dtype == torch.float64 else torch.float32
    p, _ = s.probabilities(rows, compute)
    weights = s.dropped(p, rows).to(s.q.dtype).to(compute)
    return (weights @ s.per_query_head(s.v).to(compute) * s.factor).to(s.q.dtype)


def _score_errors(s: Sequence, rows: slice, p: Tensor, granted: tuple[bool, float]) -> tuple[Tensor, Tensor]:
    """Bounds on the error of a score: [num_heads, queries, keys], and averaged over the keys as P weighs them.

    An error e_j of every score changes p_j by p_j (e_j - sum_j p_j e_j) to first order, and the LSE by the sum.
    Partial sums of q k are at most |q| |k|. A tensor core adds 16 products at a time and truncates, which costs an ulp
    (two half ulps) where rounding costs half: head_dim / 8 half ulps, and two more for the scale and the exponent;
    without one, it is a chain of head_dim roundings. Scores of -inf have no error. tanh is right to 4 ulp of 1, and
    times the softcap once more rounded. Every term that is added is rounded itself, with its sum, into log2 units and
    in the exponent: 4 half ulps.
    """
    f, eps = s.features, HALF_ULP.get(s.q.dtype, FP32_EPS)
    norms = [x.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1) for x in (s.q[rows], s.k)]
    dot = abs(s.scale) * norms[0].T.unsqueeze(-1) * s.per_query_head(norms[1].unsqueeze(-1)).transpose(1, 2)
    halves = s.q.shape[-1] / 8 + 2 if s.q.dtype in (torch.float16, torch.bfloat16) else s.q.shape[-1] + 8
    halves = 0.0 if granted[0] else halves + granted[1]
    error = halves * eps * dot.expand_as(p)
    size = torch.zeros_like(p)
    if f.softcap:
        error = error + 10 * eps * f.softcap
    if f.bias is not None:
        size = size + s.part(f.bias, rows).double().abs()
    if f.alibi_slopes is not None:
        size = size + s.slopes.double().abs() * s.distance(rows).abs()
    if f.bias is not None or f.alibi_slopes is not None:
        size = size + (dot.clamp_max(f.softcap) if f.softcap else dot)
    errors = (error + 4 * eps * size).nan_to_num(0.0, 0.0, 0.0)
    average = (p * errors).sum(-1)
    if f.sinks is not None:
        average += (1.0 - p.sum(-1)) * 4 * eps * f.sinks.double().nan_to_num(0.0, 0.0, 0.0).abs()[:, None]
    return errors, average


def _rounding(s: Sequence, ref: Tensor, weights: Tensor, values: Tensor, granted: tuple[bool, float]) -> Tensor:
    """[num_heads, queries]: what rounding the output, P and the sums may cost."""
    info = torch.finfo(s.q.dtype)
    ulps = oracle.ULPS * oracle.ulp(_row_max(ref), s.q.dtype)
    if s.q.dtype in (torch.float16, torch.bfloat16):
        # Half an ulp of p, relative, or of the smallest number that there is.
        least = (weights != 0.0) * (info.smallest_normal * info.eps / 2 * s.factor)
        variance = (info.eps / 2 * weights) ** 2 + least**2
        return torch.maximum(ulps, DEVIATIONS * _row_max((variance @ values**2).sqrt()))
    halves = len(s.k) + 16 + granted[1]
    return ulps + halves * HALF_ULP.get(s.q.dtype, FP32_EPS) * _row_max(weights @ values.abs())


def _row_max(x: Tensor) -> Tensor:
    """[num_heads, queries, head_dim_v] -> [num_heads, queries]: the largest magnitude that is a number."""
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=-1)
