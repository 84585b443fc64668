"""A GPU made of a clock: ``_C.run`` takes the time that a function of row and problem says, the host none. Streams,
events and graphs behave as far as timing code needs them: a captured call takes its time when it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cutlass_fmha import _C
from cutlass_fmha.calibrate import timing
from cutlass_fmha.dispatch import blocks
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Table

L2_BYTES = 1 << 20


class FakeGpu:
    """Stands in for torch.cuda and ``_C.run``; ``launches``: (row name, problem, pointers) of each call.

    law: microseconds of a row on a problem.
    """

    def __init__(self, build: Table, device: Device, law: Callable[[object, Problem], float]) -> None:
        self.build, self.device, self.law, self.now_us = build, device, law, 0.0
        self.captured: list[float] | None = None
        self.launches: list[tuple[str, Problem, tuple[int, ...]]] = []

    def run(self, index, params, device, stream) -> None:
        row = self.build.rows[index]
        sizes = (params.batch, params.seqlen_q, params.seqlen_k, params.num_heads, params.num_heads_kv)
        mask = ("bottom-right" if params.bottom_right else "top-left") if params.window_right == 0 else "none"
        dims = {"head_dim": params.head_dim, "head_dim_v": params.head_dim_v}
        problem = Problem(*sizes, **dims, dtype=row.dtype, causal=mask)
        if row.takes_features:
            assert params.pack == blocks.packed_heads(row, problem)
            assert params.splits == blocks.split_keys(row, problem, self.device)
        else:
            assert params.pack == params.splits == 1
        assert (params.splits > 1) == (params.partial_o > 0) == (params.partial_lse > params.partial_o)
        assert params.vectors(2) and params.window_left == -1
        assert stream == 7 and device == 0 and params.scale == pytest.approx(params.head_dim**-0.5)
        self.launches.append((row.name, problem, (params.q, params.k, params.v, params.o, params.lse)))
        if self.captured is None:
            self.now_us += self.law(row, problem)
        else:
            self.captured.append(self.law(row, problem))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.us = gpu.now_us

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Event) -> float:
                return (other.us - self.us) / 1e3

        class Graph:
            def capture_begin(self, capture_error_mode: str) -> None:
                assert gpu.captured is None and capture_error_mode == "thread_local"
                gpu.captured = []

            def capture_end(self) -> None:
                self.us, gpu.captured = sum(gpu.captured), None

            def replay(self) -> None:
                gpu.now_us += self.us

        properties = SimpleNamespace(L2_cache_size=L2_BYTES, total_memory=24 << 30)
        stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
        monkeypatch.setattr(_C, "run", self.run)
        monkeypatch.setattr(_C, "rows", lambda: list(self.build.rows))
        monkeypatch.setattr(tables, "this_build", lambda: self.build)
        monkeypatch.setattr(devices, "of_index", lambda index: self.device)
        monkeypatch.setattr(timing, "_device", lambda index: torch.device("cpu"))
        of_torch = {"Event": Event, "CUDAGraph": Graph, "device": nullcontext, "stream": nullcontext}
        of_torch |= {"Stream": lambda device: stream, "synchronize": lambda *arguments: None}
        for name, fake in {**of_torch, "get_device_properties": lambda index: properties}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        return self
