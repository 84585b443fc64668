"""The op on CPU tensors: the same results in every corner, and memory that grows with seqlen, not its square.

There are two ways to the same numbers. torch's fused CPU kernel takes what it computes exactly as the op is
defined; the rest goes through an online softmax over chunks of keys (FlashAttention-2, Dao 2023, algorithm
1). Half-precision inputs are computed in fp32 and rounded once, at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cutlass_fmha import private_torch

# Chunks of scores stay in a core's second-level cache: 1 MiB in fp32, unless there are very many heads.
KEYS_PER_CHUNK = 256
SCORES_PER_CHUNK = 1 << 18
MIN_QUERIES_PER_CHUNK = 16


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, diagonal: int | None) -> tuple[Tensor, Tensor]:
    """Attention where key j is visible to query i when j <= i + diagonal (None: always).

    query is [batch, seqlen_q, num_heads, head_dim], key and value are [batch, seqlen_k, num_heads_kv,
    head_dim], in fp16, bf16, fp32 or fp64.

    Returns the output, contiguous and of query's shape and dtype, and the natural-log LSE of the scaled
    scores in fp32, [batch, num_heads, seqlen_q]. A query that sees no key has output 0 and LSE -inf.
    """
    batch, seqlen_q, num_heads, _ = query.shape
    seqlen_k, num_heads_kv = key.shape[1], key.shape[2]
    if query.numel() == 0 or seqlen_k == 0:
        output = torch.zeros(query.shape, dtype=query.dtype)
        return output, torch.full((batch, num_heads, seqlen_q), -math.inf, dtype=torch.float32)

    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    result = None
    exact = num_heads == num_heads_kv and (diagonal is None or (diagonal == 0 and scale > 0))
    if exact and private_torch.flash_for_cpu is not None:
        result = _torch_flash(query, key, value, scale, diagonal is not None, compute_dtype)
    if result is None:
        result = _online_softmax(query, key, value, scale, diagonal, compute_dtype)
    output, lse = result
    return output.to(query.dtype).contiguous(), lse.to(torch.float32).contiguous()


def _torch_flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """torch's fused kernel, causal in the top-left sense; None where its result may be a special case.

    It is not asked for grouped heads (an older torch reads keys beyond the end), empty tensors (it divides by
    zero), and a mask with a scale that is not positive (it scales the mask too). A row whose scores are all
    -inf gets an LSE of 0 or NaN from it, which an LSE that is really 0 or NaN looks like too: such a result
    is computed anew.
    """
    output, lse = private_torch.flash_for_cpu(
        query.to(dtype).transpose(1, 2),
        key.to(dtype).transpose(1, 2),
        value.to(dtype).transpose(1, 2),
        is_causal=causal,
        scale=scale,
    )
    if not torch.isfinite(lse).logical_and(lse != 0).all():
        return None
    return output.transpose(1, 2), lse


def _online_softmax(
    query: Tensor, key: Tensor, value: Tensor, scale: float, diagonal: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads, head_dim = query.shape
    seqlen_k, num_heads_kv = key.shape[1], key.shape[2]
    group = num_heads // num_heads_kv
    # One matrix per head of key and value; the query heads that share it stand below each other.
    matrices = batch * num_heads_kv
    keys = key.to(dtype).transpose(1, 2).reshape(matrices, seqlen_k, head_dim)
    values = value.to(dtype).transpose(1, 2).reshape(matrices, seqlen_k, head_dim)
    queries = query.to(dtype).transpose(1, 2).reshape(matrices, group, seqlen_q, head_dim)

    output = torch.empty((matrices, group, seqlen_q, head_dim), dtype=dtype)
    lse = torch.empty((matrices, group, seqlen_q), dtype=dtype)
    step = max(MIN_QUERIES_PER_CHUNK, SCORES_PER_CHUNK // (matrices * group * KEYS_PER_CHUNK))
    for start in range(0, seqlen_q, step):
        chunk = slice(start, min(start + step, seqlen_q))
        # The chunk's first query is number 0 to the mask: the diagonal is shifted to it.
        shifted = None if diagonal is None else diagonal + start
        output[:, :, chunk], lse[:, :, chunk] = _attend(queries[:, :, chunk], keys, values, scale, shifted)
    heads_first = output.view(batch, num_heads, seqlen_q, head_dim)
    return heads_first.transpose(1, 2), lse.view(batch, num_heads, seqlen_q)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, diagonal: int | None) -> tuple[Tensor, Tensor]:
    """Queries [matrices, group, seqlen_q, head_dim] against all of their keys, a chunk at a time."""
    matrices, group, seqlen_q, head_dim = queries.shape
    rows = queries.reshape(matrices, group * seqlen_q, head_dim)
    row_max = rows.new_full((*rows.shape[:2], 1), -math.inf)
    row_sum = torch.zeros_like(row_max)
    acc = torch.zeros_like(rows)

    seqlen_k = keys.shape[1]
    visible = seqlen_k if diagonal is None else max(0, min(seqlen_k, diagonal + seqlen_q))
    for start in range(0, visible, KEYS_PER_CHUNK):
        stop = min(start + KEYS_PER_CHUNK, visible)
        # Scaled after the product, as the kernels do: a scaled query is a rounded one.
        scores = torch.bmm(rows, keys[:, start:stop].transpose(1, 2)).mul_(scale)
        if diagonal is not None and stop - 1 > diagonal:
            by_query = scores.view(matrices, group, seqlen_q, stop - start)
            by_query.masked_fill_(_hidden(seqlen_q, start, stop, diagonal), -math.inf)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        # A row that has seen -inf only has no maximum to refer to; with 0 its exponentials are 0, not NaN.
        reference = new_max.masked_fill(new_max == -math.inf, 0.0)
        probabilities = scores.sub_(reference).exp_()
        correction = torch.exp(row_max - reference)
        row_sum.mul_(correction).add_(probabilities.sum(-1, keepdim=True))
        acc.mul_(correction).baddbmm_(probabilities, values[:, start:stop])
        row_max = new_max

    nothing = row_sum == 0
    output = (acc / row_sum).masked_fill(nothing, 0.0)
    lse = (row_max + torch.log(row_sum)).masked_fill(nothing, -math.inf)
    shape = (matrices, group, seqlen_q)
    return output.view(*shape, head_dim), lse.view(shape)


def _hidden(seqlen_q: int, start: int, stop: int, diagonal: int) -> Tensor:
    """[seqlen_q, stop - start]: True where the mask hides a key, counted from ``start``, from a query."""
    return torch.arange(start, stop) > torch.arange(seqlen_q).unsqueeze(1) + diagonal
