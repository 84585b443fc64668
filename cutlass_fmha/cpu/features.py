"""The op ``attend`` on CPU tensors: everything that a call may say, one sequence after the other.

Every sequence is computed as if it were alone, in chunks whose sizes do not depend on the batch: its result
has the same bits in any batch. The online softmax is that of ``plain.py``, with what changes a score or hides
a key between the product and the exponential.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cutlass_fmha import dropout
from cutlass_fmha.cpu import plain
from cutlass_fmha.features import NO_LIMIT, Features, Sizes


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: str, features: Features, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Output in query's dtype, of ``sizes.out_shape``, and LSE in fp32, of ``sizes.lse_shape``.

    The arguments have passed ``check_features`` and ``check_contents``. Raises ValueError for pages that are not
    there.
    """
    output = torch.zeros(sizes.out_shape, dtype=query.dtype)
    lse = torch.full(sizes.lse_shape, -math.inf, dtype=torch.float32)
    if output.numel() == 0:
        return output, lse
    for sequence, rows in sequences(query, key, value, scale, causal, features, sizes):
        # Views of the sequence's rows: [rows, num_heads, head_dim_v] and [num_heads, rows].
        own_output = output[sequence.number] if sizes.total_q is None else output[rows]
        own_lse = lse[sequence.number] if sizes.total_q is None else lse[:, rows]
        for queries in sequence.chunks():
            chunk = slice(queries.start, queries.stop)
            own_output[chunk], own_lse[:, chunk] = sequence.attend(queries)
    return output, lse


def sequences(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: str, features: Features, sizes: Sizes
) -> Iterator[tuple[Sequence, slice]]:
    """The sequences, and which rows of a packed query they are."""
    cu_seqlens = None if features.cu_seqlens_q is None else features.cu_seqlens_q.tolist()
    right = features.window_right
    if causal != "none":
        right = 0 if right == NO_LIMIT else min(right, 0)
    for b in range(sizes.batch):
        rows = slice(0, 0) if cu_seqlens is None else slice(cu_seqlens[b], cu_seqlens[b + 1])
        q = query[b] if cu_seqlens is None else query[rows]
        if features.seqused_q is not None:
            q = q[: int(features.seqused_q[b])]
        k, v = keys_of(key, b, features), keys_of(value, b, features)
        offset = 0 if causal == "top-left" else len(k) - len(q)
        sequence = Sequence(b, q, k, v, scale, offset, features.window_left, right, features, sizes)
        if features.page_table is not None:
            _leave_pages_behind(sequence, features.page_table[b], key.shape[0])
        yield sequence, rows


def _leave_pages_behind(sequence: Sequence, table: Tensor, pages: int) -> None:
    """Zeros as keys and values that a window has left behind: their pages may be gone, the others may not."""
    end = 0 if sequence.left == NO_LIMIT else min(len(sequence.k), max(0, sequence.offset - sequence.left))
    gone = slice(sequence.prefix, end)
    sequence.k[gone] = sequence.v[gone] = 0.0
    size, padding = sequence.sizes.page_size, sequence.features.leftpad_k
    first = 0 if padding is None else int(padding[sequence.number])
    begin = -(-(first + sequence.prefix) // size) if sequence.prefix else 0
    # What stands before the first page with a key, or behind the last, means nothing.
    used = table[: -(-(first + len(sequence.k)) // size) if len(sequence.k) else 0]
    read = torch.cat((used[first // size : begin], used[max(begin, (first + end) // size) :]))
    _check_range("page_table", read, pages)


def keys_of(tensor: Tensor, b: int, features: Features) -> Tensor:
    """The sequence's rows of key or value: [n_k, num_heads_kv, head_dim]."""
    used = None if features.seqused_k is None else int(features.seqused_k[b])
    if features.page_table is not None:
        pages = features.page_table[b]
        if used is not None:
            pages = pages[: -(-used // tensor.shape[1])]
        if len(tensor) == 0:
            _check_range("page_table", pages, 0)
        # Of what a window left behind, any: _leave_pages_behind().
        rows = tensor.index_select(0, pages.clamp(0, len(tensor) - 1)).flatten(0, 1)
    elif features.cu_seqlens_k is not None:
        rows = tensor[int(features.cu_seqlens_k[b]) : int(features.cu_seqlens_k[b + 1])]
    else:
        rows = tensor[b if features.cache_batch_idx is None else int(features.cache_batch_idx[b])]
    first = 0 if features.leftpad_k is None else int(features.leftpad_k[b])
    return rows[:used][first:]


@dataclass(frozen=True)
class Sequence:
    """The queries [n_q, num_heads, head_dim] and the keys [n_k, num_heads_kv, head_dim] of one sequence."""

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    offset: int
    left: int
    right: int
    features: Features
    sizes: Sizes

    @functools.cached_property
    def prefix(self) -> int:
        lengths = self.features.prefix_lengths
        return 0 if lengths is None else min(int(lengths[self.number]), len(self.k))

    @functools.cached_property
    def heads_first(self) -> tuple[Tensor, Tensor]:
        """Key and value as [num_heads_kv, n_k, head_dim], in the dtype that is computed with."""
        dtype = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        return self.k.to(dtype).transpose(0, 1), self.v.to(dtype).transpose(0, 1)

    def chunks(self) -> Iterator[range]:
        step = plain.SCORES_PER_CHUNK // (self.sizes.num_heads * plain.KEYS_PER_CHUNK)
        step = max(plain.MIN_QUERIES_PER_CHUNK, step)
        for start in range(0, len(self.q), step):
            yield range(start, min(start + step, len(self.q)))

    def attend(self, queries: range) -> tuple[Tensor, Tensor]:
        """Output [queries, num_heads, head_dim_v] and LSE [num_heads, queries] of a chunk of the queries."""
        keys, values = self.heads_first
        heads, heads_kv, count = self.sizes.num_heads, self.sizes.num_heads_kv, len(queries)
        q = self.q[queries.start : queries.stop].to(keys.dtype).transpose(0, 1)
        # One matrix per head of key and value; the query heads that share it stand below each other.
        q = q.reshape(heads_kv, heads // heads_kv * count, -1)
        row_max = q.new_full((heads, count, 1), -math.inf)
        row_sum = torch.zeros_like(row_max)
        acc = q.new_zeros((heads, count, self.sizes.head_dim_v))
        for chunk in self.key_chunks(queries):
            part = slice(chunk.start, chunk.stop)
            scores = torch.bmm(q, keys[:, part].transpose(1, 2)).view(heads, count, len(chunk))
            scores = self.finish_scores(scores, queries, chunk)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # A row that has seen -inf only has no maximum to refer to; with 0 its exponentials are 0.
            reference = new_max.masked_fill(new_max == -math.inf, 0.0)
            probabilities = scores.sub_(reference).exp_()
            correction = torch.exp(row_max - reference)
            row_sum.mul_(correction).add_(probabilities.sum(-1, keepdim=True))
            weights = self.drop(probabilities, queries, chunk).view(heads_kv, -1, len(chunk))
            acc.mul_(correction).add_(torch.bmm(weights, values[:, part]).view_as(acc))
            row_max = new_max
        return self.finish(acc, row_max, row_sum)

    def key_chunks(self, queries: range) -> Iterator[range]:
        """The keys that the window, or the prefix, shows to any of the queries."""
        first, last = 0, len(self.k)
        if self.left != NO_LIMIT and not self.prefix:
            first = max(0, queries.start + self.offset - self.left)
        if self.right != NO_LIMIT:
            last = min(last, max(queries.stop + self.offset + self.right, self.prefix))
        for start in range(first, last, plain.KEYS_PER_CHUNK):
            yield range(start, min(start + plain.KEYS_PER_CHUNK, last))

    def finish_scores(self, scores: Tensor, queries: range, keys: range) -> Tensor:
        """[num_heads, queries, keys]: products become scores, in place, and -inf where the key is hidden."""
        f = self.features
        scores.mul_(self.scale)  # after the product, as the kernels do: a scaled query is a rounded one
        if f.softcap > 0.0:
            scores.div_(f.softcap).tanh_().mul_(f.softcap)
        if f.bias is not None:
            scores.add_(self.part(f.bias, queries, keys))
        if f.alibi_slopes is not None:
            slopes = f.alibi_slopes if f.alibi_slopes.dim() == 1 else f.alibi_slopes[self.number]
            distance = self.distance(queries, keys).abs().to(scores.dtype)
            scores.sub_(slopes.to(scores.dtype)[:, None, None] * distance)
        for visible in self.masks(queries, keys):
            scores.masked_fill_(~visible, -math.inf)
        return scores

    def distance(self, queries: range, keys: range) -> Tensor:
        """[queries, keys] of i + offset - j: how far before its query a key stands."""
        i = torch.arange(queries.start, queries.stop).unsqueeze(1)
        return i + self.offset - torch.arange(keys.start, keys.stop)

    def masks(self, queries: range, keys: range) -> Iterator[Tensor]:
        """bool, broadcastable to [num_heads, queries, keys]: all of them show the keys that are visible."""
        if self.left != NO_LIMIT or self.right != NO_LIMIT:
            distance = self.distance(queries, keys)
            visible = torch.ones_like(distance, dtype=torch.bool)
            if self.left != NO_LIMIT:
                visible &= distance <= self.left
            if self.right != NO_LIMIT:
                visible &= distance >= -self.right
            yield visible | (torch.arange(keys.start, keys.stop) < self.prefix)
        if self.features.mask is not None:
            yield self.part(self.features.mask, queries, keys)
        if self.features.block_counts is not None:
            rows = torch.arange(queries.start, queries.stop) // self.features.block_m
            columns = torch.arange(keys.start, keys.stop) // self.features.block_n
            yield self.blocks[:, rows][:, :, columns]

    def part(self, tensor: Tensor, queries: range, keys: range) -> Tensor:
        """[num_heads, queries, keys] of a mask or a bias."""
        sizes = self.sizes
        whole = tensor.expand(sizes.batch, sizes.num_heads, sizes.seqlen_q, sizes.seqlen_k)
        return whole[self.number, :, queries.start : queries.stop, keys.start : keys.stop]

    @functools.cached_property
    def blocks(self) -> Tensor:
        """[num_heads, query blocks, key blocks] bool: the block lists as a mask of blocks."""
        counts, indices = self.features.block_counts, self.features.block_indices
        assert counts is not None and indices is not None
        batch, heads = self.sizes.batch, self.sizes.num_heads
        counts = counts.expand(batch, heads, -1)[self.number].unsqueeze(-1)
        indices = indices.expand(batch, heads, -1, -1)[self.number].long()
        # A shorter sequence has fewer blocks than the lists may name: what is beyond goes into a last column.
        columns = -(-len(self.k) // self.features.block_n)
        used = torch.arange(indices.shape[-1]) < counts
        blocks = torch.zeros(heads, indices.shape[1], columns + 1, dtype=torch.bool)
        return blocks.scatter_(2, torch.where(used, indices, columns).clamp_max(columns), True)

    def drop(self, probabilities: Tensor, queries: range, keys: range) -> Tensor:
        f = self.features
        if f.dropout_p == 0.0 or f.dropout_seed is None:
            return probabilities
        ranges = (queries.start, queries.stop), (keys.start, keys.stop)
        below, heads = dropout.threshold(f.dropout_p), self.sizes.num_heads
        return probabilities.mul_(dropout.kept(int(f.dropout_seed), below, self.number, heads, *ranges))

    def finish(self, acc: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a chunk and its LSE, from the sums over all keys."""
        if self.features.sinks is not None:
            sinks = self.features.sinks.to(acc.dtype)[:, None, None]
            new_max = torch.maximum(row_max, sinks)
            reference = new_max.masked_fill(new_max == -math.inf, 0.0)
            correction = torch.exp(row_max - reference)
            row_sum = row_sum * correction + torch.exp(sinks - reference)
            acc, row_max = acc * correction, new_max
        nothing = row_sum == 0
        output = (acc / row_sum).masked_fill(nothing, 0.0) * dropout.scale(self.features.dropout_p)
        lse = (row_max + torch.log(row_sum)).masked_fill(nothing, -math.inf)
        return output.transpose(0, 1), lse.squeeze(-1)


# ---- contents ----------------------------------------------------------------------------------------------


def check_contents(query: Tensor, key: Tensor, features: Features, sizes: Sizes) -> None:
    """ValueError where lengths and numbers lead out of the tensors: only asked on the CPU, where they can be
    read."""
    for side, tensor, longest in (("q", query, sizes.seqlen_q), ("k", key, sizes.seqlen_k)):
        if (starts := getattr(features, f"cu_seqlens_{side}")) is not None:
            check_starts(f"cu_seqlens_{side}", starts, tensor.shape[0])
            _check_longest(f"max_seqlen_{side}", longest, f"cu_seqlens_{side}", starts.diff())
    if features.seqused_k is not None and features.cu_seqlens_k is None and features.max_seqlen_k is not None:
        capacity = features.page_table.shape[1] * key.shape[1] if features.page_table is not None else key.shape[1]
        _check_longest("max_seqlen_k", sizes.seqlen_k, "seqused_k", features.seqused_k.clamp_max(capacity))
    for name in ("seqused_q", "seqused_k", "leftpad_k", "prefix_lengths"):
        _check_range(name, getattr(features, name), None)
    _check_range("cache_batch_idx", features.cache_batch_idx, key.shape[0])
    if (counts := features.block_counts) is not None and (indices := features.block_indices) is not None:
        entries = indices.shape[-1]
        _check_range("block_counts", counts, entries + 1)
        used = torch.arange(entries) < counts.unsqueeze(-1)
        _check_range("block_indices", torch.where(used, indices, 0), None)
        rising = indices.diff(dim=-1) > 0
        if not (rising | ~used[..., 1:]).all():
            raise ValueError("block_indices must ascend")


def check_starts(name: str, starts: Tensor, total: int) -> None:
    if starts[0] < 0 or starts[-1] > total or (starts.diff() < 0).any():
        raise ValueError(f"{name} must rise from 0 to {total} at most, got {starts.tolist()}")


def _check_longest(bound: str, longest: int, name: str, lengths: Tensor) -> None:
    if (lengths > longest).any():
        raise ValueError(f"{bound} is {longest}, and {name} has a sequence of {int(lengths.max())}")


def _check_range(name: str, numbers: Tensor | None, end: int | None) -> None:
    if numbers is None or numbers.numel() == 0:
        return
    least, largest = int(numbers.min()), int(numbers.max())
    if least < 0 or (end is not None and largest >= end):
        allowed = "0 or more" if end is None else f"0 to {end - 1}"
        raise ValueError(f"{name} must hold numbers of {allowed}, got {least if least < 0 else largest}")
