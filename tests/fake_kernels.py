"""A ``_C.run`` that computes in Python, from nothing but what ``src/features/params.h`` says: it reads plain memory as
tensors and has the oracle compute on them, so that what Python packs is tested against what the tensors hold."""

import ctypes
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import oracle_features
import pytest
import torch
from fake_build import L4
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.ops import dispatcher


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory that somebody else owns."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def vector(address: int, count: int) -> Tensor | None:
    return _at(address, torch.int32, (count,), (1,)) if address else None


def poison(address: int, count: int) -> None:
    _at(address, torch.float32, (count,), (1,)).fill_(torch.nan)


def skip_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to their launches, as those of a GPU's tensors do where nothing listens."""
    for name in ("can_skip_dispatcher", "others_can_skip_dispatcher"):
        monkeypatch.setattr(dispatcher, name, lambda *given: True)


Launched = namedtuple("Launched", "row params device stream")


#: What a plain row takes as it is where nothing is asked.
OF_FEATURES = "cu_|seqused|leftpad|batch_index|page|prefix|window_left|mask|block_|softcap|bias"
OF_FEATURES += "|alibi|sinks|dropout|pack|splits|partial"
NOT_OF_PLAIN_ROWS = [name for name in vars(_C.AttentionParams) if re.match(OF_FEATURES, name)]


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
        """They are those of this build, and every GPU is an L4."""
        install(monkeypatch, self)
        monkeypatch.setattr(tables, "this_build", lambda: self.build)
        monkeypatch.setattr(devices, "of_index", lambda index: L4)
        monkeypatch.delenv(devices.FORCE_ARCH, raising=False)

    @property
    def last(self) -> _C.AttentionParams:
        return self.launches[-1].params

    def of(self, scored: bool) -> list[Launched]:
        """The launches of scored rows, or of the others."""
        return [x for x in self.launches if self.build.rows[x.row].takes_features == scored]

    def __call__(self, index: int, params: _C.AttentionParams, device: int, stream: int) -> None:
        row = self.build.rows[index]
        if params.batch and params.num_heads and params.seqlen_q:
            assert params.q and params.o and (params.seqlen_k == 0 or (params.k and params.v))
        if row.family == "wide":
            assert max(params.head_dim, params.head_dim_v) <= row.head_dim
            for name in ("q", "k", "v", "o", *(["bias"] if params.bias else [])):
                steps = [step * row.element_bytes for step in getattr(params, f"{name}_stride")[:3]]
                least = 16 if name == "bias" else row.alignment
                assert all(n % least == 0 for n in (getattr(params, name), *steps)), name
            assert params.partial_o or not row.accumulates or row.dtype == "float32"
            if row.accumulates and params.partial_o:
                poison(params.partial_o, params.lse_rows * params.head_dim_v)
        elif row.takes_features:
            assert params.head_dim <= row.head_dim and params.head_dim_v <= row.head_dim_v
        else:
            nothing = _C.AttentionParams()
            assert params.head_dim == params.head_dim_v == row.head_dim
            assert all(getattr(params, name) == getattr(nothing, name) for name in NOT_OF_PLAIN_ROWS)
        self.launches.append(Launched(index, params.copy(), device, stream))
        if params.splits > 1:  # whoever allocated too little for the parts loses something else
            rows = params.splits * params.lse_rows
            poison(params.partial_o, rows * params.head_dim_v)
            poison(params.partial_lse, rows)
            poison(params.partial_low, rows)
        if self.compute and params.batch and params.num_heads:
            self.attend(params, getattr(torch, row.dtype))

    def attend(self, p: _C.AttentionParams, dtype: torch.dtype) -> None:
        starts_q, starts_k = (vector(x, p.batch + 1) for x in (p.cu_seqlens_q, p.cu_seqlens_k))
        said, entries, rows = self.features(p, dtype), p.batch, p.seqlen_k
        if (named := said.get("page_table", said.get("cache_batch_idx"))) is not None:
            entries = int(named.max()) + 1 if named.numel() else 0
            rows = p.page_size if p.page_table else rows

        def operand(name: str, starts: Tensor | None, shape: tuple[int, ...]) -> Tensor:
            strides = (*getattr(p, f"{name}_stride"), 1)
            if starts is not None:
                shape, strides = (int(starts[-1]), *shape[2:]), strides[1:]
            return _at(getattr(p, name), dtype, shape, strides)

        q = operand("q", starts_q, (p.batch, p.seqlen_q, p.num_heads, p.head_dim))
        k = operand("k", starts_k, (entries, rows, p.num_heads_kv, p.head_dim))
        v = operand("v", starts_k, (entries, rows, p.num_heads_kv, p.head_dim_v))
        said |= {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        out, lse = oracle_features.attention(q, k, v, p.scale, "none" if p.bottom_right else "top-left", **said)
        to = operand("o", starts_q, (p.batch, p.seqlen_q, p.num_heads, p.head_dim_v))
        shape, strides = (p.batch, p.num_heads, p.seqlen_q), (p.lse_batch_stride, p.lse_head_stride, 1)
        if starts_q is not None:
            shape, strides = (p.num_heads, len(q)), strides[1:]
        lse_to = _at(p.lse, torch.float32, shape, strides) if p.lse else torch.empty(shape)
        for b in range(p.batch):  # rows around the sequences are nobody's
            own = b if starts_q is None else slice(int(starts_q[b]), int(starts_q[b + 1]))
            place = b if starts_q is None else (slice(None), own)
            to[own], lse_to[place] = out[own].to(dtype), lse[place].float()

    def features(self, p: _C.AttentionParams, dtype: torch.dtype) -> dict[str, Any]:
        """What ``p`` says, as the oracle takes it."""
        whole, pages = (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k), -(-p.seqlen_k // max(1, p.page_size))
        names = ("seqused_q", "seqused_k", "leftpad_k", "prefix_lengths")
        places = {
            **{name: (getattr(p, name), torch.int32, (p.batch,), (1,)) for name in names},
            "cache_batch_idx": (p.batch_index_k, torch.int32, (p.batch,), (1,)),
            "page_table": (p.page_table, torch.int32, (p.batch, pages), (p.page_table_stride, 1)),
            "mask": (p.mask, torch.bool, whole, p.mask_stride),
            "bias": (p.bias, torch.float32 if p.bias_type == "float32" else dtype, whole, p.bias_stride),
            "alibi_slopes": (p.alibi_slopes, torch.float32, whole[:2], p.alibi_stride),
            "sinks": (p.sinks, torch.float32, whole[1:2], (1,)),
        }
        said: dict[str, Any] = {name: _at(*place) for name, place in places.items() if place[0]}
        said |= {"window": (p.window_left, p.window_right), "softcap": p.softcap}
        if p.block_counts:
            lists = (*whole[:2], -(-p.seqlen_q // p.block_m))
            counts = _at(p.block_counts, torch.int32, lists, p.count_stride)
            longest = int(counts.max()) if counts.numel() else 0
            indices = _at(p.block_indices, torch.int32, (*lists, longest), p.block_stride)
            said["block_mask"] = (counts, indices, (p.block_m, p.block_n))
        if p.dropout_threshold:
            said["dropout_p"] = p.dropout_threshold / 65536
            said["dropout_seed"] = ctypes.c_int64.from_address(p.dropout_seed).value
            assert p.dropout_scale == pytest.approx(1 / (1 - said["dropout_p"]))
        return said
