"""Costs of rows on a GPU that was never measured: its datasheet's tensor rate, and how much of it rows reach.

A tile costs its floating-point operations at the share of the tensor pipe that the row's schedule reaches. A
few-query row (kv_warps > 1), for problems that leave most of a GPU idle, spends its time waiting instead:
a step costs what its loads and exponentials take on an SM, and a block also merges what its warps have. Where
its launches overlap, the next one starts and prefetches while the present one ends. A scored row waits, too:
its warps meet at every step, and where it is chosen it is bound by how fast K and V arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from cutlass_fmha.cost.model import BYTES_PER_ELEMENT, RowCost
from cutlass_fmha.dispatch.blocks import resident_blocks
from cutlass_fmha.dispatch.device import KIB, Device

if TYPE_CHECKING:
    from cutlass_fmha.dispatch.table import Row

Figure = TypeVar("Figure")

#: A schedule: does a warp own 32 query rows or fewer, and do pairs of warps take turns (ping-pong)?
Schedule = tuple[bool, bool]


@dataclass(frozen=True)
class FewQueryParameters:
    """Microseconds of a few-query row on an H200, fitted to the rows of head dims 32, 64 and 128."""

    #: A block outside its main loop: what it waits for, and the work of merging 1024 of all warps' values.
    block: float = 1.2
    merge: float = 0.12
    #: A step: mma after loads after mma.
    step: float = 0.7
    #: The work of a step, per KiB of K and V that a block's warps load and per 1024 of its exponentials.
    load: float = 0.0125
    exponentials: float = 0.025
    #: What is left of the first of these where the copy unit loads, and how much longer a block waits.
    by_tma: float = 0.6
    start_by_tma: float = 0.85
    #: A step of a row that doesn't load a step ahead (stages == 1).
    unhidden_latency: float = 0.8
    #: Where the tensor pipe is the limit: the share of what the other rows of its schedule get from it, and of blocks
    #: of which an SM holds two and more (75 % of mma's rate on an emulated RTX 5090).
    tensor_share: float = 0.6
    tensor_share_of_two: float = 0.8
    #: Megabytes that an SM streams in a microsecond at most: warps wait for what they asked for.
    streaming: float = 0.0215
    #: What overlapping launches leave of a launch and of the first loads from DRAM.
    overlapped: float = 0.15


@dataclass(frozen=True)
class ScoredParameters:
    """Microseconds of a scored row on an H200: estimates, until one has been timed."""

    #: A launch; with split keys there are two.
    launch: float = 1.0
    #: A block outside its main loop, and the work in it per 1024 values of O.
    block: float = 3.0
    output: float = 0.1
    #: A step: K and V arrive, everybody waits for everybody; what a loaded KiB adds to both.
    step: float = 0.5
    load: float = 0.008
    #: The tensor pipe's time is multiplied by this: rows are asked what they want at every step.
    tensor_factor: float = 1.5


@dataclass(frozen=True)
class Parameters:
    """Everything that costs are derived from, in one place."""

    #: Microseconds of a launch in a CUDA graph, and of the first loads when they come from DRAM.
    launch_us: float = 0.6
    cold_us: float = 0.7
    #: A block outside its main loop, per warp and at least: the first loads before it, the epilogue after it.
    block_us: float = 1.0
    block_us_per_warp: float = 0.45
    work_us_per_warp: float = 0.15
    #: Warps on an SM that keep its tensor pipe as busy as the schedule can; fewer reach their proportion.
    saturating_warps: int = 8
    #: Elements that travel one by one instead of 16 bytes at a time multiply the main loop by this.
    element_factor: float = 3.0
    #: Where no thread copies, fewer instructions stand between the mma of a main loop.
    tma_factor: float = 0.95
    #: Dense TFLOP/s of one SM by mma.sync with fp32 accumulation: the datasheets of A100, A40 (RTX 3090:
    #: half of it), AGX Orin, L4 and RTX 5090, measured on an H200.
    sm_tflops: Mapping[int, float] = field(
        default_factory=lambda: {
            80: 312 / 108,
            86: 149.7 / 84,
            87: 42.5 / 16,
            89: 121 / 58,
            90: 642 / 132,
            120: 209.5 / 170,
        }
    )
    #: TB/s of DRAM: A100 80GB, RTX 3090, AGX Orin, RTX 4090, H200, RTX 5090.
    dram_tbytes: Mapping[int, float] = field(
        default_factory=lambda: {80: 2.0, 86: 0.94, 87: 0.2, 89: 1.0, 90: 4.3, 120: 1.8}
    )
    #: Of the time that moving inputs and outputs takes, what the main loop doesn't hide.
    exposed_traffic: float = 0.6
    #: Share of the tensor rate by architecture and schedule, the softmax left out: measured on an H200, on
    #: sm_89 and sm_120 with its tensor pipe slowed to their balance.
    efficiency: Mapping[int, Mapping[Schedule, float]] = field(
        default_factory=lambda: {
            89: {(True, True): 0.94, (True, False): 0.83, (False, True): 0.89, (False, False): 0.83},
            90: {(True, True): 0.90, (True, False): 0.80, (False, True): 0.57, (False, False): 0.66},
            120: {(True, True): 0.96, (True, False): 0.90, (False, True): 0.93, (False, False): 0.90},
        }
    )
    #: Microseconds of the softmax that the tensor pipe doesn't hide, per score.
    softmax_us: float = 25e-6
    few_query: FewQueryParameters = field(default_factory=FewQueryParameters)
    scored: ScoredParameters = field(default_factory=ScoredParameters)


PARAMETERS = Parameters()


def figure(figures: Mapping[int, Figure], row: Row, device: Device) -> Figure:
    """That of the GPU, which may run rows that are made for another one, or else of the row's architecture."""
    major, minor = device.capability
    return figures.get(10 * major + minor, figures[row.arch])


def row_cost(row: Row, device: Device, parameters: Parameters = PARAMETERS) -> RowCost:
    """What a row should cost on a device."""
    resident = max(1, resident_blocks(row, device))
    if row.scored:
        block, step, warp_block, warp_step = _scored_row(row, resident, device, parameters)
    elif row.kv_warps > 1:
        block, step, warp_block, warp_step = _few_query_row(row, resident, device, parameters)
    else:
        block = parameters.block_us + parameters.block_us_per_warp * row.warps
        warp_block = parameters.work_us_per_warp * row.warps
        step, warp_step = _step(row, resident, device, parameters)
    start = parameters.few_query.overlapped if row.dependent_launch else 1.0
    memory = dram = 1 / figure(parameters.dram_tbytes, row, device)
    if row.kv_warps > 1 and not row.scored:
        memory = max(dram, 1 / (device.sm_count * parameters.few_query.streaming))
    return RowCost(
        launch=parameters.scored.launch if row.scored else start * parameters.launch_us,
        cold=start * parameters.cold_us,
        traffic=parameters.exposed_traffic * dram,
        again=0.0,
        block=block,
        step=step,
        warp_block=warp_block,
        warp_step=warp_step,
        resident=resident,
        memory=memory,
    )


def _step(row: Row, resident: int, device: Device, parameters: Parameters) -> tuple[float, float]:
    """step and warp_step: together they make the time that a full SM takes for a step of a block."""
    full_us = tensor_us(row, device, parameters)
    if row.copy == "element":
        full_us *= parameters.element_factor
    elif row.copy == "tma":
        full_us *= parameters.tma_factor
    # With as many warps as saturate an SM, half of the square is waiting; more blocks beside it wait less.
    step = full_us / math.sqrt(2) * parameters.saturating_warps / row.warps
    return step, math.sqrt(max(full_us**2 - (step / resident) ** 2, full_us**2 / 2))


def tensor_us(row: Row, device: Device, parameters: Parameters) -> float:
    """Microseconds that an SM with enough warps needs for a step of a block."""
    schedule = (row.tile_m * row.kv_warps // row.warps >= 32, row.ping_pong)
    rate = figure(parameters.sm_tflops, row, device) * figure(parameters.efficiency, row, device)[schedule]
    scores = row.tile_m * row.tile_n * row.kv_warps
    flop = 2e-6 * (row.head_dim + row.head_dim_v)
    return scores * (flop / rate + parameters.softmax_us)


def _few_query_row(
    row: Row, resident: int, device: Device, parameters: Parameters
) -> tuple[float, float, float, float]:
    """block, step, warp_block and warp_step."""
    few_query = parameters.few_query
    share = few_query.tensor_share if resident < 2 else few_query.tensor_share_of_two
    rows = row.tile_m * row.kv_warps // row.warps
    merged = row.tile_m * row.head_dim * row.kv_warps
    load_kib = 2 * row.tile_n * row.head_dim * BYTES_PER_ELEMENT / KIB
    if row.copy == "tma":  # by none of the warps, and in whole lines
        load_kib *= few_query.by_tma
    warp_us = few_query.load * load_kib + few_query.exponentials * rows * row.tile_n / 1024
    hidden = row.stages > 1 or row.copy == "tma"
    step = few_query.step + (0.0 if hidden else few_query.unhidden_latency)
    work = max(row.warps * warp_us, tensor_us(row, device, parameters) / share)
    block = few_query.block + (few_query.start_by_tma if row.copy == "tma" else 0.0)
    return block, step, few_query.merge * merged / 1024, work


def _scored_row(row: Row, resident: int, device: Device, parameters: Parameters) -> tuple[float, float, float, float]:
    """block, step, warp_block and warp_step."""
    scored = parameters.scored
    keys = row.tile_n * row.kv_warps
    load_kib = keys * (row.head_dim + row.head_dim_v) * BYTES_PER_ELEMENT / KIB
    tensor = scored.tensor_factor * tensor_us(row, device, parameters)
    work = max(tensor, scored.load * load_kib)
    output = scored.output * row.tile_m * row.head_dim_v * row.kv_warps / 1024
    # Alone on an SM, a block has its pipes to itself and hides little.
    step = scored.step + max(scored.load * load_kib, tensor / resident)
    return scored.block, step, output, work
