"""Which thread blocks a launch of a row has, what each does, and how many of them an SM holds.

A plain row's blocks are tiles of query rows of one head. Where the last of them would leave much of the GPU
idle, several blocks divide the keys of each (``Tail``). A scored row's may also share a tile among the
heads of a key head (``pack``), and divide the keys of a tile among several blocks (``splits``), whose results
a second launch combines.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from cutlass_fmha.device import KIB, Device

if TYPE_CHECKING:
    from cutlass_fmha._C import Template
    from cutlass_fmha.select import Problem

REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 256  # 255, and they are given out in steps of 8
REGISTERS_BESIDES_FRAGMENTS = 40  # as ptxas leaves them in the rows for sm_90, give or take ten
EMPTY_BLOCK = 0.6
"""A block whose queries see no key only writes zeros: that much of ``block`` and ``warp_block``."""
MAX_GROUPS = 24
"""Query tiles of a causal problem are played through in so many groups of equal ones at most."""
WORTH_PACKING = 0.9
"""Heads share tiles where that leaves at most this share of the tiles."""
MAX_SPLITS = 32
MAX_PARTIAL_BYTES = 2**26
"""Of the outputs of all parts, float32."""
ALONE = 1.25
"""How much more than its share of the memory's bandwidth an SM can take where others are idle."""
SHORT_BLOCK_STEPS = 0.35
"""What a block costs its SM outside the main loop while others go on, in steps of it."""
ENOUGH_WAVES = 2
"""Launches with so many waves of blocks divide no keys: what their last wave leaves idle is little."""
BLOCK_STEPS, COMBINE_STEPS = 3, 4
"""What a block does outside its main loop and what the second launch takes, in steps of the main loop."""
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

    def rows(self, template: Template) -> int:
        """Rows of O that all parts leave, in float32 and with two numbers of softmax state each."""
        return self.tiles * self.parts * template.tile_m


def resident_blocks(template: Template, device: Device) -> int:
    """Blocks of a row that one SM holds at a time, by its description; 0 when not even one fits."""
    by_smem = device.smem_per_sm // (template.smem_bytes + KIB)
    by_warps = device.warps_per_sm // template.warps
    by_registers = REGISTERS_PER_SM // (32 * template.warps * registers(template))
    return min(by_smem, by_warps, max(template.min_blocks, by_registers))


def registers(template: Template) -> int:
    """Registers that a thread of a row is likely to have: the fragments of its tiles, and some."""
    rows = template.tile_m * template.kv_warps // template.warps
    output, scores = rows * template.head_dim_v / 32, rows * template.tile_n / 32
    fragments = output + scores + scores / 2
    if template.q_in_registers:
        fragments += rows * template.head_dim / 64
    if template.copy == "ldg_16":  # K and V come straight to registers
        fragments += 2 * template.tile_n * template.head_dim / 64
    in_steps = 8 * math.ceil((fragments + REGISTERS_BESIDES_FRAGMENTS) / 8)
    return min(MAX_REGISTERS_PER_THREAD, in_steps)


def groups(template: Template, problem: Problem, device: Device) -> list[Group]:
    """The blocks of a launch in the order of ``src/core/scheduler.h`` and ``src/features/sequence.h``."""
    pack = packed_heads(template, problem)
    tiles = -(-problem.seqlen_q * pack // template.tile_m)
    sequences = problem.batch * problem.num_heads // pack
    if tiles == 0 or sequences == 0:
        return []
    splits = split_keys(template, problem, device)
    sequences *= splits
    if tail := tail_of(template, problem, device):
        block, steps, warp_block, warp_steps = _block(template, problem, 0, pack, splits)
        whole = Group(tiles * sequences - tail.tiles, block, steps, warp_block, warp_steps)
        first = Group(tail.tiles, block, tail.first, warp_block, warp_steps * tail.first / steps)
        number = tail.tiles * (tail.parts - 1)
        return [whole, first, Group(number, block, tail.rest, warp_block, warp_steps * tail.rest / steps)]
    if not problem.is_ranged:
        full = problem.seqlen_q * pack // template.tile_m
        found = [Group(full * sequences, *_block(template, problem, 0, pack, splits))] if full else []
        if full < tiles:
            found.append(Group(sequences, *_block(template, problem, tiles - 1, pack, splits)))
        return found
    # The last tile, launched first, may be the only one that sees a key.
    size = max(1, -(-(tiles - 1) // (MAX_GROUPS - 1)))
    spans = [(max(0, last - size + 1), last) for last in range(tiles - 2, -1, -size)]
    return [
        Group((last - first + 1) * sequences, *_block(template, problem, (first + last) / 2, pack, splits))
        for first, last in [(tiles - 1, tiles - 1), *spans]
    ]


def _block(
    template: Template, problem: Problem, tile: float, pack: int, splits: int
) -> tuple[float, float, float, float]:
    """A ``Group`` but for its count, of the query tile ``tile``: half a number stands for two neighbours."""
    begin = tile * template.tile_m
    end = min(begin + template.tile_m, problem.seqlen_q * pack)
    groups_of_warps = template.warps // template.kv_warps
    rows = template.tile_m // groups_of_warps
    live = math.ceil((end - begin) / rows) / groups_of_warps
    if template.scored:
        part = -(-_walk(template, problem, tile, pack) // splits)  # the last part may be shorter
        whole = 1.0 if part else EMPTY_BLOCK
        return whole, part, whole * live, live * part
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


# ---- the last tiles of plain rows --------------------------------------------------------------------------


def tail_of(template: Template, problem: Problem, device: Device) -> Tail | None:
    """How the last tiles are divided; None where they aren't.

    Rows that copy by TMA can, whose blocks have an SM for themselves, without a mask. As for ``split_keys``,
    measured prices have no say in it.
    """
    if template.copy != "tma" or template.kv_warps > 1 or problem.is_ranged:
        return None
    if resident_blocks(template, device) != 1:
        return None
    tiles = -(-problem.seqlen_q // template.tile_m) * problem.batch * problem.num_heads
    part_bytes = 4 * template.tile_m * template.head_dim
    return _tail(
        tiles, -(-problem.seqlen_k // template.tile_n), device.sm_count, MAX_PARTIAL_BYTES // part_bytes
    )


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
        equal = -(-steps // parts)
        for first in range(equal, steps, max(1, steps // TAIL_SIZES)):
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


# ---- scored rows ------------------------------------------------------------------------------------------


def packed_heads(template: Template, problem: Problem) -> int:
    """How many heads share a tile: all that share a key head, where that leaves fewer tiles; else 1.

    A block mask speaks of the queries of one head, so that its tiles do, too.
    """
    if not template.scored or problem.block_mask is not None or problem.num_heads_kv == 0:
        return 1
    group = problem.num_heads // problem.num_heads_kv
    packed = -(-problem.seqlen_q * group // template.tile_m)
    apart = -(-problem.seqlen_q // template.tile_m) * group
    return group if packed <= WORTH_PACKING * apart else 1


def split_keys(template: Template, problem: Problem, device: Device) -> int:
    """Into how many parts a launch divides the keys of each tile: 1 for plain rows.

    As many as the caller says, or those with the shortest way through the launch: waves of blocks times the
    steps of one, in units of a main loop step. Measured prices have no say in it, so that a calibration
    changes no bit of a result.
    """
    if not template.scored:
        return 1
    if problem.num_splits is not None:
        return problem.num_splits
    pack = packed_heads(template, problem)
    tiles = -(-problem.seqlen_q * pack // template.tile_m)
    blocks = tiles * problem.batch * problem.num_heads // pack
    places = device.sm_count * max(1, resident_blocks(template, device))
    part_bytes = 4 * problem.batch * problem.num_heads * problem.seqlen_q * problem.value_dim
    walk = _walk(template, problem, tiles - 1, pack)
    most = min(MAX_SPLITS, walk, MAX_PARTIAL_BYTES // max(1, part_bytes))
    if blocks == 0 or blocks >= ENOUGH_WAVES * places or most < 2:
        return 1
    return _splits(walk, blocks, device.sm_count, places, most)


@functools.lru_cache(4096)
def _splits(walk: int, blocks: int, sm_count: int, places: int, most: int) -> int:
    """Of 1 to ``most`` parts of a walk the number with the shortest way through a launch of so many walks."""

    def steps(splits: int) -> float:
        part = -(-walk // splits)
        total = blocks * splits * part / sm_count
        # What waits for memory loses little where SMs have unequal numbers of blocks, if none is left alone.
        busiest = -(-blocks * splits // sm_count) * part / ALONE
        tail = part / 2 if blocks * splits > places else 0
        own = SHORT_BLOCK_STEPS * blocks * splits / sm_count
        return max(total, busiest) + BLOCK_STEPS + tail + own + (COMBINE_STEPS if splits > 1 else 0)

    return min(range(1, most + 1), key=steps)


def _walk(template: Template, problem: Problem, tile: float, pack: int) -> int:
    """Steps through all keys that a query tile sees some of."""
    first = math.floor(tile * template.tile_m / pack)
    last = min(math.ceil((tile + 1) * template.tile_m / pack), problem.seqlen_q) - 1
    begin, end = problem.visible_keys(first, last)
    keys = template.tile_n * template.kv_warps
    return max(0, -(-end // keys) - begin // keys) if begin < end else 0
