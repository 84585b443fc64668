"""A prediction of what a row costs on a device, made to tell which of two rows is the cheaper one.

The model: thread blocks run in waves over the SMs; a block costs a fixed start and end, and one tile product
pair per step of its main loop; a tile costs its floating-point operations at the share of the tensor pipe
that the row's schedule reaches. It knows nothing of caches and DRAM, which all rows of a problem have in
common.
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
class Parameters:
    """Everything the model was told, in one place: a calibration replaces this value and nothing else."""

    #: Microseconds between two launches on a stream that find nothing to do.
    launch_us: float = 2.0
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
            90: {(True, True): 0.70, (True, False): 0.60, (False, True): 0.55, (False, False): 0.51},
            120: {(True, True): 0.92, (True, False): 0.86, (False, True): 0.89, (False, False): 0.86},
        }
    )


PARAMETERS = Parameters()
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
    """Key tiles that a block visits: the mean over the query tiles, and the most."""
    key_tiles = -(-problem.seqlen_k // template.tile_n)
    query_tiles = -(-problem.seqlen_q // template.tile_m)
    diagonal = problem.diagonal
    if diagonal is None or query_tiles == 0:
        return float(key_tiles), key_tiles

    def steps(tile: int) -> int:
        visible_keys = (tile + 1) * template.tile_m + diagonal
        return max(0, min(key_tiles, -(-visible_keys // template.tile_n)))

    # Steps grow linearly between two clamps: a few dozen samples give the mean of any number of tiles.
    samples = range(0, query_tiles, max(1, query_tiles // 64))
    return sum(map(steps, samples)) / len(samples), steps(query_tiles - 1)


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

    schedule = (template.tile_m // template.warps >= 32, template.ping_pong)
    share = min(1 / resident, template.warps / parameters.saturating_warps)
    rate = parameters.sm_tflops[template.arch] * parameters.efficiency[template.arch][schedule] * share
    tile_us = 4e-6 * template.tile_m * template.tile_n * template.head_dim / rate
    if template.copy == "element":
        tile_us *= parameters.element_factor

    mean_steps, most_steps = main_loop_steps(template, problem)
    waves = blocks / (device.sm_count * resident)
    if mean_steps == most_steps:
        waves = math.ceil(waves)  # equal blocks end together: a partial wave costs a whole one
    body_us = max(
        waves * (parameters.block_us + mean_steps * tile_us), parameters.block_us + most_steps * tile_us
    )
    return parameters.launch_us + body_us
