"""Which candidates can be compiled and could be worth it, and which to try next.

Each rule is one of the static_asserts in src/forward/*.cuh, a limit of the hardware, or a bound on what must be in
registers at one time. The machine code decides in the end (``tools/resources.py``): these rules only keep compile time
from being spent on what cannot pass.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

KIB = 1024
TMA_BOX_ROWS = 256
FIRST_TMA = FIRST_OVERLAP = 90  # from this architecture on: TMA, and launches of few-query rows that overlap
# Values that are drawn from, in the order in which a mutation walks.
DOMAINS: dict[str, tuple[Any, ...]] = {
    "tile_m": (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512),
    "tile_n": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
    "warps": (2, 4, 6, 8, 12, 16), "kv_warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4), "min_blocks": (1, 2, 3, 4, 6, 8),
    "q_in_registers": (False, True), "ping_pong": (False, True),
}  # fmt: skip
#: What sm_89 and sm_120 have, which every row keeps to, but for a block's shared memory.
SMALLEST_SHARED_KIB, WARPS_PER_SM, REGISTERS_PER_SM, THREADS_PER_BLOCK = 99, 48, 64 * KIB, 1024
RESERVED_SHARED = KIB  # what CUDA takes of the SM's for each block
#: Registers of a thread besides O, S, P and Q: addresses, row sums and references, an operand of K or V.
OTHER_REGISTERS = 16
MAX_REGISTERS = 255
#: Shared memory beside tiles: TilePosition, where each lane reads, WarpConstants; the barrier that Q reports to, and
#: Work; two mbarriers, which a stage of K and one of V have each.
POSITION_BYTES, LANE_BYTES, WARP_BYTES, TMA_WORK_BYTES, PIPELINE_BYTES = 12, 32 * 8, 8, 8 + 28, 2 * 8


@dataclass(frozen=True, order=True)
class Candidate:
    """A kernel but for architecture and dtype: the manifest's columns, which src/config.h describes."""

    head_dim: int
    tile_m: int
    tile_n: int
    warps: int
    kv_warps: int
    stages: int
    min_blocks: int
    q_in_registers: bool
    ping_pong: bool
    copy: str

    @classmethod
    def of(cls, row: Any) -> Candidate:
        """The columns of a ``_C.Row``."""
        return cls(**{field.name: getattr(row, field.name) for field in fields(cls)})

    @property
    def rows_per_warp(self) -> int:
        return self.tile_m * self.kv_warps // self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def key(self) -> str:
        """The columns as a line of the manifest has them: ``64 256 64 8 1 2 1 true true cp_async_16``."""
        return " ".join(str(value).lower() for value in astuple(self))

    @property
    def tag(self) -> str:
        """A short name that is good in a symbol, for builds that hold many candidates."""
        return "t" + hashlib.sha256(self.key.encode()).hexdigest()[:10]

    @property
    def name_columns(self) -> tuple[Any, ...]:
        """Those in a row's name: what two rows of one architecture and dtype must not share."""
        return (self.head_dim, self.tile_m, self.tile_n, self.warps, self.kv_warps, self.copy)

    def overlaps(self, arch: int) -> bool:
        """Whether its launches do: the manifest's last column, dependent_launch."""
        return self.kv_warps > 1 and arch >= FIRST_OVERLAP

    def line(self, arch: int, dtypes: str = "f16;bf16") -> str:
        """Its line of the manifest."""
        return f'fmha_forward("{arch}" "{dtypes}" {self.key}{" true" if self.overlaps(arch) else ""})'


def shared_bytes(c: Candidate) -> int:
    """Dynamic shared memory of a block: SharedLayout, TmaLayout, KeyPartLayout or FewQueryTmaLayout."""
    q, tile = 2 * c.tile_m * c.head_dim, 2 * c.tile_n * c.head_dim
    if c.kv_warps > 1 and c.copy == "tma":
        outputs = 4 * c.kv_warps * c.tile_m * (c.head_dim + 8)
        tiles = q + 2 * c.kv_warps * c.stages * tile
        maxima_and_sums = 8 * c.kv_warps * c.tile_m
        return max(outputs, tiles) + maxima_and_sums + 2 * c.kv_warps * c.stages * PIPELINE_BYTES + 8
    if c.kv_warps > 1:
        return c.kv_warps * c.tile_m * (4 * c.head_dim + 8)
    rest = TMA_WORK_BYTES if c.copy == "tma" else POSITION_BYTES
    held = q + 2 * c.stages * (tile + PIPELINE_BYTES) + rest + 4 * c.tile_m
    return held if c.copy == "tma" else (held + 7) // 8 * 8 + LANE_BYTES + c.warps * WARP_BYTES


def registers(c: Candidate) -> int:
    """Registers that a thread holds at the worst moment of the main loop at least, OTHER_REGISTERS apart."""
    rows, dim = c.rows_per_warp, c.head_dim
    output, scores = rows * dim // 32, rows * c.tile_n // 32
    probabilities = scores // 2
    q = rows * dim // 64 if c.q_in_registers else rows // 16 * 4
    if c.kv_warps == 1:
        return output + scores + probabilities + (q if c.q_in_registers else 0)
    if c.copy == "tma":
        return output + q + scores + probabilities
    kv = c.tile_n * dim // 64  # a tile of K, and one of V: the operands are loaded whole
    if c.stages > 1:
        return output + q + scores + probabilities + 2 * kv
    return output + q + max(kv + scores, scores + probabilities, probabilities + kv)


def fits(c: Candidate, arch: int, shared_kib: int = SMALLEST_SHARED_KIB) -> bool:
    """Whether the kernels can be made of it and its blocks are within limits; ``shared_kib``: of a block."""
    tma = c.copy == "tma"
    if c.head_dim % 32 or c.tile_n % 16 or c.warps % c.kv_warps or c.tile_m % (16 * (c.warps // c.kv_warps)):
        return False
    if tma and arch < FIRST_TMA:
        return False
    if c.kv_warps == 1:
        # One half of the warps brings K and the other V. TileLoader's: a pass of the threads must keep their
        # swizzle pattern; of 8 or 4 chunks of 16 bytes in a row of a panel.
        chunks = 8 if c.head_dim % 64 == 0 else 4
        passes = ((c.tile_m, c.threads // chunks), (c.tile_n, c.threads // 2 // chunks))
        whole = all(step >= 8 and step % 8 == 0 and tile % step == 0 for tile, step in passes)
        can_copy = max(c.tile_m, c.tile_n) <= TMA_BOX_ROWS if tma else c.copy != "ldg_16" and whole
        if c.warps % 2 or not can_copy or (c.ping_pong and c.warps not in (2, 4, 8)):  # turns of pairs
            return False
        if c.ping_pong and tma and c.head_dim >= 96 and c.tile_n < 32:  # which are passed on before the last two n16
            return False
    else:
        ahead = c.stages <= 2 or tma  # loads into registers are at most one block ahead
        if c.copy not in ("ldg_16", "tma") or c.rows_per_warp > 32 or c.ping_pong or not ahead:
            return False
    shared = shared_bytes(c)
    most = REGISTERS_PER_SM // (c.threads * c.min_blocks) // 8 * 8  # they are given out in eights
    return (
        c.threads <= THREADS_PER_BLOCK
        and c.min_blocks * c.warps <= WARPS_PER_SM
        and shared <= shared_kib * KIB
        and c.min_blocks * (shared + RESERVED_SHARED) <= (shared_kib + 1) * KIB
        and registers(c) + OTHER_REGISTERS <= min(MAX_REGISTERS, most)
    )


PARENTS = 8  # the best so many
TRIES = 500  # for each that is asked for: a child that can't be compiled, or is known, is thrown away

Scored = tuple[float, Candidate]
"""A candidate that ran, behind its speed relative to the incumbents (1.05: five percent faster)."""


def propose(allowed: Callable[[Candidate], bool], best: Sequence[Scored], count: int, seed: str) -> list[Candidate]:
    """``count`` candidates that are ``allowed``, or fewer when no more are found: mutations of the best.

    The same arguments propose the same.
    """
    rng = random.Random(seed)
    parents = [candidate for _, candidate in sorted(best, reverse=True)[:PARENTS]]
    chosen: list[Candidate] = []
    for _ in range(TRIES * count):
        child = mutate(parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))], rng)
        if child not in chosen and allowed(child):
            chosen.append(child)
            parents.append(child)  # a step further, behind what has been timed
        if len(chosen) == count:
            break
    return chosen


def mutate(candidate: Candidate, rng: random.Random) -> Candidate:
    """One to three columns changed, or all: a flag turned, a number moved one step, or anywhere."""
    for name in rng.sample(list(DOMAINS), rng.choice((1, 1, 2, 3, len(DOMAINS)))):
        domain, at = DOMAINS[name], DOMAINS[name].index(getattr(candidate, name))
        others = [*domain[:at], *domain[at + 1 :]]
        near = [*domain[max(0, at - 1) : at], *domain[at + 1 : at + 2]]
        candidate = replace(candidate, **{name: rng.choice(near if rng.random() < 0.75 else others)})
    # Loads into registers go with warps that share the keys, cp.async with those that don't, TMA with both.
    by_thread = "ldg_16" if candidate.kv_warps > 1 else "cp_async_16"
    if candidate.copy not in (by_thread, "tma") or rng.random() < 0.2:
        candidate = replace(candidate, copy=rng.choice((by_thread, "tma")))
    return candidate
