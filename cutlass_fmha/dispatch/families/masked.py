"""Masked rows: ranged rows that hide keys by a mask, or add a bias of 16 bits."""

from __future__ import annotations

from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import ranged, scored
from cutlass_fmha.dispatch.families.family import Rule, alignment
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table

MASKS = frozenset({"mask", "bias"})

lacking, _features = ranged.without(ranged.UNKNOWN - MASKS)


def _unmasked(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if not MASKS.isdisjoint(problem.features):
        return None
    return "is for masks and biases: without them, a ranged row is faster"


FIXED_RULES = scored.FIXED_RULES
CALL_RULES: tuple[Rule, ...] = (_features, _unmasked, ranged.whole_vectors, ranged.page_runs, alignment)

other_head_dims = scored.other_head_dims
offers = scored.offers
prepare = scored.prepare
