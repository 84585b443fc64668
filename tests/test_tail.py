"""The last tiles of a launch, whose keys several blocks divide: how, when, and what a call makes of it."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
import torch
from fake_build import Row
from fake_kernels import FakeKernels
from hypothesis import given
from hypothesis import strategies as st

from cutlass_fmha import cost
from cutlass_fmha.cost import datasheet
from cutlass_fmha.dispatch import blocks, device
from cutlass_fmha.dispatch.blocks import Tail
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.launch import plan

RTX5090 = PRESETS["rtx5090"]
LARGE = Row(0, 120, "bfloat16", 128, 256, 64, 8, "tma", 98 * 1024, stages=1, q_in_registers=False, ping_pong=True)
SMALL = replace(LARGE, index=1, tile_m=64, tile_n=32, warps=4, smem_bytes=48 * 1024, min_blocks=2, ping_pong=False)
PROBLEM = Problem(2, 8192, 8192, 16, 16, 128, "bfloat16")  # 1024 tiles: six waves on 170 SMs, and 4 tiles


def played(tail: Tail | None, tiles: int, steps: int, places: int) -> int:
    """When a launch ends, block by block, in steps of the main loop."""
    last = tail.tiles if tail else 0
    lengths = [steps] * (tiles - last)
    if tail:
        others = steps - tail.first - (tail.parts - 2) * tail.rest
        lengths += [tail.first] * last + ([tail.rest] * (tail.parts - 2) + [others]) * last
    free = [0] * places
    ends = [heapq.heapreplace(free, free[0] + length + blocks.BLOCK_STEPS) for length in lengths]
    assert len(ends) == len(lengths)
    return max(free) + (blocks.COMBINE_STEPS if tail else 0)


@given(tiles=st.integers(1, 2000), steps=st.integers(1, 300), places=st.integers(1, 200))
def test_a_division_is_one_and_pays(tiles: int, steps: int, places: int):
    tail = blocks._tail(tiles, steps, places, 10**9)
    if tail is None:
        return
    assert tail.tiles == tiles % places
    assert tail.first > 0 and 0 < steps - tail.first - (tail.parts - 2) * tail.rest <= tail.rest
    whole = played(None, tiles, steps, places)
    assert played(tail, tiles, steps, places) <= blocks.WORTH_A_TAIL * whole


def test_parts_take_no_more_memory_than_they_may():
    for most in (4, 8, 40, 1000):
        tail = blocks._tail(1024, 128, 170, most)
        assert tail is None or tail.tiles * tail.parts <= most


@pytest.mark.parametrize(
    ("row", "problem", "gpu"),
    [
        (replace(LARGE, copy="cp_async_16"), PROBLEM, RTX5090),
        (SMALL, PROBLEM, RTX5090),  # two blocks an SM
        (LARGE, replace(PROBLEM, causal="bottom-right"), RTX5090),
        (LARGE, replace(PROBLEM, batch=0), RTX5090),
        (LARGE, replace(PROBLEM, seqlen_k=0), RTX5090),
        (LARGE, replace(PROBLEM, seqlen_k=64), RTX5090),
        (LARGE, replace(PROBLEM, batch=170), RTX5090),  # no wave is cut short
    ],
)
def test_where_nothing_is_divided(row: Row, problem: Problem, gpu: device.Device):
    assert blocks.tail_of(row, problem, gpu) is None  # type: ignore[arg-type]


def test_the_cost_model_sees_its_blocks_and_its_second_launch():
    tail = blocks.tail_of(LARGE, PROBLEM, RTX5090)  # type: ignore[arg-type]
    assert tail == Tail(4, 16, 8, 8)
    found = blocks.groups(LARGE, PROBLEM, RTX5090)  # type: ignore[arg-type]
    assert [(group.blocks, group.steps) for group in found] == [(1020, 128), (4, 8), (60, 8)]
    price = datasheet.row_cost(LARGE, RTX5090)  # type: ignore[arg-type]
    counts = cost.count(LARGE, PROBLEM, RTX5090, price)  # type: ignore[arg-type]
    assert counts is not None and counts.launches == 2 and counts.steps == 6 * 128 + 8
    undivided = cost.count(replace(LARGE, copy="cp_async_16"), PROBLEM, RTX5090, price)  # type: ignore[arg-type]
    assert undivided is not None and price.of(counts) < 0.9 * price.of(undivided)


def test_a_call_brings_the_memory_of_its_parts(monkeypatch: pytest.MonkeyPatch):
    row = replace(LARGE, arch=89, dtype="float16", tile_m=64, tile_n=16)
    kernels = FakeKernels(Table((row,)))  # type: ignore[arg-type]
    kernels.install(monkeypatch)
    monkeypatch.setattr(plan, "current_stream", lambda index: 0)
    monkeypatch.setattr(plan.private_torch, "current_device", lambda: -2)  # a CUDA build asks the driver
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    plan.clear()
    for heads, seqlen_q in ((59, 64), (58, 64)):
        q = torch.randn(1, seqlen_q, heads, 128, dtype=torch.float16)
        k = torch.randn(1, 2048, heads, 128, dtype=torch.float16)
        plan.launch(q, k, k, None, "none", False, None)
    plan.clear()
    divided, whole = (launch.params for launch in kernels.launches)
    tail = Tail(divided.tail_tiles, divided.tail_parts, divided.tail_first, divided.tail_rest)
    assert divided.tail and tail == blocks._tail(59, 128, 58, 10**9) and whole.tail == 0
