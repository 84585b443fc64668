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

``cold`` is what inputs add that are too large to be found in the L2 cache, ``traffic`` what is moved at
least, ``again`` what blocks load of keys and values that others load, too: it comes from the L2 cache, which
small tiles and heads that share keys ask for many times as much. Where keys are split, or those of the last
tiles are divided, a second launch combines the parts. What masks and biases take is not counted: every row
that can has to read them. All prices are linear up to the square root: a few dozen timings fit them
(``calibrate/fit.py``). Those of a GPU that was never measured are derived from its datasheet
(``datasheet.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from cutlass_fmha.dispatch.blocks import (
    MAX_SPLITS, TAIL_PARTS, Division, Kind, divide, divides_tail, kinds, packed_heads, totals,
)  # fmt: skip
from cutlass_fmha.dispatch.device import KIB, Device
from cutlass_fmha.dispatch.problem import EVEN

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

    def scaled(self, factor: float) -> RowCost:
        """All prices times a factor."""
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


#: The prices of a ``RowCost``: all but ``resident``.
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
    """A row at its prices on a device: what all of its launches have in common."""

    def __init__(self, row: Row, device: Device, cost: RowCost) -> None:
        self.row, self.device, self.cost = row, device, cost
        self.places = device.sm_count * cost.resident
        #: Of keys and values, in a step.
        self.bytes_loaded = row.tile_n * row.kv_warps * (row.head_dim + row.head_dim_v) * BYTES_PER_ELEMENT
        #: Whether a launch may divide the keys of its tiles, or of the last ones.
        self.divides_keys = row.takes_features and row.scored
        self.divides_tail = not row.takes_features and divides_tail(row, device)
        #: Into how many the keys of a tile are divided at most, and keys of a step.
        self.parts = MAX_SPLITS if self.divides_keys else TAIL_PARTS[-1] if self.divides_tail else 1
        self.step = row.tile_n * row.kv_warps
        #: Scores of a step, and the steps that take as long as a second launch.
        self.scores = row.tile_m * self.step
        self.launch_steps = cost.launch / cost.step if cost.step else 0.0
        #: Microseconds of all blocks, as if places and SMs were never idle.
        self.shares = cost.block / self.places, cost.step / self.places
        self.shares += cost.warp_block / device.sm_count, cost.warp_step / device.sm_count

    def __call__(self, problem: Problem) -> Launch:
        return Launch(self, problem)


class Launch:
    """A row's launch for a problem. What it costs at least is known before it is played through."""

    def __init__(self, of: Priced, problem: Problem) -> None:
        self._of, self._problem = of, problem
        self._even = not problem.is_ranged and problem.mean == EVEN
        self._most = MAX_WAVES if self._even else MAX_MASKED_WAVES
        self._may_divide = of.divides_keys or (self._even and of.divides_tail)

    _undivided: tuple[Kind, Kind] | None = None
    _divided: Division | None = None
    _found: list[Kind] | None = None

    def bound(self, least: float = math.inf) -> float:
        """Microseconds at least, before it is known what is divided, in a tenth of the time.

        The first number above ``least`` will do.
        """
        row, problem = self._of.row, self._problem
        if (floor := self._floor()) > least:
            return floor
        pack = packed_heads(row, problem) if row.takes_features else 1
        found = self._undivided = totals(row, problem, pack)
        if found is None:
            return 0.0
        first, sums = found
        bound = self._at_least(None if self._may_divide else first, sums, 1, 0)
        return bound if bound > floor else floor

    def _floor(self) -> float:
        """By the scores alone, and by the block of the last queries: it walks all keys that these see."""
        of, problem = self._of, self._problem
        blocks, scores, last = problem.walked
        tile_m, steps = of.row.tile_m, -(-last // of.step)
        tiles = -(-problem.seqlen_q // tile_m) * problem.batch * problem.num_heads
        if self._may_divide:
            parts = of.parts if problem.num_splits is None else problem.num_splits
            tiles *= parts
            steps = min(steps, of.launch_steps - (-steps // parts))
        blocks, scores = blocks / tile_m, scores / of.scores
        first = (1, 1.0, steps, 0.0, 0.0) if last else None
        return self._at_least(first, (tiles, blocks, scores, blocks, scores), 1, 0) if blocks else 0.0

    def least(self, bound: float) -> float:
        """The same, which was ``bound``, when it is known what is divided."""
        if not self._may_divide:
            return bound
        _, splits, tail = self._division()
        if splits == 1 and not tail:
            return self._at_least(*self._undivided, 1, 0) if self._undivided else bound
        if not (kinds := self._kinds()):
            return 0.0
        total = 0
        blocks = steps = warp_blocks = warp_steps = 0.0
        for number, block, step, warp_block, warp_step in kinds:
            total += number
            blocks += number * block
            steps += number * step
            warp_blocks += number * warp_block
            warp_steps += number * warp_step
        first = kinds[0] if kinds[0][0] else kinds[1]  # all may be tiles of a tail
        return self._at_least(first, (total, blocks, steps, warp_blocks, warp_steps), *self._parts())

    def _at_least(self, first: Kind | None, sums: Kind, splits: int, tail_rows: int) -> float:
        """If all places, and all SMs, ended together; and by the first block alone, if none is averaged."""
        of, cost = self._of, self._of.cost
        total, blocks, steps, warp_blocks, warp_steps = sums
        of_block, of_step, of_warp_block, of_warp_step = of.shares
        waiting = blocks * of_block + steps * of_step
        work = warp_blocks * of_warp_block + warp_steps * of_warp_step
        if first and total <= of.places * self._most:
            _, block, step, warp_block, warp_step = first
            if (us := block * cost.block + step * cost.step) > waiting:
                waiting = us
            if (us := warp_block * cost.warp_block + warp_step * cost.warp_step) > work:
                work = us
        once = cost.once(*self._once(steps, splits, tail_rows))
        return (once + math.hypot(waiting, work)) * ROUNDED

    def _division(self) -> Division:
        if (found := self._divided) is None:
            found = self._divided = divide(self._of.row, self._problem, self._of.device)
        return found

    def _kinds(self) -> list[Kind]:
        if (found := self._found) is None:
            found = self._found = kinds(self._of.row, self._problem, self._division())
        return found

    def _parts(self) -> tuple[int, int]:
        """Into how many the keys are divided, and the rows of O that those of a tail leave."""
        division = self._division()
        return division.splits, division.tail.rows(self._of.row) if division.tail else 0

    def _once(self, steps: float, splits: int, tail_rows: int) -> tuple[int, float, float, float]:
        """The first of ``Counts``: what a launch has once. ``steps``: those of all blocks."""
        of, problem = self._of, self._problem
        read, moved = problem.elements_read * BYTES_PER_ELEMENT, problem.elements_written * BYTES_PER_ELEMENT
        moved += read
        if splits > 1:
            moved += 2 * splits * BYTES_PER_PARTIAL * problem.elements_written
        if tail_rows:
            moved += 2 * BYTES_PER_PARTIAL * tail_rows * of.row.head_dim
        # Bytes of keys and values that all blocks load, each for itself.
        again = of.bytes_loaded * steps - read
        cold = read / COLD_BYTES
        return (
            2 if splits > 1 or tail_rows else 1,
            cold if cold < 1.0 else 1.0,
            moved / 1e6,
            again / 1e6 if again > 0 else 0.0,
        )

    def counts(self) -> Counts | None:
        """The launch played through, None without a block: which it waits for depends on what they cost."""
        if not (kinds := self._kinds()):
            return None
        of, cost, sms = self._of, self._of.cost, self._of.device.sm_count
        alone = [(number, block, step) for number, block, step, _, _ in kinds if number]
        shared = [(number, block, step) for number, _, _, block, step in kinds if number]
        numbers, _, steps_of = zip(*alone, strict=True)
        total, steps = sum(numbers), sum(map(mul, numbers, steps_of))
        waiting = _play(alone, total, of.places, self._most, cost.block, cost.step)
        work = _work(shared, total, sms, cost, self._most, self._even)
        return Counts(*self._once(steps, *self._parts()), *waiting, *work)

    def us(self) -> float:
        counts = self.counts()
        return 0.0 if counts is None else self._of.cost.of(counts)


def count(row: Row, problem: Problem, device: Device, cost: RowCost) -> Counts | None:
    """What a launch is made of; None when it has no block. The counts are those at ``cost``."""
    return Priced(row, device, cost)(problem).counts()


def _work(
    launched: Kinds, total: int, sms: int, cost: RowCost, most: int, even: bool
) -> tuple[float, float]:
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
        (blocks * block + steps * step, entry, many, blocks, steps)
        for entry, (many, blocks, steps) in enumerate(dealt)
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
    return Priced(row, device, cost)(problem).us()
