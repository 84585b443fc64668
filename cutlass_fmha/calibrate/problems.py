"""Which problems are timed: drawn at random for the hold-out and the calibration, and a few by design.

Drawn problems are log-uniform in batch, heads and lengths, so that every size counts alike; the laws of the
draw are ``draw``. Those of a calibration come from generators of their own, and a hold-out leaves out every
problem that the calibration has, in either dtype.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cutlass_fmha.bench.cases import visible_pairs
from cutlass_fmha.dispatch.problem import CAUSAL, Problem

BYTES_PER_ELEMENT = 2
MAX_SEQLEN = 16384
MAX_BATCH = 16
MAX_HEADS_KV = 16
GROUPS = (1, 1, 1, 2, 4, 8)
"""Query heads per key head, drawn with these weights."""
DECODE_SHARE = 0.15
SELF_SHARE = 0.5
DECODE_QUERIES = 16
SHORTEST_SELF = 16
DRAWN = 88
"""Random problems of a calibration, for each head dim."""


@dataclass(frozen=True)
class Limits:
    """What a problem may cost, so that a run over hundreds of them stays short on any GPU."""

    max_flop: float
    max_bytes: float

    @classmethod
    def of_device(cls, sm_count: int, memory_bytes: int) -> Limits:
        """9 GFLOP per SM (3 ms on an H200, 5 ms on an L4), and inputs of 256 MiB or a 64th of the memory."""
        return cls(9e9 * sm_count, min(2**28, memory_bytes / 64))

    def allow(self, problem: Problem, passes: float = 1.0) -> bool:
        """``passes``: how often its operations are done, as gradients do."""
        return passes * flop(problem) <= self.max_flop and input_bytes(problem) <= self.max_bytes


def flop(problem: Problem) -> float:
    """Floating-point operations of Q K^T and P V over the visible pairs."""
    pairs = visible_pairs(problem.seqlen_q, problem.seqlen_k, problem.diagonal)
    return 4.0 * problem.batch * problem.num_heads * pairs * problem.head_dim


def input_bytes(problem: Problem) -> int:
    """Bytes of Q, K and V."""
    rows = problem.seqlen_q * problem.num_heads + 2 * problem.seqlen_k * problem.num_heads_kv
    return problem.batch * rows * problem.head_dim * BYTES_PER_ELEMENT


def log_uniform(generator: random.Random, least: int, most: int) -> int:
    """An int from ``least`` to ``most``; each doubling is as likely as the next."""
    return min(most, int(least * math.exp(generator.uniform(0, math.log((most + 1) / least)))))


def draw(generator: random.Random, head_dim: int, dtype: str, limits: Limits) -> Problem:
    """One random problem within the limits.

    batch 1 to 16, num_heads_kv 1 to 16, lengths 1 to 16384, all log-uniform; 1, 2, 4 or 8 query heads per
    key head (half of the problems: 1). 15 % are decoding (at most 16 queries), half are self-attention
    (equal lengths, from 16), the others have two independent lengths. Half of all lengths above 64 are
    multiples of 64. The three causal modes are equally likely.
    """
    while True:
        heads_kv = log_uniform(generator, 1, MAX_HEADS_KV)
        heads = heads_kv * generator.choice(GROUPS)
        batch = log_uniform(generator, 1, MAX_BATCH)
        kind = generator.random()
        if kind < DECODE_SHARE:
            seqlen_q, seqlen_k = log_uniform(generator, 1, DECODE_QUERIES), _length(generator)
        elif kind < DECODE_SHARE + SELF_SHARE:
            seqlen_q = seqlen_k = _length(generator, SHORTEST_SELF)
        else:
            seqlen_q, seqlen_k = _length(generator), _length(generator)
        causal = generator.choice(CAUSAL)
        problem = Problem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, dtype, causal)
        if limits.allow(problem):
            return problem


def _length(generator: random.Random, least: int = 1) -> int:
    length = log_uniform(generator, least, MAX_SEQLEN)
    return -(-length // 64) * 64 if length > 64 and generator.random() < 0.5 else length


def draws(
    count: int, seed: str, kinds: Sequence[tuple[int, str]], limits: Limits, without: Iterable[Problem] = ()
) -> list[Problem]:
    """``count`` different problems, evenly over ``kinds``, the (head_dim, dtype) pairs; none of ``without``.

    Repeatable: the same seed, kinds and limits give the same problems.
    """
    generator = random.Random(seed)
    seen = {shape(problem) for problem in without}
    found: list[Problem] = []
    while len(found) < count:
        head_dim, dtype = kinds[len(found) % len(kinds)]
        problem = draw(generator, head_dim, dtype, limits)
        if shape(problem) not in seen:
            seen.add(shape(problem))
            found.append(problem)
    return found


def shape(problem: Problem) -> Problem:
    """What problems share that differ in dtype only. A mask that hides nothing is none."""
    dropped = problem.diagonal is None
    return replace(problem, dtype="", causal="none" if dropped else problem.causal)


# (batch, heads of 132, heads per key head, seqlen_q, seqlen_k, causal): where rows cross, at every size.
_DESIGNED = (
    (1, 8, 1, 256, 256, "none"),
    (1, 8, 1, 512, 512, "bottom-right"),
    (1, 8, 1, 1024, 1024, "none"),
    (1, 8, 1, 2048, 2048, "bottom-right"),
    (1, 16, 1, 64, 4096, "none"),
    (1, 16, 2, 2048, 2048, "none"),
    (2, 16, 1, 1024, 1024, "bottom-right"),
    (4, 32, 1, 128, 128, "none"),
    (4, 33, 1, 512, 512, "none"),
    (2, 33, 1, 2048, 2048, "none"),
    (2, 33, 1, 2048, 2048, "bottom-right"),
    (1, 16, 1, 8192, 8192, "bottom-right"),
    (2, 16, 1, 8192, 8192, "bottom-right"),
    (4, 16, 1, 4096, 4096, "bottom-right"),
    (8, 16, 1, 2048, 2048, "bottom-right"),
    (4, 16, 1, 4096, 4096, "none"),
    (32, 16, 1, 512, 512, "none"),
    (8, 32, 4, 1, 4096, "none"),
    (4, 8, 1, 16, 2048, "none"),
    # Decoding, which few drawn problems are: scored rows are timed on these alone.
    (1, 2, 1, 1, 2048, "none"),
    (1, 8, 8, 1, 16384, "none"),
    (1, 4, 1, 2, 12288, "none"),
    (16, 16, 2, 1, 1024, "none"),
    (4, 16, 1, 1, 3072, "none"),
    (4, 32, 4, 1, 6144, "none"),
    (16, 8, 1, 4, 1536, "none"),
    (8, 64, 8, 2, 2048, "none"),
    (3, 8, 2, 12, 640, "bottom-right"),
    (1, 32, 8, 4, 8192, "bottom-right"),
    (2, 12, 1, 32, 8192, "none"),
    # The memory is all that it waits for, and a last wave of blocks.
    (16, 32, 1, 1, 896, "none"),
)


def designed(head_dim: int, dtypes: Sequence[str], sm_count: int) -> list[Problem]:
    """A calibration's fixed problems: heads grow with the GPU, so that waves fill alike on all of them."""
    problems = []
    for number, (batch, heads, group, seqlen_q, seqlen_k, causal) in enumerate(_DESIGNED):
        heads_kv = max(1, round(heads * sm_count / 132 / group))
        sizes = (batch, seqlen_q, seqlen_k, heads_kv * group, heads_kv)
        problems.append(Problem(*sizes, head_dim, dtypes[number % len(dtypes)], causal))
    return problems


def calibration(
    kinds: Sequence[tuple[int, str]], sm_count: int, limits: Limits, drawn: int | None = None
) -> list[Problem]:
    """The problems of a calibration: for each head dim, the designed ones and ``drawn`` random ones.

    They are spread over the dtypes, which cost the same (``fit.py``).
    """
    problems: list[Problem] = []
    for head_dim in sorted({head_dim for head_dim, _ in kinds}):
        own = [kind for kind in kinds if kind[0] == head_dim]
        fixed = [
            problem for problem in designed(head_dim, [dtype for _, dtype in own], sm_count) if limits.allow(problem)
        ]
        count = DRAWN if drawn is None else drawn
        problems += fixed + draws(count, f"calibration {head_dim}", own, limits, fixed)
    return problems


def holdout(
    count: int, seed: int, kinds: Sequence[tuple[int, str]], limits: Limits, without: Iterable[Problem]
) -> list[Problem]:
    """``count`` random problems, none of which is one of a calibration's (``without``), in either dtype."""
    return draws(count, f"holdout {seed}", kinds, limits, without)
