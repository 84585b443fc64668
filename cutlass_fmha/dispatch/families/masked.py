"""Masked rows: ranged rows that hide keys by a mask, or add a bias of 16 bits."""

from __future__ import annotations

from typing import NamedTuple

from cutlass_fmha.cost.model import RowCost
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch.blocks import must_pack_mask
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import ranged, scored
from cutlass_fmha.dispatch.families.family import Offers, Rule, alignment
from cutlass_fmha.dispatch.problem import SCORE_RUN, Problem
from cutlass_fmha.dispatch.table import Row, Table

MASKS = frozenset({"mask", "bias"})
PACKING_US = 2.0
"""A launch that packs a mask, without its bytes: of one that all heads and batch entries share."""

lacking, _features = ranged.without(ranged.UNKNOWN - MASKS)


def _one_of_both(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if not set(problem.features) >= MASKS:
        return None
    return "takes a mask or a bias, not both: that takes a scored row"


def _score_runs(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if problem.score_runs or (problem.packable_mask and row.reads_mask_bits):
        return None
    read = "a mask" if "mask" in problem.features else "a bias of q's dtype"
    return (
        f"reads {read} by {SCORE_RUN} keys: seqlen_k, the address and all strides must be multiples of that, and "
        "neighbouring keys neighbours"
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


class _AfterPacking(NamedTuple):
    """Those of a row whose mask must be packed before."""

    offers: Offers
    cost: RowCost

    def _packing(self, problem: Problem) -> float:
        return PACKING_US + self.cost.memory * problem.seqlen_q * problem.seqlen_k / 1e6

    def at_least(self, problem: Problem) -> float:
        return self.offers.at_least(problem) + self._packing(problem)

    def us(self, problem: Problem) -> float:
        return self.offers.us(problem) + self._packing(problem)


def offers(row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
    found = scored.offers(row, problem, device, known)
    packs = "mask" in problem.features and must_pack_mask(problem, row)
    return _AfterPacking(found, known.cost(row, device)) if packs else found


prepare = scored.prepare
