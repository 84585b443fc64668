"""The op ``attend_backward`` on CPU tensors.

Probabilities are computed anew, a chunk of queries with all of their keys at a time: no more of them exist at
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import dropout
from cutlass_fmha.cpu import plain
from cutlass_fmha.cpu.features import Sequence, keys_of, sequences
from cutlass_fmha.features import Features, Sizes

#: How far, relatively, the LSE that a forward gave may be from the same one computed anew: it is float32.
SAME_LSE = 1e-5


class Gradients(NamedTuple):
    """Of query, key and value, of bias and sinks where these are given."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None


def attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    causal: str,
    features: Features,
    sizes: Sizes,
) -> Gradients:
    """The gradients in the shapes and dtypes of what they are of; of rows that are nobody's, 0.

    ``dout`` is that of the output, ``dlse`` that of the LSE, None: there is none. ``output`` and ``lse`` may
    be of more keys than these: then the gradients are these keys' share of theirs.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    given = (query, key, value, features.bias, features.sinks)
    found = Gradients(*(None if x is None else torch.zeros(x.shape, dtype=dtype) for x in given))  # type: ignore[arg-type]
    for sequence, rows in sequences(query, key, value, scale, causal, features, sizes):
        b = sequence.number
        place = rows if sizes.total_q is not None else b
        columns = (slice(None), rows) if sizes.total_q is not None else (b,)
        own_dlse = None if dlse is None else dlse[columns]
        own_dk, own_dv = keys_of(found.key, b, features), keys_of(found.value, b, features)
        for queries in _chunks(sequence):
            chunk = slice(queries.start, queries.stop)
            result = output[place][chunk], lse[columns][:, chunk]
            terms = _terms(sequence, queries, dout[place][chunk], own_dlse, result)
            found.query[place][chunk] = terms.query
            own_dk += terms.key
            own_dv += terms.value
            if found.bias is not None and terms.bias is not None:
                _add_broadcast(found.bias, b, queries, terms.bias)
            if found.sinks is not None and terms.sinks is not None:
                found.sinks.add_(terms.sinks)
    pairs = zip(found, given, strict=True)
    return Gradients(*(None if x is None or of is None else x.to(of.dtype) for x, of in pairs))  # type: ignore[arg-type]


def _chunks(sequence: Sequence) -> Iterator[range]:
    """Without keys, everything but what a sink gets of the LSE is 0; without heads, there is nothing."""
    heads = sequence.sizes.num_heads
    if heads == 0 or (len(sequence.k) == 0 and sequence.features.sinks is None):
        return
    step = max(1, plain.SCORES_PER_CHUNK // (heads * max(1, len(sequence.k))))
    for start in range(0, len(sequence.q), step):
        yield range(start, min(start + step, len(sequence.q)))


def _terms(
    sequence: Sequence, queries: range, dout: Tensor, dlse: Tensor | None, result: tuple[Tensor, Tensor]
) -> Gradients:
    """dQ of a chunk of queries, [queries, num_heads, head_dim], and its share of the others.

    That of the bias is [num_heads, queries, keys]. ``result``: the chunk's output and its LSE.
    """
    output, lse = result
    keys, values = sequence.heads_first  # [num_heads_kv, keys, head_dim]
    heads, heads_kv, count = sequence.sizes.num_heads, sequence.sizes.num_heads_kv, len(queries)
    f, every = sequence.features, range(keys.shape[1])

    def grouped(x: Tensor) -> Tensor:
        """The query heads that share keys below each other, as one matrix."""
        return x.to(keys.dtype).transpose(0, 1).reshape(heads_kv, heads // heads_kv * count, -1)

    q, dout = grouped(sequence.q[queries.start : queries.stop]), grouped(dout)
    scores = torch.bmm(q, keys.transpose(1, 2)).view(heads, count, len(sequence.k))
    slope = 1.0 - (scores * (sequence.scale / f.softcap)).tanh().square() if f.softcap > 0.0 else None
    sinks = None if f.sinks is None else f.sinks.to(keys.dtype)
    p, of_sink, own_lse = _softmax(sequence.finish_scores(scores, queries, every), sinks)
    share = _share(own_lse, lse)
    p, of_sink = p * share.unsqueeze(-1), of_sink * share
    kept = sequence.drop(torch.full_like(p, dropout.scale(f.dropout_p)), queries, every)
    ds = torch.bmm(dout, values.transpose(1, 2)).view_as(p).mul_(kept)
    # What is computed anew is more exact than the output, but it knows these keys alone.
    whole = (dout.view(heads, count, -1) * output.to(dout.dtype).transpose(0, 1)).sum(-1)
    term = torch.where(share == 1, (p * ds).sum(-1), whole)
    if dlse is not None:
        term = term - dlse[:, queries.start : queries.stop]
    ds = ds.sub_(term.unsqueeze(-1)).mul_(p)
    dbias = None if f.bias is None else ds.clone()
    if slope is not None:
        ds = ds.mul_(slope)
    ds = ds.mul_(sequence.scale).view(heads_kv, heads // heads_kv * count, len(sequence.k))
    dq = torch.bmm(ds, keys).view(heads, count, -1).transpose(0, 1)
    dk = torch.bmm(ds.transpose(1, 2), q).transpose(0, 1)
    dv = torch.bmm((p * kept).view_as(ds).transpose(1, 2), dout).transpose(0, 1)
    return Gradients(dq, dk, dv, dbias, None if sinks is None else -(of_sink * term).sum(-1))


def _share(own: Tensor, lse: Tensor) -> Tensor:
    """What these keys, by their own LSE, are of all that another is of: 1 but for rounding."""
    lse = lse.to(own.dtype)
    same = (own == lse) | ((own - lse).abs() <= SAME_LSE * lse.abs().clamp(min=1.0))
    return torch.exp((own - lse).masked_fill(same, 0.0))


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """[num_heads, queries, keys]; a sink's and the LSE, [num_heads, queries]; 0 if a query sees nothing."""
    if sinks is None:
        sinks = scores.new_full((scores.shape[0],), -math.inf)
    column = sinks[:, None, None].expand(*scores.shape[:2], 1)
    scores = torch.cat([column, scores], dim=-1)
    largest = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    p = (p / total).masked_fill(total == 0, 0.0)
    return p[..., 1:].contiguous(), p[..., 0], (largest + total.log()).squeeze(-1)


def _add_broadcast(total: Tensor, b: int, queries: range, share: Tensor) -> None:
    """Adds [num_heads, queries, keys] of sequence ``b`` to a tensor that is broadcast to four dimensions."""
    total = total[(None,) * (4 - total.dim())]
    total = total[b if total.shape[0] > 1 else 0]
    if total.shape[1] > 1:
        total = total[:, queries.start : queries.stop]
    if total.shape[2] > 1:
        total = total[..., : share.shape[-1]]
    total += share.sum_to_size(total.shape)
