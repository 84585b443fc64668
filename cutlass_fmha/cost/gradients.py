"""What gradients in a fixed order cost: by dQ's sums in turn, or by dS in memory and a product of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass_fmha.cost.datasheet import PARAMETERS, figure
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row

PRODUCTS = 5


@dataclass(frozen=True)
class GradientParameters:
    """Shares of the tensor rate and of memory's, of an H200: the ordered sums' were measured."""

    #: Of a row whose blocks add to dQ as they come.
    efficiency: float = 0.6
    #: Times as long: of rows that know scores, and where tiles of a head's keys await each other; of the
    #: latter, head dims up to 64.
    scored: float = 2.0
    waiting: float = 2.56
    waiting_narrow: float = 4.0
    #: Of the time in which dS is written and read, what neither product hides.
    exposed: float = 0.6


PARAMETERS_OF_GRADIENTS = GradientParameters()


def visible_scores(problem: Problem) -> float:
    """Scores of all heads that some mask by a range leaves, about."""
    queries, keys = problem.mean if any(problem.mean) else (problem.seqlen_q, problem.seqlen_k)
    left, right = problem.window
    if problem.causal != "none":
        right = 0 if right < 0 else min(right, 0)
    seen = float(keys)
    if left >= 0 and right >= 0:
        seen = min(seen, left + right + 1.0)
    elif right >= 0 and "prefix" not in problem.features:
        seen = max(keys - queries / 2.0, keys * keys / (2.0 * max(1, queries)))
    return problem.batch * problem.num_heads * float(queries) * min(seen, float(keys))


def sums_us(row: Row, problem: Problem, device: Device) -> float:
    """Microseconds where blocks add to dQ in turn."""
    given = PARAMETERS_OF_GRADIENTS
    slower = given.waiting if row.head_dim > 64 else given.waiting_narrow
    return _products_us(row, problem, device) * (slower if problem.seqlen_k > row.tile_n else given.scored)


def product_us(row: Row, problem: Problem, device: Device, turns: int) -> float:
    """Microseconds where dS is written, ``turns`` times some heads of it."""
    blocks = math.ceil(problem.seqlen_k / row.tile_n) * problem.batch * problem.num_heads_kv
    blocks = max(1, math.ceil(blocks / turns))
    # The blocks of a launch end together or leave SMs idle, each time.
    idle = math.ceil(blocks / device.sm_count) * device.sm_count / blocks if turns > 1 else 1.0
    traffic = 2 * 2 * visible_scores(problem) / (figure(PARAMETERS.dram_tbytes, row, device) * 1e6)
    launches = 2 * turns * PARAMETERS.launch_us
    return _products_us(row, problem, device) * idle + PARAMETERS_OF_GRADIENTS.exposed * traffic + launches


def _products_us(row: Row, problem: Problem, device: Device) -> float:
    flop = 2.0 * PRODUCTS * visible_scores(problem) * row.head_dim
    rate = device.sm_count * figure(PARAMETERS.sm_tflops, row, device) * PARAMETERS_OF_GRADIENTS.efficiency
    return flop / (rate * 1e6)
