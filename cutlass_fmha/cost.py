"""What a row costs on a device, predicted well enough to tell which of two rows is the cheaper one.

A launch is a list of thread blocks, each with a start, steps of its main loop and an end. Two things can make
it take its time, and ``count`` plays the launch through for both:

- **waiting**: a block alone on a GPU still takes ``block + steps * step``. Every SM has places for
  ``resident`` blocks; blocks go to the places in launch order, each to the first one that is free.
- **work**: the same blocks keep an SM's pipes busy for ``warp_block`` and ``warp_step`` per step, less for a
  block whose warps have rows or keys missing. Blocks on one SM share its pipes, so that here every SM is one
  place.

    microseconds = launch + cold * share + traffic * megabytes + sqrt(waiting^2 + work^2)

``cold`` is what inputs add that are too large to be found in the L2 cache, ``traffic`` what is moved at
least. All prices are linear up to the square root: a few dozen timings fit them (``calibration/fit.py``).
Those of a GPU that was never measured are derived from its datasheet (``calibration/datasheet.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from cutlass_fmha.device import KIB, Device

if TYPE_CHECKING:
    from cutlass_fmha._C import Template
    from cutlass_fmha.select import Problem

BYTES_PER_ELEMENT = 2
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 256  # 255, and they are given out in steps of 8
REGISTERS_BESIDES_FRAGMENTS = 40  # as ptxas leaves them in the rows for sm_90, give or take ten
COLD_BYTES = 600e3
"""Inputs from this size on are cold. A timing rotates through 128 sets of inputs at most: smaller ones stay
in an L2 cache of 50 MB."""
EMPTY_BLOCK = 0.6
"""A block whose queries see no key only writes zeros: that much of ``block`` and ``warp_block``."""
MAX_GROUPS = 24
"""Query tiles of a causal problem are played through in so many groups of equal ones at most."""
MAX_WAVES, MAX_MASKED_WAVES = 32, 6
"""Blocks per place from which on a launch is not played through but averaged. With a mask, early blocks are
long and late ones short, so that places end together much sooner."""


@dataclass(frozen=True)
class RowCost:
    """Microseconds of a row on one device, and how many of its blocks an SM has places for (see above)."""

    launch: float
    cold: float
    traffic: float
    block: float
    step: float
    warp_block: float
    warp_step: float
    resident: int = field(default=1, kw_only=True)

    def scaled(self, factor: float) -> RowCost:
        """All prices times a factor."""
        return replace(self, **{name: factor * getattr(self, name) for name in PRICES})

    def waiting(self, counts: Counts) -> float:
        return counts.blocks * self.block + counts.steps * self.step

    def work(self, counts: Counts) -> float:
        return counts.warp_blocks * self.warp_block + counts.warp_steps * self.warp_step

    def of(self, counts: Counts) -> float:
        """Microseconds of a launch with these counts."""
        once = self.launch + self.cold * counts.cold + self.traffic * counts.megabytes
        return once + math.hypot(self.waiting(counts), self.work(counts))


#: The prices of a ``RowCost``: all but ``resident``.
PRICES = ("launch", "cold", "traffic", "block", "step", "warp_block", "warp_step")


class Counts(NamedTuple):
    """What the prices of a ``RowCost`` are multiplied with.

    ``blocks`` and ``steps`` lie one after another before the last block to end, itself included;
    ``warp_blocks`` and ``warp_steps`` are those of the SM that has the most to do.
    """

    cold: float
    megabytes: float
    blocks: float
    steps: float
    warp_blocks: float
    warp_steps: float


class Group(NamedTuple):
    """Blocks that are alike and are launched one after another; ``warp_*`` as a share of the row's warps."""

    blocks: int
    block: float
    steps: float
    warp_block: float
    warp_steps: float


def resident_blocks(template: Template, device: Device) -> int:
    """Blocks of a row that one SM holds at a time, by its description; 0 when not even one fits."""
    by_smem = device.smem_per_sm // (template.smem_bytes + KIB)
    by_warps = device.warps_per_sm // template.warps
    by_registers = REGISTERS_PER_SM // (32 * template.warps * registers(template))
    return min(by_smem, by_warps, max(template.min_blocks, by_registers))


def registers(template: Template) -> int:
    """Registers that a thread of a row is likely to have: the fragments of its tiles, and some."""
    rows = template.tile_m * template.kv_warps // template.warps
    output, scores = rows * template.head_dim / 32, rows * template.tile_n / 32
    fragments = output + scores + scores / 2
    if template.q_in_registers:
        fragments += output / 2
    if template.kv_warps > 1:  # K and V come straight to registers
        fragments += 2 * template.tile_n * template.head_dim / 64
    in_steps = 8 * math.ceil((fragments + REGISTERS_BESIDES_FRAGMENTS) / 8)
    return min(MAX_REGISTERS_PER_THREAD, in_steps)


def groups(template: Template, problem: Problem) -> list[Group]:
    """The blocks of a launch in the order of ``src/forward/scheduler.h``."""
    tiles = -(-problem.seqlen_q // template.tile_m)
    sequences = problem.batch * problem.num_heads
    if tiles == 0 or sequences == 0:
        return []
    if problem.diagonal is None:
        full = problem.seqlen_q // template.tile_m
        found = [Group(full * sequences, *_block(template, problem, 0))] if full else []
        if full < tiles:
            found.append(Group(sequences, *_block(template, problem, tiles - 1)))
        return found
    size = -(-tiles // MAX_GROUPS)
    return [
        Group((last - first + 1) * sequences, *_block(template, problem, (first + last) / 2))
        for last in range(tiles - 1, -1, -size)
        for first in (max(0, last - size + 1),)
    ]


def _block(template: Template, problem: Problem, tile: float) -> tuple[float, float, float, float]:
    """A ``Group`` but for its count, of the query tile ``tile``: half a number stands for two neighbours."""
    begin = tile * template.tile_m
    end = min(begin + template.tile_m, problem.seqlen_q)
    groups_of_warps = template.warps // template.kv_warps
    rows = template.tile_m // groups_of_warps
    live = math.ceil((end - begin) / rows) / groups_of_warps
    key_tiles = _key_tiles(template, problem, end - 1)
    # A warp sees what its last row sees; the mean over the warps is that of the middle one.
    middle = min((begin + end + rows) / 2, end) - 1
    warp_steps = live * _key_tiles(template, problem, middle) / template.kv_warps
    whole = 1.0 if key_tiles else EMPTY_BLOCK
    return whole, -(-key_tiles // template.kv_warps), whole * live, warp_steps


def _key_tiles(template: Template, problem: Problem, row: float) -> int:
    """Tiles of keys of which query ``row`` sees some."""
    keys, diagonal = problem.seqlen_k, problem.diagonal
    if diagonal is not None:
        keys = max(0, min(keys, math.floor(row) + diagonal + 1))
    return -(-keys // template.tile_n)


def count(template: Template, problem: Problem, device: Device, cost: RowCost) -> Counts | None:
    """Plays a launch through; None when it has no block.

    Which blocks it waits for depends on what they cost: the counts are those at ``cost``.
    """
    launched = groups(template, problem)
    if not launched:
        return None
    most = MAX_WAVES if problem.diagonal is None else MAX_MASKED_WAVES
    alone = [(group.blocks, group.block, group.steps) for group in launched]
    shared = [(group.blocks, group.warp_block, group.warp_steps) for group in launched]
    waiting = _play(alone, device.sm_count * cost.resident, most, cost.block, cost.step)
    work = _play(shared, device.sm_count, most, cost.warp_block, cost.warp_step)
    read = _bytes_read(problem)
    written = problem.batch * problem.seqlen_q * problem.num_heads * problem.head_dim * BYTES_PER_ELEMENT
    return Counts(min(1.0, read / COLD_BYTES), (read + written) / 1e6, *waiting, *work)


def _bytes_read(problem: Problem) -> int:
    """Bytes of the queries that see a key, and of the keys and values that are seen."""
    queries, keys, diagonal = problem.seqlen_q, problem.seqlen_k, problem.diagonal
    if diagonal is not None:
        queries = max(0, min(queries, queries + diagonal))
        keys = max(0, min(keys, problem.seqlen_q + diagonal))
    rows = queries * problem.num_heads + 2 * keys * problem.num_heads_kv
    return problem.batch * rows * problem.head_dim * BYTES_PER_ELEMENT


def _play(
    launched: Sequence[tuple[int, float, float]], places: int, most: int, block: float, step: float
) -> tuple[float, float]:
    """Gives (number, blocks, steps) to places in order; what lies on the longest way to the end, added up."""
    total = sum(number for number, _, _ in launched)
    if total > places * most:  # an even share of all, and half of a last one
        _, last_blocks, last_steps = launched[-1]
        all_blocks = sum(number * blocks for number, blocks, _ in launched)
        all_steps = sum(number * steps for number, _, steps in launched)
        return all_blocks / places + last_blocks / 2, all_steps / places + last_steps / 2
    if len(launched) == 1:  # equal blocks end together: a partial wave is a whole one
        waves = -(-total // places)
        return waves * launched[0][1], waves * launched[0][2]
    if total <= places:
        return max(
            ((blocks, steps) for _, blocks, steps in launched), key=lambda x: x[0] * block + x[1] * step
        )
    # Places that become free together are one entry: when, a number to break ties, how many, the way there.
    free = [(0.0, 0, places, 0.0, 0.0)]
    longest = free[0]
    entry = 0
    for left, blocks, steps in launched:
        us = blocks * block + steps * step
        while left:
            begin, _, many, blocks_before, steps_before = heapq.heappop(free)
            taken = min(left, many)
            entry += 2
            if taken < many:
                heapq.heappush(free, (begin, entry - 1, many - taken, blocks_before, steps_before))
            ended = (begin + us, entry, taken, blocks_before + blocks, steps_before + steps)
            heapq.heappush(free, ended)
            longest = max(longest, ended)
            left -= taken
    return longest[3], longest[4]


def predict(template: Template, problem: Problem, device: Device, cost: RowCost) -> float:
    """Predicted microseconds of one launch; infinite when not even one block fits on an SM."""
    if template.smem_bytes + KIB > device.smem_per_sm:
        return math.inf
    counts = count(template, problem, device, cost)
    return 0.0 if counts is None else cost.of(counts)
