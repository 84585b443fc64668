"""Masked rows: ranged rows that hide keys by a mask, or add a bias of 16 bits."""

from __future__ import annotations

from cutlass_fmha.cost import Priced
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import ranged, scored
from cutlass_fmha.dispatch.families.family import Offers, Rule, alignment
from cutlass_fmha.dispatch.problem import SCORE_RUN, Problem
from cutlass_fmha.dispatch.table import Row, Table

MASKS = frozenset({"mask", "bias"})

MASK_FACTORS = {(128, False): 0.86}
"""By head dim, and whether warps take turns: what a mask takes, beside rows of which it takes as much as a bias.

Of one H200 (S4096): by two blocks of four warps a mask of D128 takes 0.94 of the time of a block with turns, a
bias of its own for each head 1.09. That of D64 takes longer by two blocks, with either."""

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


def offers(row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
    factor = MASK_FACTORS.get((row.head_dim, row.ping_pong), 1.0) if "mask" in problem.features else 1.0
    return Priced(row, device, known.cost(row, device).scaled(factor))


prepare = scored.prepare
