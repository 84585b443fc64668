"""Ranged rows: plain rows' tiles, for every range of keys and any smaller head dim, and nothing of scores."""

from __future__ import annotations

from collections.abc import Callable

from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import scored
from cutlass_fmha.dispatch.families.family import Rule, alignment, has_no, head_dims
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table

#: What becomes of a score by itself.
SCORE_MODS = frozenset({"softcap", "alibi", "dropout"})
#: That, what is read for each score, and what only small tiles are for.
UNKNOWN = SCORE_MODS | {"mask", "bias", "block_mask", "splits"}


def without(unknown: frozenset[str]) -> tuple[Callable[[Problem], tuple[str, ...]], Rule]:
    """What a problem has of these features, and the rule that leaves it to scored rows for them."""

    def lacking(problem: Problem) -> tuple[str, ...]:
        return tuple(name for name in problem.features if name in unknown)

    def rule(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
        return f"{has_no(names)}: that takes a scored row" if (names := lacking(problem)) else None

    return lacking, rule


lacking, _features = without(UNKNOWN)


def whole_vectors(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if (problem.head_dim | problem.value_dim) % 8 == 0:
        return None
    return f"takes head dims that are multiples of 8, and the tensors have {head_dims(problem)}"


def page_runs(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if row.copy != "tma" or not {"leftpad", "pages"} <= set(problem.features):
        return None
    return "copies whole runs of a page's rows, which left padding doesn't leave"


FIXED_RULES = scored.FIXED_RULES
CALL_RULES: tuple[Rule, ...] = (_features, whole_vectors, page_runs, alignment)

other_head_dims = scored.other_head_dims
offers = scored.offers
prepare = scored.prepare
