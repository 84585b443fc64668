"""Which thread blocks a launch of a row has, what each does, and how many of them an SM holds.

A plain row's blocks are tiles of query rows of one head. Where the last of them would leave much of the GPU
idle, several blocks divide the keys of each (``Tail``). A scored row's may also share a tile among the
heads of a key head (``pack``), and divide the keys of a tile among several blocks (``splits``), whose results
a second launch combines.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cutlass_fmha.dispatch.device import KIB, Device
from cutlass_fmha.dispatch.problem import EMPTY_BLOCK, EVEN

if TYPE_CHECKING:
    from cutlass_fmha.dispatch.problem import Problem
    from cutlass_fmha.dispatch.table import Row

REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 256  # 255, and they are given out in steps of 8
REGISTERS_BESIDES_FRAGMENTS = 40  # as ptxas leaves them in the rows for sm_90, give or take ten
REGISTERS_FOR_FEATURES = {"scored": 24, "few_query_scored": 64}
"""How many more the rows of a family have: what masks, lengths and biases are asked with, between steps."""
MAX_GROUPS = 24
"""Query tiles of a causal problem are played through in so many groups of equal ones at most."""
CUT_ROWS = 32
"""Tiles are cut from a sequence in multiples of so many rows."""
WORTH_PACKING = 0.9
"""Heads share tiles where that leaves at most this share of the tiles."""
MAX_SPLITS = 64
MAX_PARTIAL_BYTES = 2**26
"""Of the outputs of all parts, float32."""
ALONE = 1.25
"""How much more than its share of the memory's bandwidth an SM can take where others are idle."""
OF_A_WARP = {(9, 0): 0.33}
"""How much of that share a warp can take, by capability, where memory is fast (H200: 64 blocks of four warps at 1.31 of
it each, of two at 0.73). Elsewhere one warp can take all of it."""
SHORT_BLOCK_STEPS = 0.35
"""What a block costs its SM outside the main loop while others go on, in steps of it."""
ENOUGH_WAVES = 2
"""Launches with so many waves of blocks divide no keys: what their last wave leaves idle is little."""
BLOCK_STEPS, COMBINE_STEPS = 3, 4
"""What a block does outside its main loop and what the second launch takes, in steps of the main loop."""
PACKED_SCORES, PACKED_TIMES = 2**24, 4
"""A mask is packed for so many scores or more, each of its bytes for so many (H200: a seventh of a nanosecond is
saved for a thousand scores, where packing takes 2 us and a nanosecond for 2,400 bytes)."""
WORTH_A_TAIL = 0.99
"""The last tiles are divided where that leaves at most this share of a launch's time."""
TAIL_PARTS = (2, 3, 4, 5, 6, 8, 12, 16)
TAIL_SIZES = 32
"""So many sizes of a tail's first part are tried, from that of the others to nearly all keys."""


class Group(NamedTuple):
    """Blocks that are alike and are launched one after another; ``warp_*`` as a share of the row's warps."""

    blocks: int
    block: float
    steps: float
    warp_block: float
    warp_steps: float


class Tail(NamedTuple):
    """How the keys of the last tiles are divided: a part of ``first`` key tiles, the others of ``rest``."""

    tiles: int
    parts: int
    first: int
    rest: int

    def rows(self, row: Row) -> int:
        """Rows of O that all parts leave, in float32 and with two numbers of softmax state each."""
        return self.tiles * self.parts * row.tile_m


@functools.lru_cache(4096)
def resident_blocks(row: Row, device: Device) -> int:
    """Blocks of a row that one SM holds at a time, by its description; 0 when not even one fits."""
    by_smem = device.smem_per_sm // (row.smem_bytes + KIB)
    if row.family == "wide_scored":  # made for so many
        return min(by_smem, row.min_blocks)
    by_warps = device.warps_per_sm // row.warps
    by_registers = REGISTERS_PER_SM // (32 * row.warps * registers(row))
    return min(by_smem, by_warps, max(row.min_blocks, by_registers))


def registers(row: Row) -> int:
    """Registers that a thread of a row is likely to have: the fragments of its tiles, and some."""
    rows = row.tile_m * row.kv_warps // row.warps
    output, scores = rows * row.head_dim_v / 32, rows * row.tile_n / 32
    fragments = output + scores + scores / 2
    if row.q_in_registers:
        fragments += rows * row.head_dim / 64
    if row.copy == "ldg_16":  # K and V come straight to registers
        fragments += 2 * row.tile_n * row.head_dim / 64
    besides = REGISTERS_BESIDES_FRAGMENTS + REGISTERS_FOR_FEATURES.get(row.family, 0)
    in_steps = 8 * math.ceil((fragments + besides) / 8)
    return min(MAX_REGISTERS_PER_THREAD, in_steps)


class Division(NamedTuple):
    """How the work of a launch is divided beyond its tiles; ``pack``: heads that share a tile."""

    pack: int
    splits: int
    tail: Tail | None


def divide(row: Row, problem: Problem, device: Device) -> Division:
    """What a row makes of a problem. Measured prices have no say in it: calibrating changes no result."""
    if row.takes_features:
        pack = packed_heads(row, problem)
        return Division(pack, _split_keys(row, problem, device, pack), None)
    return Division(1, 1, tail_of(row, problem, device))


def must_pack_mask(problem: Problem, row: Row) -> bool:
    """Whether a masked row has no other way to read a mask."""
    return not (row.reads_mask_bytes and problem.score_runs)


#: With which much of a mask may be read by nobody.
SPARSE = {"window", "lengths", "pages"}


def worth_packing_mask(problem: Problem, row: Row, words: int, batch: int) -> bool:
    """Whether a masked row reads the bits of a mask that a launch packs before it, of ``words`` words of 32, for
    ``batch`` sequences."""
    if must_pack_mask(problem, row):
        return True
    mean_q, mean_k = problem.mean
    scores = batch * problem.num_heads * (mean_q or problem.seqlen_q) * (mean_k or problem.seqlen_k)
    return SPARSE.isdisjoint(problem.features) and scores >= max(PACKED_SCORES, PACKED_TIMES * 32 * words)


def groups(row: Row, problem: Problem, device: Device) -> list[Group]:
    """The blocks of a launch in the order of ``src/core/scheduler.h`` and ``src/features/sequence.h``."""
    return [Group(*kind) for kind in kinds(row, problem, divide(row, problem, device))]


Kind = tuple[int, float, float, float, float]
"""A ``Group``, in a tenth of the time: a choice among rows makes a hundred."""


def kinds(row: Row, problem: Problem, division: Division) -> list[Kind]:
    """The ``groups`` of a problem that is divided so."""
    if problem.mean != EVEN:
        found = [kind for each in problem.documents for kind in kinds(row, each, division)]
        return sorted(found, key=lambda kind: -kind[2])  # long ones come first: src/core/scheduler.h
    pack, splits, tail = division
    tile_m, rows = row.tile_m, problem.seqlen_q * pack
    tiles = -(-rows // tile_m)
    sequences = problem.batch * problem.num_heads // pack * splits
    if tiles == 0 or sequences == 0:
        return []
    if problem.is_ranged:
        walk = _walk(row, problem, pack) if row.takes_features else None
        last = (sequences, *_block(row, problem, tiles - 1, division, walk))
        if tiles == 1:
            return [last]
        # The last tile, launched first, may be the only one that sees a key.
        if walk:
            return [last, *_scored_tiles(tiles - 1, sequences, splits, walk)]
        return [last, *_plain_tiles(row, problem, tiles - 1, sequences)]
    block, steps, share = _all_keys(row, problem, splits)
    live = _live(row, rows - (tiles - 1) * tile_m)
    if tail:
        live = live if tiles == 1 else 1.0
        whole, share = block * live, share * live
        before = tiles * sequences - tail.tiles
        undivided: list[Kind] = [(before, block, steps, whole, share)] if before else []
        return [
            *undivided,
            (tail.tiles, block, tail.first, whole, share * tail.first / steps),
            (tail.tiles * (tail.parts - 1), block, tail.rest, whole, share * tail.rest / steps),
        ]
    if live == 1.0:
        return [(tiles * sequences, block, steps, block, share)]
    last = (sequences, block, steps, block * live, share * live)
    return [last] if tiles == 1 else [((tiles - 1) * sequences, block, steps, block, share), last]


Walk = Callable[[int], int]
"""Steps through all keys that a query tile sees some of, by twice its number: odd ones lie between two."""


def _live(row: Row, rows: int) -> float:
    """The share of a tile's warps that have some of its ``rows``."""
    groups_of_warps = row.warps // row.kv_warps
    return -(-rows // (row.tile_m // groups_of_warps)) / groups_of_warps


def _all_keys(row: Row, problem: Problem, splits: int) -> tuple[float, int, float]:
    """Of whole tiles that see every key: ``block``, ``steps`` and ``warp_steps`` of their ``Group``."""
    keys, kv_warps = problem.seqlen_k, row.kv_warps
    steps = -(-keys // (row.tile_n * kv_warps))
    share: float = -(-keys // row.tile_n) / kv_warps
    if row.takes_features:
        share = steps = -(-steps // splits)  # the last part may be shorter
    return 1.0 if steps else EMPTY_BLOCK, steps, share


def _block(
    row: Row, problem: Problem, tile: int, division: Division, walk: Walk | None
) -> tuple[float, float, float, float]:
    """A ``Group`` of a query tile of a ranged problem, but for its count."""
    begin = tile * row.tile_m
    rows = problem.seqlen_q * division.pack + (_cut_from_first(row, problem, division.pack) if walk and tile else 0)
    end = min(begin + row.tile_m, rows)
    live = _live(row, end - begin)
    if walk:
        part = -(-walk(2 * tile) // division.splits)
        return (1.0, part, live, live * part) if part else (EMPTY_BLOCK, 0, EMPTY_BLOCK * live, 0.0)
    keys = problem.seqlen_k
    diagonal = keys if problem.diagonal is None else problem.diagonal
    seen = max(0, min(keys, end + diagonal))
    # A warp sees what its last row sees; the mean over the warps is that of the middle one.
    rows = row.tile_m * row.kv_warps // row.warps
    middle = max(0, min(keys, min((begin + end + rows) // 2, end) + diagonal))
    warp_steps = live * -(-middle // row.tile_n) / row.kv_warps
    whole = 1.0 if seen else EMPTY_BLOCK
    return whole, -(-seen // (row.tile_n * row.kv_warps)), whole * live, warp_steps


# Whole tiles are played through as MAX_GROUPS - 1 groups of equal ones at most.


def _scored_tiles(tiles: int, sequences: int, splits: int, walk: Walk) -> list[Kind]:
    size = max(1, -(-tiles // (MAX_GROUPS - 1)))
    found: list[Kind] = []
    number, before = 0, -1
    for last in range(tiles - 1, -1, -size):
        first = last - size + 1 if last >= size else 0
        if (part := -(-walk(first + last) // splits)) != before:
            if number:
                found.append(_whole(number, before))
            number, before = 0, part
        number += (last - first + 1) * sequences
    return [*found, _whole(number, before)]


def _whole(number: int, steps: int) -> Kind:
    return (number, 1.0, steps, 1.0, steps) if steps else (number, EMPTY_BLOCK, 0, EMPTY_BLOCK, 0.0)


def _plain_tiles(row: Row, problem: Problem, tiles: int, sequences: int) -> list[Kind]:
    """As ``_block`` has them, with nothing computed twice."""
    tile_m, tile_n, kv_warps, keys = row.tile_m, row.tile_n, row.kv_warps, problem.seqlen_k
    diagonal = keys if problem.diagonal is None else problem.diagonal
    step = tile_n * kv_warps
    above = (tile_m - tile_m * kv_warps // row.warps) // 2  # rows before the last of a middle warp
    size = max(1, -(-tiles // (MAX_GROUPS - 1)))
    found: list[Kind] = []
    number, left = size * sequences, tiles
    while left > 0:
        seen = (2 * left - size + 1) * tile_m // 2 + diagonal
        if left < size:
            number, seen = left * sequences, (left + 1) * tile_m // 2 + diagonal
        left -= size
        if seen <= 0:
            found.append((number, EMPTY_BLOCK, 0, EMPTY_BLOCK, 0.0))
            continue
        middle = seen - above
        if middle > keys:
            middle = seen = keys
        elif seen > keys:
            seen = keys
        elif middle < 0:
            middle = 0
        found.append((number, 1.0, -(-seen // step), 1.0, -(-middle // tile_n) / kv_warps))
    return found


# ---- the last tiles of plain rows --------------------------------------------------------------------------


def tail_of(row: Row, problem: Problem, device: Device) -> Tail | None:
    """How the last tiles are divided; None where they aren't.

    Rows that copy by TMA can, whose blocks have an SM for themselves, without a mask. As for ``split_keys``,
    measured prices have no say in it.
    """
    if problem.is_ranged or problem.batch_invariant or not divides_tail(row, device):
        return None
    tiles = -(-problem.seqlen_q // row.tile_m) * problem.batch * problem.num_heads
    part_bytes = 4 * row.tile_m * row.head_dim
    return _tail(tiles, -(-problem.seqlen_k // row.tile_n), device.sm_count, MAX_PARTIAL_BYTES // part_bytes)


def divides_tail(row: Row, device: Device) -> bool:
    return row.family == "plain" and row.copy == "tma" and resident_blocks(row, device) == 1


@functools.lru_cache(4096)
def _tail(tiles: int, steps: int, places: int, most: int) -> Tail | None:
    """The division with the shortest way through the launch, in units of a main loop step.

    ``most``: parts of all tiles together at most.
    """
    last = tiles % places
    if last == 0 or steps < 2:
        return None
    best, best_time = None, WORTH_A_TAIL * (tiles // places + 1) * (steps + BLOCK_STEPS)
    before = tiles // places * (steps + BLOCK_STEPS) + COMBINE_STEPS
    for parts in TAIL_PARTS:
        if parts > steps or last * parts > most:
            break
        if before + last * (steps + parts * BLOCK_STEPS) / places >= best_time:
            break  # what these and more parts would take on places that are never idle
        equal = -(-steps // parts)
        for first in range(equal, steps, max(1, steps // TAIL_SIZES)):
            if before + first + BLOCK_STEPS >= best_time:
                break  # what longer ones would take at least
            rest = -(-(steps - first) // (parts - 1))
            if steps - first - (parts - 2) * rest < 1:
                continue
            tail = Tail(last, parts, first, rest)
            time = before + _tail_time(tail, places)
            if time < best_time:
                best, best_time = tail, time
    return best


def _tail_time(tail: Tail, places: int) -> int:
    """Steps from when all places are free until the last part ends; first parts go to places of their own."""
    first, rest = tail.first + BLOCK_STEPS, tail.rest + BLOCK_STEPS
    number, idle = tail.tiles * (tail.parts - 1), places - tail.tiles
    beside = idle * (first // rest)  # other parts that end before the first ones
    if number <= beside:
        return first
    left = number - beside  # idle places go on in their rhythm, the others begin with the first parts' end
    begun = first // rest * rest
    rounds = (left - 1) // places
    left -= rounds * places
    return (begun if left <= idle else first) + (rounds + 1) * rest


# ---- scored rows -------------------------------------------------------------------------------------------


def packed_heads(row: Row, problem: Problem) -> int:
    """How many heads share a tile: all that share a key head, where that leaves fewer tiles; else 1.

    A block mask speaks of the queries of one head, so that its tiles do, too.
    """
    if not row.takes_features or row.family == "masked" or problem.block_mask is not None or problem.num_heads_kv == 0:
        return 1
    group = problem.num_heads // problem.num_heads_kv
    packed = -(-problem.seqlen_q * group // row.tile_m)
    apart = -(-problem.seqlen_q // row.tile_m) * group
    return group if packed <= WORTH_PACKING * apart else 1


def split_keys(row: Row, problem: Problem, device: Device) -> int:
    """Into how many parts a launch divides the keys of each tile: 1 for plain rows.

    As many as the caller says, or those with the shortest way through the launch: waves of blocks times the
    steps of one, in units of a main loop step.
    """
    return divide(row, problem, device).splits


def _split_keys(row: Row, problem: Problem, device: Device, pack: int) -> int:
    if not row.scored:  # ranged rows have no parts
        return 1
    if problem.num_splits is not None:
        return problem.num_splits
    tiles = -(-problem.seqlen_q * pack // row.tile_m)
    blocks = tiles * problem.batch * problem.num_heads // pack
    places = device.sm_count * max(1, resident_blocks(row, device))
    if blocks == 0 or blocks >= ENOUGH_WAVES * places:
        return 1
    part_bytes = 4 * problem.batch * problem.num_heads * problem.seqlen_q * problem.value_dim
    walk = _walk(row, problem, pack)(2 * (tiles - 1))
    most = min(MAX_SPLITS, walk, MAX_PARTIAL_BYTES // max(1, part_bytes))
    of_block = row.warps * OF_A_WARP.get(device.capability, ALONE)
    return 1 if most < 2 else _splits(walk, blocks, device.sm_count, places, of_block, most)


@functools.lru_cache(4096)
def _splits(walk: int, blocks: int, sm_count: int, places: int, of_block: float, most: int) -> int:
    """Of 1 to ``most`` parts of a walk the number with the shortest way through a launch of so many walks."""
    best, best_steps, splits = 1, math.inf, 1
    while splits <= most:
        launched = blocks * splits
        own = SHORT_BLOCK_STEPS * launched / sm_count
        if blocks * walk / sm_count + BLOCK_STEPS + own + COMBINE_STEPS > best_steps:
            break  # what this many take at least, and more of them
        part = -(-walk // splits)
        # What waits for memory loses little where SMs have unequal numbers of blocks, if none is left alone.
        of_one = -(-launched // sm_count)
        all_steps = blocks * walk if of_one > 1 else launched * part  # of blocks with an SM each, all await the longest
        longest = max(all_steps / sm_count, of_one * part / min(ALONE, of_one * of_block))
        # By places that the last wave leaves idle: the memory serves the others hardly faster.
        idle = -launched % places / places if launched > places else 0
        tail = part * idle / 2
        steps = longest + BLOCK_STEPS + tail + own + (COMBINE_STEPS if splits > 1 else 0)
        if steps < best_steps:
            best, best_steps = splits, steps
        if part == 1:
            break
        splits = -(-walk // (part - 1))  # the next whose parts are shorter: others only take more
    return best


def _cut_from_first(row: Row, problem: Problem, pack: int) -> int:
    """``cut_first`` of ``src/features/sequence.h``: rows that a sequence's first tile lacks."""
    if row.scored or pack > 1 or (problem.causal == "none" and problem.window[1] < 0):
        return 0
    return -problem.seqlen_q % row.tile_m // CUT_ROWS * CUT_ROWS


def _walk(row: Row, problem: Problem, pack: int) -> Walk:
    tile_m, step, queries = row.tile_m, row.tile_n * row.kv_warps, problem.seqlen_q
    cut = _cut_from_first(row, problem, pack)
    left, end, keys = problem.lines

    def walk(twice: int) -> int:
        last = -(-(twice + 2) * tile_m // (2 * pack)) - cut
        stop = (queries if last > queries else last) + end
        if stop > keys:
            stop = keys
        if (begin := twice * tile_m // (2 * pack) - cut + left) < 0:
            begin = 0
        return -(-stop // step) - begin // step if begin < stop else 0

    return walk
