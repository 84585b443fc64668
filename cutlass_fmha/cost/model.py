"""What a row costs on a device, predicted well enough to tell which of two rows is the cheaper one.

A launch is a list of thread blocks, each with a start, steps of its main loop and an end. Two things can make
it take its time, and ``count`` plays the launch through for both:

- **waiting**: a block alone on a GPU still takes ``block + steps * step``. Every SM has places for
  ``resident`` blocks; blocks go to the places in launch order, each to the first one that is free.
- **work**: the same blocks keep an SM's pipes busy for ``warp_block`` and ``warp_step`` per step, less for a
  block whose warps have rows or keys missing. Blocks on one SM share its pipes, so that here every SM is one
  place, which begins with as many blocks as it has room for.

    microseconds = launch * launches + cold * share + traffic * megabytes + again * megabytes loaded again
                   + sqrt(waiting^2 + work^2)

and no less than ``memory`` for every megabyte, the rate at which the row streams where nothing else holds it
up, after which the blocks of a last wave take what they take alone: they are too few to keep the memory busy.

``cold`` is what inputs add that are too large to be found in the L2 cache, ``traffic`` what is moved at
least, ``again`` what blocks load of keys and values that others load, too: it comes from the L2 cache, which
small tiles and heads that share keys ask for many times as much. Where keys are split, or those of the last
tiles are divided, a second launch combines the parts. What masks and biases take is not counted, as every
row that can has to read them, but for a mask that must be packed before. All prices but ``memory`` are
linear up to the square root: a few dozen timings fit them (``calibrate/fit.py``). Those of a GPU that was
never measured are derived from its datasheet (``datasheet.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from cutlass_fmha.dispatch.blocks import MAX_SPLITS, TAIL_PARTS, divide, divides_tail, kinds
from cutlass_fmha.dispatch.device import KIB, Device

if TYPE_CHECKING:
    from cutlass_fmha.dispatch.problem import Problem
    from cutlass_fmha.dispatch.table import Row

BYTES_PER_ELEMENT = 2
BYTES_PER_PARTIAL = 4
COLD_BYTES = 600e3
"""Inputs from this size on are cold. A timing rotates through 128 sets of inputs at most: smaller ones stay
in an L2 cache of 50 MB."""
MAX_WAVES, MAX_MASKED_WAVES = 32, 6
"""Blocks per place from which on a launch is not played through but averaged. With a mask, early blocks are
long and late ones short, so that places end together much sooner."""
NOT_HIDDEN = 0.01
"""Of rows that wait for the memory alike, the one that does least besides is taken."""
ROUNDED = 1 - 1e-12
"""Sums of floats that should be equal may differ by that much: a bound is no more than what it bounds."""

Kinds = Sequence[tuple[int, float, float]]
"""Blocks that are launched one after another: how many are alike, ``block`` and ``step`` of each."""
NONE_LEFT = (0, 0.0, 0.0)


@dataclass(frozen=True)
class RowCost:
    """Microseconds of a row on one device, and how many of its blocks an SM has places for (see above)."""

    launch: float
    cold: float
    traffic: float
    again: float
    block: float
    step: float
    warp_block: float
    warp_step: float
    resident: int = field(default=1, kw_only=True)
    memory: float = field(default=0.0, kw_only=True)

    def scaled(self, factor: float) -> RowCost:
        """All prices times a factor, but what the memory takes."""
        return replace(self, **{name: factor * getattr(self, name) for name in PRICES})

    def waiting(self, counts: Counts) -> float:
        return counts.blocks * self.block + counts.steps * self.step

    def work(self, counts: Counts) -> float:
        return counts.warp_blocks * self.warp_block + counts.warp_steps * self.warp_step

    def of(self, counts: Counts) -> float:
        """Microseconds of a launch with these counts."""
        return self.once(*counts[:4]) + math.hypot(self.waiting(counts), self.work(counts))

    def once(self, launches: int, cold: float, megabytes: float, megabytes_again: float) -> float:
        """Of these what a launch takes whatever its blocks do."""
        once = self.launch * launches + self.cold * cold
        return once + (self.traffic * megabytes + self.again * megabytes_again)

    def streamed(self, launches: int, cold: float, megabytes: float) -> float:
        """What a launch takes at least, by what it moves."""
        return self.launch * launches + self.cold * cold + self.memory * megabytes


#: The prices of a ``RowCost`` that timings are a sum of: all but ``resident`` and ``memory``.
PRICES = ("launch", "cold", "traffic", "again", "block", "step", "warp_block", "warp_step")


class Counts(NamedTuple):
    """What the prices of a ``RowCost`` are multiplied with.

    ``launches``: 2 where the parts of split keys are combined. ``blocks`` and ``steps`` lie one after
    another before the last block to end, itself included; ``warp_blocks`` and ``warp_steps`` are those of the
    SM that has the most to do.
    """

    launches: int
    cold: float
    megabytes: float
    megabytes_again: float
    blocks: float
    steps: float
    warp_blocks: float
    warp_steps: float


class Priced:
    """A row at its prices on a device, which tells what its launches take."""

    def __init__(self, row: Row, device: Device, cost: RowCost) -> None:
        self.row, self.device, self.cost = row, device, cost
        self.places = device.sm_count * cost.resident
        step = row.tile_n * row.kv_warps
        #: Of keys and values, in a step.
        self.bytes_loaded = step * (row.head_dim + row.head_dim_v) * BYTES_PER_ELEMENT
        # Into how many the keys of a tile are divided at most, and, where all see as many, of the last tiles.
        parts = MAX_SPLITS if row.takes_features and row.scored else 1
        #: What ``at_least`` asks, side by side in memory: most calls find it in no cache.
        self.bounds = (
            (row.tile_m, row.tile_m * row.kv_warps // row.warps, step, row.takes_features),
            (parts, TAIL_PARTS[-1] if divides_tail(row, device) else parts),
            (cost.launch, cost.block, cost.step),
            (cost.block / self.places / row.tile_m, cost.step / self.places / row.tile_m / step),
            (
                cost.warp_block / device.sm_count / row.tile_m,
                cost.warp_step / device.sm_count / row.tile_m / step,
            ),
        )

    def at_least(self, problem: Problem) -> float:
        """Microseconds, in a tenth of the time: those of all scores, as if places and SMs were never idle.

        Or those of the last queries' block, if none is averaged: they see the most keys.
        """
        queries, scores, rising, ends, last = problem.walked
        if not queries:
            return 0.0
        tile, parts, (launch, block_us, step_us), waiting_of, work_of = self.bounds
        tile_m, rows, step, takes_features = tile
        by_warps = scores
        # All rows of a tile, or of a warp, walk as far as the last.
        if (rising := rising - ends * tile_m) > 0:
            if takes_features:
                rows = tile_m * problem.num_heads_kv // problem.num_heads  # of a head, at least
            by_warps += rising * (rows - 1) / 2
            scores += rising * ((rows if takes_features else tile_m) - 1) / 2
        if scores < 0:
            scores = 0.0
        waiting = waiting_of[0] * queries + waiting_of[1] * scores
        work = work_of[0] * queries + (work_of[1] * by_warps if by_warps > 0 else 0.0)
        tiles = -(-problem.seqlen_q // tile_m) * problem.batch * problem.num_heads
        us = block_us + -(-last // step) * step_us
        if (most := parts[problem.is_even]) > 1:
            most = problem.num_splits or most if parts[0] > 1 else most
            tiles *= most
            us = min(us, launch + block_us + -(-last // (step * most)) * step_us)
        if last and us > waiting and tiles <= self.places * most_waves(problem):
            waiting = us
        launches, cold, megabytes, again = self._once(problem, scores / (tile_m * step), 1, 0)
        least = self.cost.once(launches, cold, megabytes, again) + math.hypot(waiting, work)
        return max(least, self.cost.streamed(launches, cold, megabytes)) * ROUNDED

    def us(self, problem: Problem) -> float:
        """Microseconds of a launch, 0 without a block."""
        counts = self.counts(problem)
        if counts is None:
            return 0.0
        us, streamed = self.cost.of(counts), self.cost.streamed(*counts[:3])
        # What a last wave adds is less than the waves before it took.
        if 2 * streamed < us:
            return us
        return max(us, streamed + self._last_wave(problem, counts) + NOT_HIDDEN * us)

    def _last_wave(self, problem: Problem, counts: Counts) -> float:
        """Microseconds that a launch which waits for the memory loses when few blocks are left."""
        cost, sms = self.cost, self.device.sm_count
        launched = kinds(self.row, problem, divide(self.row, problem, self.device))
        total = sum(kind[0] for kind in launched)
        left = total % self.places if total > self.places else 0
        megabytes = counts.megabytes * left / total
        _, block, steps, warp_block, warp_steps = launched[-1]
        waiting = cost.block * block + cost.step * steps
        work = -(-left // sms) * (cost.warp_block * warp_block + cost.warp_step * warp_steps)
        alone = cost.traffic * megabytes + math.hypot(waiting, work) if left else 0.0
        return max(0.0, alone - cost.memory * megabytes)

    def counts(self, problem: Problem) -> Counts | None:
        """The launch played through, None without a block: which it waits for depends on what they cost."""
        division = divide(self.row, problem, self.device)
        if not (launched := kinds(self.row, problem, division)):
            return None
        numbers, blocks, steps, warp_blocks, warp_steps = zip(*launched, strict=True)
        total, cost, sms, most = sum(numbers), self.cost, self.device.sm_count, most_waves(problem)
        alone = list(zip(numbers, blocks, steps, strict=True))
        shared = list(zip(numbers, warp_blocks, warp_steps, strict=True))
        waiting = _play(alone, total, self.places, most, cost.block, cost.step)
        work = _work(shared, total, sms, cost, most, problem.is_even)
        tail_rows = division.tail.rows(self.row) if division.tail else 0
        once = self._once(problem, sum(map(mul, numbers, steps)), division.splits, tail_rows)
        return Counts(*once, *waiting, *work)

    def _once(self, problem: Problem, steps: float, splits: int, tail_rows: int) -> tuple[int, float, float, float]:
        """The first of ``Counts``: what a launch has once. ``steps``: those of all blocks."""
        read, moved = problem.elements_read * BYTES_PER_ELEMENT, problem.elements_written * BYTES_PER_ELEMENT
        moved += read
        if splits > 1:
            moved += 2 * splits * BYTES_PER_PARTIAL * problem.elements_written
        if tail_rows:
            moved += 2 * BYTES_PER_PARTIAL * tail_rows * self.row.head_dim
        # Bytes of keys and values that all blocks load, each for itself.
        again = self.bytes_loaded * steps - read
        cold = read / COLD_BYTES
        return (
            2 if splits > 1 or tail_rows else 1,
            cold if cold < 1.0 else 1.0,
            moved / 1e6,
            again / 1e6 if again > 0 else 0.0,
        )


def most_waves(problem: Problem) -> int:
    """Blocks per place up to which a launch is played through."""
    return MAX_WAVES if problem.is_even else MAX_MASKED_WAVES


def count(row: Row, problem: Problem, device: Device, cost: RowCost) -> Counts | None:
    """What a launch is made of; None when it has no block. The counts are those at ``cost``."""
    return Priced(row, device, cost).counts(problem)


def _work(launched: Kinds, total: int, sms: int, cost: RowCost, most: int, even: bool) -> tuple[float, float]:
    """What the SM with the most to do has to do. ``even``: all blocks take about the same time.

    The first blocks are dealt out to the SMs in turns, as many to each as it has places, no matter how long
    they are. Those after them go where one ends. Even ones end together, and an SM that has all its places
    free takes new blocks for all of them, or one, and leaves the others to the next SM: there is no telling,
    so that the last wave counts as the mean of both.
    """
    block, step = cost.warp_block, cost.warp_step
    places = sms * cost.resident
    if cost.resident == 1 or total <= sms or total > places * most:
        return _play(launched, total, sms, most * cost.resident, block, step)
    if even and total > places:
        waves = -(-total // places)
        left = total - (waves - 1) * places
        busiest = (waves - 1) * cost.resident + (-(-left // sms) + min(cost.resident, left)) / 2
        share = busiest / total
        return (
            share * sum(number * blocks for number, blocks, _ in launched),
            share * sum(number * steps for number, _, steps in launched),
        )
    if total <= places and _falls(launched[1:], block, step):
        return max(
            (_dealt_to(sm, launched, sms) for sm in (0, launched[0][0] % sms)),
            key=lambda found: found[0] * block + found[1] * step,
        )
    dealt, left_over = _deal(launched, sms, cost.resident)
    left = total - places if total > places else 0
    return _play(left_over, left, sms, most * cost.resident, block, step, dealt)


def _falls(launched: Kinds, block: float, step: float) -> bool:
    """Whether no block is longer than one before it."""
    times = [blocks * block + steps * step for _, blocks, steps in launched]
    return times == sorted(times, reverse=True)


def _dealt_to(sm: int, launched: Kinds, sms: int) -> tuple[float, float]:
    """What an SM has to do of blocks that all find a place: every one of so many."""
    all_blocks = all_steps = 0.0
    begin, mine = 0, sm
    for number, blocks, steps in launched:
        begin += number
        while mine < begin:
            all_blocks += blocks
            all_steps += steps
            mine += sms
    return all_blocks, all_steps


def _deal(launched: Kinds, sms: int, rounds: int) -> tuple[Kinds, Kinds]:
    """Gives each SM a block in every round. SMs that got the same, with what they have, and what is left."""
    rest = iter(launched)
    number, more_blocks, more_steps = next(rest, NONE_LEFT)
    dealt: list[tuple[int, float, float]] = [(sms, 0.0, 0.0)]
    for _ in range(rounds):
        before, dealt = dealt, []
        for many, blocks, steps in before:
            while number and number <= many:
                dealt.append((number, blocks + more_blocks, steps + more_steps))
                many -= number
                number, more_blocks, more_steps = next(rest, NONE_LEFT)
            if not many:
                continue
            if number:
                dealt.append((many, blocks + more_blocks, steps + more_steps))
                number -= many
            else:
                dealt.append((many, blocks, steps))
    return dealt, [(number, more_blocks, more_steps), *rest] if number else []


def _play(
    launched: Kinds, total: int, places: int, most: int, block: float, step: float, dealt: Kinds = ()
) -> tuple[float, float]:
    """Gives ``total`` blocks to places in order; what lies on the longest way to the end, added up.

    ``dealt``: what the places have to do before; nothing when empty.
    """
    if total > places * most:  # an even share of all, and half of a last one
        _, last_blocks, last_steps = launched[-1]
        all_blocks = sum(number * blocks for number, blocks, _ in launched)
        all_steps = sum(number * steps for number, _, steps in launched)
        return all_blocks / places + last_blocks / 2, all_steps / places + last_steps / 2
    if not dealt:
        if len(launched) == 1:  # equal blocks end together: a partial wave is a whole one
            waves = -(-total // places)
            return waves * launched[0][1], waves * launched[0][2]
        if total <= places:
            return _longest(launched, block, step)
        dealt, launched = _deal(launched, places, 1)
    # Places that become free together are one entry: when, a number to break ties, how many, the way there.
    free = [
        (blocks * block + steps * step, entry, many, blocks, steps) for entry, (many, blocks, steps) in enumerate(dealt)
    ]
    heapq.heapify(free)
    longest = max(free)
    entry = len(free)
    for left, blocks, steps in launched:
        us = blocks * block + steps * step
        while left:
            begin, number, many, blocks_before, steps_before = free[0]
            taken = left if left < many else many
            entry += 1
            ended = (begin + us, entry, taken, blocks_before + blocks, steps_before + steps)
            if taken < many:
                free[0] = (begin, number, many - taken, blocks_before, steps_before)
                heapq.heappush(free, ended)
            else:
                heapq.heapreplace(free, ended)
            if ended > longest:
                longest = ended
            left -= taken
    return longest[3], longest[4]


def _longest(launched: Kinds, block: float, step: float) -> tuple[float, float]:
    """The first block that takes longest."""
    times = [blocks * block + steps * step for _, blocks, steps in launched]
    return launched[times.index(max(times))][1:]


def predict(row: Row, problem: Problem, device: Device, cost: RowCost) -> float:
    """Predicted microseconds of one launch; infinite when not even one block fits on an SM."""
    if row.smem_bytes + KIB > device.smem_per_sm:
        return math.inf
    return Priced(row, device, cost).us(problem)
