"""A prediction of what a row costs on a device, made to tell which of two rows is the cheaper one.

The model: thread blocks run in waves over the SMs; a block costs a fixed start and end, and one tile product
pair per step of its main loop; a tile costs its floating-point operations at the share of the tensor pipe
that the row's schedule reaches. It knows nothing of caches and DRAM, which all rows of a problem have in
common.

A split row (kv_warps > 1), made for problems that leave most of a GPU idle, spends its time waiting instead:
a step costs what its loads and exponentials take on an SM, and a block also merges what its warps have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cutlass_fmha.device import KIB, Device

if TYPE_CHECKING:
    from cutlass_fmha._C import Template
    from cutlass_fmha.select import Problem

#: A schedule: does a warp own 32 query rows or fewer, and do pairs of warps take turns (ping-pong)?
Schedule = tuple[bool, bool]


@dataclass(frozen=True)
class SplitParameters:
    """Microseconds of a split row, fitted to B1 H8 S256 to S1024 at head dims 32, 64 and 128 on an H200."""

    #: A block outside its main loop, without the merge.
    block: float = 1.3
    #: The merge, per 1024 values of the partial outputs of all warps.
    merge: float = 0.0625
    #: The shortest step: mma after loads after mma.
    step: float = 0.35
    #: A step, per KiB of K and V that the warps of an SM load.
    load: float = 0.0075
    #: A step, per 1024 exponentials of an SM.
    exponentials: float = 0.045
    #: A step of a row that doesn't load a step ahead (stages == 1).
    unhidden_latency: float = 0.6
    #: Where the tensor pipe is the limit: the share of what the other rows of its schedule get from it.
    tensor_share: float = 0.6


@dataclass(frozen=True)
class Parameters:
    """Everything the model was told, in one place: a calibration replaces this value and nothing else."""

    #: Microseconds between two launches in a CUDA graph that find nothing to do.
    launch_us: float = 1.0
    #: Microseconds of a block outside its main loop: the first loads before it, the epilogue after it.
    block_us: float = 1.5
    #: Warps on an SM that keep its tensor pipe as busy as the schedule can; fewer reach their proportion.
    saturating_warps: int = 8
    #: Elements that travel one by one instead of 16 bytes at a time multiply the main loop by this.
    element_factor: float = 6.0
    #: Dense TFLOP/s of one SM by mma.sync with fp32 accumulation: the datasheets of L4 and RTX 5090, measured
    #: on an H200.
    sm_tflops: Mapping[int, float] = field(
        default_factory=lambda: {89: 121 / 58, 90: 642 / 132, 120: 209.5 / 170}
    )
    #: Share of that rate by architecture and schedule: measured on an H200, on sm_89 and sm_120 with its
    #: tensor pipe slowed to their balance.
    efficiency: Mapping[int, Mapping[Schedule, float]] = field(
        default_factory=lambda: {
            89: {(True, True): 0.87, (True, False): 0.78, (False, True): 0.83, (False, False): 0.78},
            90: {(True, True): 0.70, (True, False): 0.60, (False, True): 0.45, (False, False): 0.51},
            120: {(True, True): 0.92, (True, False): 0.86, (False, True): 0.89, (False, False): 0.86},
        }
    )
    split: SplitParameters = field(default_factory=SplitParameters)


PARAMETERS = Parameters()
BYTES_PER_ELEMENT = 2
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 256  # 255, and they are given out in steps of 8


def resident_blocks(template: Template, device: Device) -> int:
    """Thread blocks of a row that one SM holds at a time; 0 when its shared memory is too small for one."""
    threads = 32 * template.warps
    by_smem = device.smem_per_sm // (template.smem_bytes + KIB)
    by_warps = device.warps_per_sm // template.warps
    # The compiler may use every register that the launch bounds leave, and the large tiles do.
    by_registers = max(template.min_blocks, REGISTERS_PER_SM // (threads * MAX_REGISTERS_PER_THREAD))
    return min(by_smem, by_warps, by_registers)


def main_loop_steps(template: Template, problem: Problem) -> tuple[float, int]:
    """Steps of key tiles that a block takes: the mean over the query tiles, and the most."""
    step_keys = template.tile_n * template.kv_warps
    key_tiles = -(-problem.seqlen_k // step_keys)
    query_tiles = -(-problem.seqlen_q // template.tile_m)
    diagonal = problem.diagonal
    if diagonal is None or query_tiles == 0:
        return float(key_tiles), key_tiles

    def steps(tile: int) -> int:
        visible_keys = (tile + 1) * template.tile_m + diagonal
        return max(0, min(key_tiles, -(-visible_keys // step_keys)))

    # Steps grow linearly between two clamps: a few dozen samples give the mean of any number of tiles.
    samples = range(0, query_tiles, max(1, query_tiles // 64))
    return sum(map(steps, samples)) / len(samples), steps(query_tiles - 1)


def tensor_us(template: Template, resident: int, parameters: Parameters) -> float:
    """Microseconds of a block's step by the tensor pipe, while ``resident`` blocks share the SM."""
    schedule = (template.tile_m * template.kv_warps // template.warps >= 32, template.ping_pong)
    if template.kv_warps > 1:  # split_step_us has what few warps cost
        share = parameters.split.tensor_share / resident
    else:
        share = min(1 / resident, template.warps / parameters.saturating_warps)
    rate = parameters.sm_tflops[template.arch] * parameters.efficiency[template.arch][schedule] * share
    us = 4e-6 * template.tile_m * template.tile_n * template.kv_warps * template.head_dim / rate
    return us * parameters.element_factor if template.copy == "element" else us


def split_step_us(template: Template, problem: Problem, resident: int, parameters: Parameters) -> float:
    """Microseconds of a split row's step, while ``resident`` blocks share the SM."""
    split = parameters.split
    # With fewer key tiles than warps, some warps have nothing to do.
    busy = min(1.0, -(-problem.seqlen_k // template.tile_n) / template.kv_warps)
    warps = resident * template.warps * busy
    rows = template.tile_m * template.kv_warps // template.warps
    waiting_us = split.step
    waiting_us += split.load * warps * 2 * template.tile_n * template.head_dim * BYTES_PER_ELEMENT / KIB
    waiting_us += split.exponentials * warps * rows * template.tile_n / 1024
    if template.stages == 1:
        waiting_us += split.unhidden_latency
    return max(waiting_us, busy * tensor_us(template, resident, parameters))


def predict(
    template: Template, problem: Problem, device: Device, parameters: Parameters = PARAMETERS
) -> float:
    """Predicted microseconds of one launch; infinite when not even one block fits on an SM."""
    resident = resident_blocks(template, device)
    if resident == 0:
        return math.inf
    blocks = -(-problem.seqlen_q // template.tile_m) * problem.num_heads * problem.batch
    if blocks == 0:
        return 0.0
    resident = min(resident, -(-blocks // device.sm_count))

    block_us, step_us = parameters.block_us, tensor_us(template, resident, parameters)
    longest_step_us = step_us
    if template.kv_warps > 1:
        merged = template.tile_m * template.head_dim * template.kv_warps
        block_us = parameters.split.block + parameters.split.merge * merged / 1024
        step_us = split_step_us(template, problem, resident, parameters)
        # The longest block outlives those that it shares the SM with: half of its steps are taken alone.
        longest_step_us = (step_us + split_step_us(template, problem, 1, parameters)) / 2

    mean_steps, most_steps = main_loop_steps(template, problem)
    waves = blocks / (device.sm_count * resident)
    if mean_steps == most_steps:
        waves = math.ceil(waves)  # equal blocks end together: a partial wave costs a whole one
    body_us = max(waves * (block_us + mean_steps * step_us), block_us + most_steps * longest_step_us)
    return parameters.launch_us + body_us
