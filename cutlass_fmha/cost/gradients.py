"""What gradients cost: by rows that differ in their tiles of keys; and in a fixed order, by dQ's sums in turn, or by dS
in memory and a product of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutlass_fmha.cost.datasheet import PARAMETERS, figure
from cutlass_fmha.cost.model import RowCost
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row

if TYPE_CHECKING:
    from cutlass_fmha.cost.store import Calibration

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
    #: Of a block's steps, as many as its beginning and end take as long as; of a step's keys, as many as what it does
    #: once: D64 on emulated L4s and GeForces. Groups of warps await each other: D64 on an H200.
    begin: float = 1.5
    step: int = 8
    step_of_groups: int = 88


PARAMETERS_OF_GRADIENTS = GradientParameters()


def _lengths(problem: Problem) -> tuple[int, int]:
    return problem.mean[0] or problem.seqlen_q, problem.mean[1] or problem.seqlen_k


def _window(problem: Problem) -> tuple[int, int]:
    left, right = problem.window
    if problem.causal != "none":
        right = 0 if right < 0 else min(right, 0)
    return left, right


def visible_scores(problem: Problem) -> float:
    """Scores of all heads that some mask by a range leaves, about."""
    queries, keys = _lengths(problem)
    left, right = _window(problem)
    seen = float(keys)
    if left >= 0 and right >= 0:
        seen = min(seen, left + right + 1.0)
    elif right >= 0 and "prefix" not in problem.features:
        if problem.causal == "top-left":
            seen = min(queries, keys) - min(queries, keys) ** 2 / (2.0 * max(1, queries))
        else:
            seen = max(keys - queries / 2.0, keys * keys / (2.0 * max(1, queries)))
    return problem.batch * problem.num_heads * float(queries) * min(seen, float(keys))


def sums_us(row: Row, problem: Problem, device: Device) -> float:
    """Microseconds where blocks add to dQ in turn."""
    given = PARAMETERS_OF_GRADIENTS
    slower = given.waiting if row.head_dim > 64 else given.waiting_narrow
    return _products_us(row, problem, device) * (slower if problem.seqlen_k > row.tile_n else given.scored)


# Whole numbers are divided as such: sizes may be symbols of torch.compile.


def _step(row: Row, keys: int) -> float:
    """Of a walk with so many keys, keys that a step takes as long as."""
    given = PARAMETERS_OF_GRADIENTS
    return keys + (given.step_of_groups if row.groups > 1 else given.step)


def _blocks(row: Row, problem: Problem, heads: int) -> int:
    return -(-problem.seqlen_k // row.tile_n) * heads


def default_cost(row: Row, device: Device) -> RowCost:
    """What the blocks and steps of a row take on a GPU that was never measured, one block on an SM."""
    given = PARAMETERS_OF_GRADIENTS
    scores = row.tile_m * _step(row, row.tile_n)
    step = _slower(row) * 2.0 * PRODUCTS * scores * row.head_dim / _sm_rate(row, device)
    return RowCost(PARAMETERS.launch_us, 0.0, 0.0, 0.0, given.begin * step, step, 0.0, 0.0)


def longest(row: Row, problem: Problem, device: Device, price: RowCost) -> tuple[float, float]:
    """Blocks and steps that lie one after another until all walks have ended."""
    sms, (queries, keys), (left, right) = device.sm_count, _lengths(problem), _window(problem)
    heads, tiles = problem.batch * problem.num_heads_kv, -(-keys // row.tile_n)
    # Last keys that a walk of its own takes.
    short = heads if row.tail and tiles > 0 and keys - (tiles - 1) * row.tile_n <= row.tail else 0
    blocks, of_short = heads * tiles - short, _step(row, row.tail) / _step(row, row.tile_n)
    walked = min(queries, left + right + row.tile_n) if left >= 0 and right >= 0 else queries
    whole = problem.num_heads // max(1, problem.num_heads_kv) * -(-walked // row.tile_m)
    edges = (left >= 0) + (right >= 0)
    if edges == 0:  # all blocks are alike
        whole_blocks = -(-blocks // sms)
        beside = (whole_blocks * sms - blocks) * int(1.0 / of_short)
        waves = whole_blocks + of_short * -(-max(0, short - beside) // sms)
        return waves, waves * whole
    # At an edge half of a tile is computed for nothing.
    scores = visible_scores(problem) + edges * problem.batch * problem.num_heads * keys * row.tile_n / 2
    shared, alone = ((blocks + of_short * short) / sms, scores / (row.tile_m * row.tile_n * sms)), (1.0, float(whole))
    return max(shared, alone, key=lambda way: price.block * way[0] + price.step * way[1])


def walks_us(row: Row, problem: Problem, device: Device, price: RowCost) -> float:
    """Microseconds until all walks of a row have ended: rows that differ in their tile of keys are compared by it."""
    blocks, steps = longest(row, problem, device, price)
    return price.launch + price.block * blocks + price.step * steps


def prices(rows: Sequence[Row], device: Device, calibration: Calibration) -> list[RowCost]:
    """What rows that are to be compared cost: as measured, if all of them were."""
    fits = [calibration.rows.get(row.name) for row in rows]
    measured = [fit.cost for fit in fits if fit is not None]
    return measured if len(measured) == len(rows) else [default_cost(row, device) for row in rows]


def turns(problem: Problem, heads: int) -> int:
    """Times that dS of so many heads of keys is written, and read, until all had theirs."""
    return -(-problem.batch * problem.num_heads_kv // heads)


def waves(row: Row, problem: Problem, device: Device, heads: int) -> int:
    """Times that thread blocks of all SMs begin together, where dS of so many heads of keys is written at a time."""
    all_heads = problem.batch * problem.num_heads_kv
    of_turn, of_last = (-(-_blocks(row, problem, n) // device.sm_count) for n in (heads, all_heads % heads))
    return all_heads // heads * of_turn + of_last


def heads_at_once(row: Row, problem: Problem, device: Device, most: int) -> int:
    """Heads of keys whose dS is in memory at a time, of ``most``, which is 1 or more: those of the fewest waves."""
    heads = max(1, problem.batch * problem.num_heads_kv)
    if most >= heads:
        return heads
    left, right = _window(problem)
    if left < 0 and right >= 0:
        # Under a diagonal the long blocks begin first, so that SMs end about together: turns are alike.
        return -(-heads // turns(problem, most))
    # The most of each number of waves, and of those that need as many in all, the largest.
    of_head, of_all = max(1, _blocks(row, problem, 1)), _blocks(row, problem, most)
    of_waves = (number * device.sm_count // of_head for number in range(of_all // device.sm_count, 0, -1))
    return min((most, *filter(None, of_waves)), key=lambda number: waves(row, problem, device, number))


def product_us(row: Row, problem: Problem, device: Device, heads: int) -> float:
    """Microseconds where dS is written, of so many heads of keys at a time."""
    times, blocks = turns(problem, heads), _blocks(row, problem, problem.batch * problem.num_heads_kv)
    # The blocks of a launch end together or leave SMs idle, each time.
    idle = waves(row, problem, device, heads) * device.sm_count / max(1, blocks) if times > 1 else 1.0
    traffic = 2 * 2 * visible_scores(problem) / (figure(PARAMETERS.dram_tbytes, row, device) * 1e6)
    launches = 2 * times * PARAMETERS.launch_us
    return (
        _products_us(row, problem, device) * _slower(row) * idle + PARAMETERS_OF_GRADIENTS.exposed * traffic + launches
    )


def _products_us(row: Row, problem: Problem, device: Device) -> float:
    flop = 2.0 * PRODUCTS * visible_scores(problem) * row.head_dim
    return flop / (device.sm_count * _sm_rate(row, device))


def _sm_rate(row: Row, device: Device) -> float:
    """Floating-point operations of an SM in a microsecond."""
    return figure(PARAMETERS.sm_tflops, row, device) * PARAMETERS_OF_GRADIENTS.efficiency * 1e6


def _slower(row: Row) -> float:
    return PARAMETERS_OF_GRADIENTS.scored if row.scored else 1.0
