"""Masked rows: ranged rows that hide keys by a mask, or add a bias of 16 bits."""

from __future__ import annotations

from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import ranged, scored
from cutlass_fmha.dispatch.families.family import Rule, alignment
from cutlass_fmha.dispatch.problem import SCORE_RUN, Problem
from cutlass_fmha.dispatch.table import Row, Table

MASKS = frozenset({"mask", "bias"})

lacking, _features = ranged.without(ranged.UNKNOWN - MASKS)


def _one_of_both(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if not set(problem.features) >= MASKS:
        return None
    return "takes a mask or a bias, not both: that takes a scored row"


def _score_runs(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if problem.score_runs:
        return None
    return (
        f"reads a mask, or a bias of q's dtype, by {SCORE_RUN} keys: seqlen_k, the address and all strides "
        "must be multiples of that, and neighbouring keys neighbours"
    )


def _unmasked(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if not MASKS.isdisjoint(problem.features):
        return None
    return "is for masks and biases: without them, a ranged row is faster"


FIXED_RULES = scored.FIXED_RULES
CALL_RULES: tuple[Rule, ...] = (
    _features,
    _unmasked,
    _one_of_both,
    _score_runs,
    ranged.whole_vectors,
    ranged.page_runs,
    alignment,
)

other_head_dims = scored.other_head_dims
offers = scored.offers
prepare = scored.prepare
