"""From timings to costs: robust, non-negative least squares on the relative error, tile by tile.

How fast a row streams is read off its timings. The model is linear in the other prices once it is known
which blocks a launch waits for and how waiting and work share the time, and both depend on the prices: so the
launch is played through with the prices so far, new ones are fitted to its counts, and again. How many blocks
go about side by side is whatever explains the timings best. Timings that the model can't explain lose weight
(Huber), and so do problems that another row runs much faster: where rows cross, a price must be right.

All tiles are fitted twice. What the first fit gets wrong by the same factor for all rows of a problem decides
nothing between them: the second fit doesn't bend any row's prices for it.

Rows that differ in their dtype only take the same time, to half a percent on an H200: they are fitted
together.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from cutlass_fmha import cost as model
from cutlass_fmha.calibrate.measurements import Machine, Sample
from cutlass_fmha.cost import PRICES, Counts, RowCost, datasheet, store
from cutlass_fmha.cost import gradients as of_gradients
from cutlass_fmha.cost.model import ROUNDED
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import KIB, Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Table

if TYPE_CHECKING:
    from cutlass_fmha.dispatch.table import Row

ROUNDS = 8
MOST_RESIDENT = 6
MIN_SAMPLES = 4
"""With fewer timings than this a row keeps its default costs. Fewer than there are prices will do: scored
rows are timed on a few problems each, and what those leave open is the default at their scale (``PULL``)."""
HUBER = 0.05
"""Relative error from which on a timing counts less."""
FAR = 2.0
"""A timing counts by this power of best time / its time."""
NEAR = 1.3
"""Rows that take this much longer than the best one have no say in what a problem's rows have in common."""
MOST_IN_COMMON = 0.15
"""Relative error of a row from which on it counts no more towards that."""
AGAIN = 0.1
"""Loading a byte again costs this part of the first time at the start: the default has no price for it."""
MOST_AGAIN = 0.1
"""Microseconds of a megabyte that is loaded again: 10 TB/s of all SMs, twice what rows with many timings have. What
was timed with few queries alone (wide scored tiles) would otherwise blame L2 for what it does once, and be far too
dear for many queries."""
STREAMING, STREAMED_MEGABYTES = 1.5, 64
"""Timings say how fast a row streams where that is near what the datasheet says, and much is moved."""
PULL = 1e-2
"""Towards the start, where timings leave a price open: as if one timing said so with this weight."""


Weighted = tuple[Problem, float, float]
"""A problem, a row's microseconds on it, and how much that counts."""


def tile_of(name: str) -> str:
    """The part of a row's name that rows share which differ in their dtype only."""
    return re.sub(r"_(f16|bf16)_", "_", name)


def timings(tile: str, samples: Sequence[Sample], factors: Sequence[float] | None = None) -> list[Weighted]:
    """The timings of a tile's rows, weighted by how close they were to the best ones.

    ``factors``: what to multiply those of each sample with.
    """
    found = []
    for number, sample in enumerate(samples):
        times = sample.times
        factor = 1.0 if factors is None else factors[number]
        found += [
            (sample.problem, factor * us, (min(times.values()) / us) ** FAR)
            for name, us in times.items()
            if tile_of(name) == tile
        ]
    return found


def in_common(sample: Sample, of_tiles: Mapping[str, Row], device: Device, fits: Mapping[str, store.Fit]) -> float:
    """Predicted over measured time, as far as a sample's best rows share it. Few rows say little about that.

    ``of_tiles`` and ``fits``: those of each tile.
    """
    times = sample.times
    best = min(times.values(), default=0.0)
    total, weights = 0.0, 1.0  # as if one row, as good as the best, were predicted right
    for name, us in times.items():
        tile = tile_of(name)
        if us < NEAR * best and tile in fits:
            predicted = model.predict(of_tiles[tile], sample.problem, device, fits[tile].cost)
            error = math.log(predicted / us)
            weight = (best / us) ** (2 * FAR)
            total += weight * max(-MOST_IN_COMMON, min(MOST_IN_COMMON, error))
            weights += weight
    return math.exp(total / weights)


def fit_tile(row: Row, device: Device, timed: Sequence[Weighted]) -> store.Fit | None:
    """The costs of a tile's rows, of which ``row`` is one; None when there are too few timings."""
    if len(timed) < MIN_SAMPLES:
        return None
    start = datasheet.row_cost(row, device)
    ratios = [us / model.predict(row, problem, device, start) for problem, us, _ in timed]
    start = start.scaled(median(ratios))
    start = replace(start, again=AGAIN * start.traffic, memory=streaming(row, device, timed, start))
    most = min(
        MOST_RESIDENT,
        device.smem_per_sm // (row.smem_bytes + KIB),
        device.warps_per_sm // row.warps,
    )
    tried = [_descend(row, device, timed, replace(start, resident=resident)) for resident in range(1, most + 1)]
    _, cost = min(tried, key=lambda pair: pair[0])
    return rated(row, device, timed, cost)


def streaming(row: Row, device: Device, timed: Sequence[Weighted], start: RowCost) -> float:
    """Microseconds of a megabyte where a row does nothing but wait for the memory: the least in its timings.

    ``start``: with what the launches of these take besides, and what a megabyte takes where they don't tell.
    """
    found = [start.memory * STREAMING]
    for problem, us, _ in timed:
        counts = model.count(row, problem, device, start)
        if counts is not None and counts.megabytes >= STREAMED_MEGABYTES:
            found.append((us - start.launch * counts.launches - start.cold) / counts.megabytes)
    return min(found) if min(found) < found[0] else start.memory


def rated(row: Row, device: Device, timed: Sequence[Weighted], cost: RowCost) -> store.Fit:
    """A row's costs with how well they explain timings of it."""
    errors = [abs(error) for error in _errors(row, device, timed, cost)]
    return store.Fit(cost, median(errors), max(errors), len(errors))


def _descend(row: Row, device: Device, timed: Sequence[Weighted], start: RowCost) -> tuple[float, RowCost]:
    """The best of a few rounds of least squares from ``start``, and its loss."""
    cost, best = start, (math.inf, start)
    for _ in range(ROUNDS):
        errors = _errors(row, device, timed, cost)
        loss = sum(weight * _huber(error) for (_, _, weight), error in zip(timed, errors, strict=True))
        if loss < best[0]:
            best = (loss, cost)
        cost = _solve(row, device, timed, errors, cost, start)
    return best


def _errors(row: Row, device: Device, timed: Sequence[Weighted], cost: RowCost) -> list[float]:
    return [model.predict(row, problem, device, cost) / us - 1 for problem, us, _ in timed]


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= HUBER else HUBER * (size - HUBER / 2)


def _solve(
    row: Row,
    device: Device,
    timed: Sequence[Weighted],
    errors: Sequence[float],
    cost: RowCost,
    start: RowCost,
) -> RowCost:
    """The prices that explain the timings best, for launches that go the way they go at ``cost``."""
    rows: list[tuple[float, ...]] = []
    targets: list[float] = []
    for (problem, us, weight), error in zip(timed, errors, strict=True):
        counts = model.count(row, problem, device, cost)
        assert counts is not None  # an empty problem is never timed
        if cost.of(counts) < ROUNDED * (1 + error) * us:
            continue  # the memory's rate alone explains it
        root = math.sqrt(weight * min(1.0, HUBER / max(abs(error), 1e-9)))
        rows.append(tuple(root / us * factor for factor in _factors(counts, cost)))
        targets.append(root)
    for place, name in enumerate(PRICES):
        pull = PULL / max(getattr(start, name), 1e-3)
        rows.append(tuple(pull * (column == place) for column in range(len(PRICES))))
        targets.append(PULL)
    prices = nonnegative_least_squares(rows, targets)
    place = PRICES.index("again")
    if prices[place] > MOST_AGAIN:
        targets = [target - MOST_AGAIN * factors[place] for factors, target in zip(rows, targets, strict=True)]
        rest = nonnegative_least_squares([(*x[:place], *x[place + 1 :]) for x in rows], targets)
        prices = [*rest[:place], MOST_AGAIN, *rest[place:]]
    return RowCost(*prices, resident=cost.resident, memory=cost.memory)


def _factors(counts: Counts, cost: RowCost) -> tuple[float, ...]:
    """What the prices are multiplied with, in their order: exact at ``cost``, its tangent elsewhere."""
    waiting, work = cost.waiting(counts), cost.work(counts)
    both = math.hypot(waiting, work)
    waits, works = (waiting / both, work / both) if both > 0 else (1.0, 1.0)
    once = (float(counts.launches), counts.cold, counts.megabytes, counts.megabytes_again)
    return (
        *once,
        waits * counts.blocks,
        waits * counts.steps,
        works * counts.warp_blocks,
        works * counts.warp_steps,
    )


def nonnegative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """x >= 0 with the least sum of (row . x - target)^2, for a handful of unknowns.

    Every set of unknowns that may be non-zero is tried: with eight that is quick, and needs no numpy.
    """
    width = len(rows[0])
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    right = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) for i in range(width)]
    best, best_loss = [0.0] * width, 0.0
    for size in range(width, 0, -1):
        for free in itertools.combinations(range(width), size):
            part = _solve_square([[gram[i][j] for j in free] for i in free], [right[i] for i in free])
            if part is None or min(part) < 0:
                continue
            if size == width:
                return part  # nothing holds it back, so that nothing is better
            loss = -sum(x * right[i] for i, x in zip(free, part, strict=True))  # the least, but for a constant
            if loss < best_loss:
                best_loss = loss
                best = [0.0] * width
                for i, x in zip(free, part, strict=True):
                    best[i] = x
    return best


def _solve_square(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with the largest pivot first; None for a singular matrix."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) <= 1e-12 * abs(matrix[column][column]):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(size):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def fit_gradients(device: Device, samples: Sequence[Sample], table: Table) -> dict[str, store.Fit]:
    """The costs of rows that compute gradients, by name: what a backward, its blocks and their steps take."""
    found: dict[str, store.Fit] = {}
    # One dtype is timed, and the other's rows cost the same.
    for tile, rows in _by_tile(table.rows).items():
        timed = timings(tile, samples)
        if len(timed) < MIN_SAMPLES:
            continue
        row, tried = rows[0], []
        price = of_gradients.default_cost(row, device)
        for _ in range(ROUNDS):
            weighted, targets = [], []
            for problem, us, weight in timed:
                root = math.sqrt(weight) / us
                blocks, steps = of_gradients.longest(row, problem, device, price)
                weighted.append((root, root * blocks, root * steps))
                targets.append(root * us)
            launch, block, step = nonnegative_least_squares(weighted, targets)
            price = replace(price, launch=launch, block=block, step=step)
            errors = [abs(of_gradients.walks_us(row, p, device, price) / us - 1) for p, us, _ in timed]
            tried.append(store.Fit(price, median(errors), max(errors), len(errors)))
        best = min(tried, key=lambda fit: fit.error)
        found |= {row.name: best for row in rows}
    return found


def _by_tile(rows: Iterable[Row]) -> dict[str, list[Row]]:
    tiles: dict[str, list[Row]] = {}
    for row in rows:
        tiles.setdefault(tile_of(row.name), []).append(row)
    return tiles


def fit(
    machine: Machine, samples: Sequence[Sample], build: Table, gradients: Sequence[Sample] = ()
) -> store.Calibration:
    """The calibration of a machine's GPU from timings of it. ``gradients``: of rows that compute them."""
    device = machine.device
    timed_rows = {name for sample in samples for name in sample.times}
    tiles = _by_tile(row for row in build.rows if row.name in timed_rows)
    first = {tile: of_tiles[0] for tile, of_tiles in tiles.items()}
    fits = _fit_tiles(first, device, samples)
    factors = [in_common(sample, first, device, fits) for sample in samples]
    fits = _fit_tiles(first, device, samples, factors)
    rows = fit_gradients(device, gradients, tables.backward()) if gradients else {}
    ratios: dict[str, list[float]] = {}
    for tile, found in fits.items():
        row = first[tile]
        timed = timings(tile, samples)
        rated_fit = rated(row, device, timed, found.cost)
        rows |= {row.name: rated_fit for row in tiles[tile]}
        start = datasheet.row_cost(row, device)
        ratios.setdefault(store.kind(row), []).extend(
            us / model.predict(row, problem, device, start) for problem, us, _ in timed
        )
    return store.Calibration(
        gpu=machine.gpu,
        sm_count=machine.sm_count,
        package=machine.package,
        source_hash=machine.source_hash,
        date=machine.date,
        rows=rows,
        scale={kind: median(values) for kind, values in ratios.items()},
        origin=f"measured on {machine.gpu}",
    )


def _fit_tiles(
    of_tiles: Mapping[str, Row],
    device: Device,
    samples: Sequence[Sample],
    factors: Sequence[float] | None = None,
) -> dict[str, store.Fit]:
    """The costs of each tile that has enough timings."""
    found = {tile: fit_tile(row, device, timings(tile, samples, factors)) for tile, row in of_tiles.items()}
    return {tile: fit for tile, fit in found.items() if fit is not None}
