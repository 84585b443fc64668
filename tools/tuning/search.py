"""Which candidates to try next: at random, or by mutation and crossover of the best so far. Seeded.

A proposal depends on the seed, the round's number and what is known of the candidates by then, and on nothing
else: the same leaderboard makes the same proposals.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from .candidate import COLUMNS, Candidate
from .space import DOMAINS, Space
from .targets import Target

STRATEGIES = ("evolve", "random")
#: Of what an evolutionary round proposes: new blood, and children of two parents; the rest are mutations of
#: one.
RANDOM_SHARE, CROSSOVER_SHARE = 0.25, 0.25
PARENTS = 8  # the best so many have children,
CLOSE = 0.75  # of those that are at most that much slower than the best one
SMS = 100  # of a GPU, roughly: whether tiles of 128 rows fill one
TRIES = 200  # a child that can't be compiled, or is known, is thrown away


@dataclass(frozen=True)
class Scored:
    """A candidate that ran, and its speed relative to the incumbent (1.05: five percent faster)."""

    candidate: Candidate
    gain: float


def propose(
    space: Space, known: Collection[str], best: Sequence[Scored], count: int, strategy: str, seed: str
) -> list[Candidate]:
    """``count`` candidates of the space whose keys are not in ``known``; fewer when no more are left.

    best: what may become a parent. seed: also says which round this is.
    """
    rng = random.Random(seed)
    left = [candidate for candidate in space.all if candidate.key not in known]
    rng.shuffle(left)
    parents = sorted(best, key=lambda scored: (-scored.gain, scored.candidate))[:PARENTS]
    parents = [scored for scored in parents if scored.gain >= CLOSE * parents[0].gain]
    members = {candidate.key for candidate in left}
    chosen: dict[str, Candidate] = {}
    if strategy == "evolve" and parents:
        for _ in range(count - round(count * RANDOM_SHARE)):
            child = _child(parents, members - chosen.keys(), rng)
            if child is not None:
                chosen[child.key] = child
    for candidate in left:
        if len(chosen) >= count:
            break
        chosen.setdefault(candidate.key, candidate)
    return list(chosen.values())


def prior(candidate: Candidate, target: Target) -> float:
    """A guess at a row's standing before there are times: are its tiles for many query rows, or for few?"""
    blocks = max(case.batch * case.num_heads * -(-case.seqlen_q // 128) for case in target.cases)
    return 1.0 if (candidate.kv_warps > 1) == (blocks < SMS) else 0.5


def _child(parents: Sequence[Scored], allowed: Collection[str], rng: random.Random) -> Candidate | None:
    """A new candidate near the best ones; None when none was found in ``TRIES`` attempts."""
    crossover = rng.random() < CROSSOVER_SHARE / (1 - RANDOM_SHARE)
    for _ in range(TRIES):
        first = _tournament(parents, rng)
        child = cross(first, _tournament(parents, rng), rng) if crossover else first
        if not crossover or child == first:
            child = mutate(child, rng)
        for dependent_launch in (False, True):  # the architecture decides
            child = replace(child, dependent_launch=dependent_launch)
            if child.key in allowed:
                return child
    return None


def _tournament(parents: Sequence[Scored], rng: random.Random) -> Candidate:
    """The better of two: parents are in order, the best first."""
    return parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))].candidate


def mutate(candidate: Candidate, rng: random.Random) -> Candidate:
    """One to three columns changed: a flag turned, a number moved one step along its domain, or anywhere."""
    for name in rng.sample(list(DOMAINS), rng.choice((1, 1, 2, 3))):
        domain = DOMAINS[name]
        value = getattr(candidate, name)
        others = [other for other in domain if other != value]
        at = domain.index(value) if value in domain else -9
        near = [*domain[max(0, at - 1) : max(0, at)], *domain[max(0, at + 1) : max(0, at + 2)]]
        choices = near if near and rng.random() < 0.75 else others
        candidate = replace(candidate, **{name: rng.choice(choices)})
    # Loads into registers go with warps that share the keys, cp.async with those that don't, TMA with both.
    by_thread = "ldg_16" if candidate.kv_warps > 1 else "cp_async_16"
    if candidate.copy not in (by_thread, "tma") or rng.random() < 0.2:
        candidate = replace(candidate, copy=rng.choice((by_thread, "tma")))
    return candidate


def cross(first: Candidate, second: Candidate, rng: random.Random) -> Candidate:
    """Each column of one of two parents."""
    return Candidate(**{name: getattr(rng.choice((first, second)), name) for name in COLUMNS})
