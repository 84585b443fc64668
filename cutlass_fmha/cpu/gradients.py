"""The op ``attend_backward`` on CPU tensors.

Probabilities are computed anew, a chunk of queries with all of their keys at a time: no more of them exist at
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutlass_fmha.cpu import plain
from cutlass_fmha.cpu.features import Sequence, keys_of, sequences
from cutlass_fmha.features import Features, Sizes

Gradients = tuple[Tensor, Tensor, Tensor]


def attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    features: Features,
    sizes: Sizes,
) -> Gradients:
    """The gradients of query, key and value, in their shapes and dtype; of rows that are nobody's, 0.

    ``dout`` is that of the output, ``dlse`` that of the LSE, None: there is none.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (query, key, value))
    for sequence, rows in sequences(query, key, value, scale, causal, features, sizes):
        b = sequence.number
        packed = sizes.total_q is not None
        own_dout, own_dq = (x[rows] if packed else x[b] for x in (dout, dq))
        own_dlse = None
        if dlse is not None:
            own_dlse = dlse[:, rows] if packed else dlse[b]
        own_dk, own_dv = keys_of(dk, b, features), keys_of(dv, b, features)
        for queries in _chunks(sequence):
            chunk = slice(queries.start, queries.stop)
            terms = _terms(sequence, queries, own_dout[chunk], own_dlse)
            own_dq[chunk] = terms[0]
            own_dk += terms[1]
            own_dv += terms[2]
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _chunks(sequence: Sequence) -> Iterator[range]:
    """None where there are no keys, and everything is 0."""
    if len(sequence.k) == 0:
        return
    step = max(1, plain.SCORES_PER_CHUNK // (sequence.sizes.num_heads * len(sequence.k)))
    for start in range(0, len(sequence.q), step):
        yield range(start, min(start + step, len(sequence.q)))


def _terms(sequence: Sequence, queries: range, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """dQ of a chunk of queries, [queries, num_heads, head_dim], and its share of dK and dV."""
    keys, values = sequence.heads_first  # [num_heads_kv, keys, head_dim]
    heads, heads_kv, count = sequence.sizes.num_heads, sequence.sizes.num_heads_kv, len(queries)

    def grouped(x: Tensor) -> Tensor:
        """The query heads that share keys below each other, as one matrix."""
        return x.to(keys.dtype).transpose(0, 1).reshape(heads_kv, heads // heads_kv * count, -1)

    q, dout = grouped(sequence.q[queries.start : queries.stop]), grouped(dout)
    scores = torch.bmm(q, keys.transpose(1, 2)).view(heads, count, -1)
    p = _softmax(sequence.finish_scores(scores, queries, range(keys.shape[1])))
    ds = torch.bmm(dout, values.transpose(1, 2)).view_as(p)
    term = (p * ds).sum(-1)
    if dlse is not None:
        term = term - dlse[:, queries.start : queries.stop]
    ds = ds.sub_(term.unsqueeze(-1)).mul_(p).mul_(sequence.scale).view(heads_kv, -1, p.shape[-1])
    dq = torch.bmm(ds, keys).view(heads, count, -1).transpose(0, 1)
    dk = torch.bmm(ds.transpose(1, 2), q).transpose(0, 1)
    return dq, dk, torch.bmm(p.view_as(ds).transpose(1, 2), dout).transpose(0, 1)


def _softmax(scores: Tensor) -> Tensor:
    """0 where a query sees no key."""
    largest = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    return (p / total).masked_fill(total == 0, 0.0)
