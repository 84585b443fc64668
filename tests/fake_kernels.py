"""A ``_C.run`` that computes in Python, from nothing but what ``src/features/params.h`` says.

It reads and writes plain memory, one sequence after the other, so that what Python packs is tested against
what the tensors hold. Dropout's random numbers are the oracle's.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from oracle_features import kept
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.dispatch.table import Table


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory that somebody else owns."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def integers(address: int, count: int, first: int = 0) -> list[int]:
    return list((ctypes.c_int32 * (first + count)).from_address(address))[first:] if count else []


@dataclass
class Sequence:
    """Which rows are a sequence's."""

    number: int
    entry_q: int
    first_q: int
    rows_q: int
    queries: int
    entry_k: int
    first_k: int
    keys: int


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, zeros in rows of -inf, and the log-sum-exp."""
    largest = scores.amax(-1, keepdim=True)
    p = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0.0, 1.0), (largest + total.log()).squeeze(-1)


class Launched(NamedTuple):
    row: int
    params: _C.AttentionParams
    device: int
    stream: int


#: What a plain row takes as it is where nothing is asked.
NOT_OF_PLAIN_ROWS = tuple(
    name
    for name in vars(_C.AttentionParams)
    if re.match("cu_|seqused|leftpad|batch_index|page|prefix|window_left|mask|block_|softcap|bias", name)
    or re.match("alibi|sinks|dropout|pack|splits|partial", name)
)


def install(monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]) -> None:
    """Puts a ``_C.run`` in the place of the real one, and of ``_C.launch``."""

    def launch(row: int, plan: _C.AttentionParams, device: int, stream: int, *of_call: Any) -> None:
        run(row, plan.of_call(*of_call), device, stream)

    monkeypatch.setattr(_C, "run", run)
    monkeypatch.setattr(_C, "launch", launch)


class FakeKernels:
    """Stands in for ``_C.run``: remembers launches and, if ``compute``, does them in fp64."""

    def __init__(self, build: Table, compute: bool = True) -> None:
        self.build, self.compute = build, compute
        self.launches: list[Launched] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, self)

    def of(self, scored: bool) -> list[Launched]:
        """The launches of scored rows, or of the others."""
        return [x for x in self.launches if self.build.rows[x.row].takes_features == scored]

    def __call__(self, index: int, params: _C.AttentionParams, device: int, stream: int) -> None:
        row = self.build.rows[index]
        if row.family == "wide":
            assert max(params.head_dim, params.head_dim_v) <= row.head_dim
            steps = [stride * row.element_bytes for stride in params.bias_stride[:3]]
            assert not params.bias or all(n % 16 == 0 for n in (params.bias, *steps))
            if row.accumulates and params.partial_o:
                count = params.lse_rows * params.head_dim_v
                _at(params.partial_o, torch.float32, (count,), (1,)).fill_(torch.nan)
        elif row.takes_features:
            assert params.head_dim <= row.head_dim and params.head_dim_v <= row.head_dim_v
        else:
            nothing = _C.AttentionParams()
            assert params.head_dim == params.head_dim_v == row.head_dim
            assert all(getattr(params, name) == getattr(nothing, name) for name in NOT_OF_PLAIN_ROWS)
        self.launches.append(Launched(index, params.copy(), device, stream))
        if params.splits > 1:
            self.touch_parts(params)
        for b in range(params.batch if self.compute and params.num_heads else 0):
            self.sequence(params, getattr(torch, row.dtype), self.locate(params, b))

    def touch_parts(self, p: _C.AttentionParams) -> None:
        """Whoever allocated too little for the parts of split keys loses something else."""
        for address, width in ((p.partial_o, p.head_dim_v), (p.partial_lse, 1), (p.partial_low, 1)):
            count = p.splits * p.lse_rows * width
            _at(address, torch.float32, (count,), (1,)).fill_(torch.nan)

    def locate(self, p: _C.AttentionParams, b: int) -> Sequence:
        entry_q, first_q, rows_q = b, 0, p.seqlen_q
        entry_k, first_k, end_k = b, 0, p.seqlen_k
        if p.cu_seqlens_q:
            entry_q, (first_q, end) = 0, integers(p.cu_seqlens_q, 2, b)
            rows_q = end - first_q
        if p.cu_seqlens_k:
            entry_k, (first_k, end) = 0, integers(p.cu_seqlens_k, 2, b)
            end_k = end - first_k
        if p.batch_index_k:
            entry_k = integers(p.batch_index_k, 1, b)[0]
        queries = min(rows_q, integers(p.seqused_q, 1, b)[0]) if p.seqused_q else rows_q
        if p.seqused_k:
            end_k = min(end_k, integers(p.seqused_k, 1, b)[0])
        padding = integers(p.leftpad_k, 1, b)[0] if p.leftpad_k else 0
        return Sequence(
            b, entry_q, first_q, rows_q, queries, entry_k, first_k + padding, max(0, end_k - padding)
        )

    def rows(
        self, address: int, dtype: torch.dtype, strides: tuple[int, int, int], entry: int,
        shape: tuple[int, int, int], first: int,
    ) -> Tensor:  # fmt: skip
        """[rows, heads, dim] of a batch entry."""
        begin = address + (entry * strides[0] + first * strides[1]) * dtype.itemsize
        return _at(begin, dtype, shape, (strides[1], strides[2], 1))

    def key_rows(self, p: _C.AttentionParams, dtype: torch.dtype, s: Sequence, value: bool) -> Tensor:
        address, strides = (p.v, p.v_stride) if value else (p.k, p.k_stride)
        width = p.head_dim_v if value else p.head_dim
        if not p.page_table:
            shape = (s.keys, p.num_heads_kv, width)
            return self.rows(address, dtype, strides, s.entry_k, shape, s.first_k).double()
        found = []
        for row in range(s.first_k, s.first_k + s.keys):
            place = s.number * p.page_table_stride + row // p.page_size
            page = integers(p.page_table, 1, place)[0]
            shape = (1, p.num_heads_kv, width)
            found.append(self.rows(address, dtype, strides, page, shape, row % p.page_size))
        return torch.cat(found).double() if found else torch.empty(0, p.num_heads_kv, width).double()

    def sequence(self, p: _C.AttentionParams, dtype: torch.dtype, s: Sequence) -> None:
        heads, group = p.num_heads, p.num_heads // p.num_heads_kv
        q = self.rows(p.q, dtype, p.q_stride, s.entry_q, (s.queries, heads, p.head_dim), s.first_q).double()
        k, v = (self.key_rows(p, dtype, s, value).repeat_interleave(group, dim=1) for value in (False, True))
        scores = self.scores(p, dtype, s, torch.einsum("qhd,khd->hqk", q, k))
        sinks = _at(p.sinks, torch.float32, (heads,), (1,)) if p.sinks else torch.full((heads,), -torch.inf)
        column = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
        weights, lse = _softmax(torch.cat([scores, column], dim=-1))
        weights = weights[..., :-1]
        if p.dropout_threshold:
            seed = ctypes.c_uint64.from_address(p.dropout_seed).value
            keep = kept(seed, p.dropout_threshold, s.number, heads, s.queries, s.keys)
            weights = weights * torch.from_numpy(keep) * p.dropout_scale
        out = self.rows(p.o, dtype, p.o_stride, s.entry_q, (s.rows_q, heads, p.head_dim_v), s.first_q)
        out[s.queries :] = 0
        out[: s.queries] = torch.einsum("hqk,khd->qhd", weights, v).to(dtype)
        if p.lse:
            begin = p.lse + 4 * (s.number * p.lse_batch_stride + s.first_q)
            rows = _at(begin, torch.float32, (heads, s.rows_q), (p.lse_head_stride, 1))
            rows[:, s.queries :] = -torch.inf
            rows[:, : s.queries] = lse

    def scores(self, p: _C.AttentionParams, dtype: torch.dtype, s: Sequence, products: Tensor) -> Tensor:
        """[heads, queries, keys]: everything that becomes of q k, -inf where a key is hidden."""
        scores = products * p.scale
        if p.softcap:
            scores = p.softcap * (scores / p.softcap).tanh()
        i, j = torch.arange(s.queries)[:, None], torch.arange(s.keys)
        beside = i + (s.keys - s.queries if p.bottom_right else 0)
        if p.bias:
            kind = torch.float32 if p.bias_type == "float32" else dtype
            scores = scores + self.broadcast(p.bias, kind, p.bias_stride, s, p.num_heads).double()
        if p.alibi_slopes:
            begin = p.alibi_slopes + 4 * s.number * p.alibi_stride[0]
            slopes = _at(begin, torch.float32, (p.num_heads,), (p.alibi_stride[1],))
            scores = scores - slopes[:, None, None] * (beside - j).abs()
        seen = torch.ones(s.queries, s.keys, dtype=torch.bool)
        if p.window_left >= 0:
            seen &= j >= beside - p.window_left
        if p.window_right >= 0:
            seen &= j <= beside + p.window_right
        if p.prefix_lengths:
            seen |= j < integers(p.prefix_lengths, 1, s.number)[0]
        if p.mask:
            seen = seen & (self.broadcast(p.mask, torch.uint8, p.mask_stride, s, p.num_heads) != 0)
        if p.block_counts:
            seen = seen & self.blocks(p, s)
        return scores.masked_fill(~seen, -torch.inf)

    def broadcast(
        self, address: int, dtype: torch.dtype, strides: tuple[int, int, int, int], s: Sequence, heads: int
    ) -> Tensor:
        begin = address + s.number * strides[0] * dtype.itemsize
        return _at(begin, dtype, (heads, s.queries, s.keys), strides[1:])

    def blocks(self, p: _C.AttentionParams, s: Sequence) -> Tensor:
        seen = torch.zeros(p.num_heads, s.queries, s.keys, dtype=torch.bool)
        for head in range(p.num_heads):
            for block in range(-(-s.queries // p.block_m)):
                place = (s.number, head, block)
                count = integers(p.block_counts, 1, sum(map(int.__mul__, place, p.count_stride)))[0]
                begin = sum(map(int.__mul__, place, p.block_stride[:3]))
                for entry in range(count):
                    key = integers(p.block_indices, 1, begin + entry * p.block_stride[3])[0]
                    rows = slice(block * p.block_m, (block + 1) * p.block_m)
                    seen[head, rows, key * p.block_n : (key + 1) * p.block_n] = True
        return seen
