"""Score-mod rows: ranged rows whose scores are capped, get ALiBi's distances, or are dropped."""

from __future__ import annotations

from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import ranged, scored
from cutlass_fmha.dispatch.families.family import Rule, alignment
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table

lacking, _features = ranged.without(ranged.UNKNOWN - ranged.SCORE_MODS)


def _unmodified(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if not ranged.SCORE_MODS.isdisjoint(problem.features):
        return None
    return "is for softcap, ALiBi or dropout: without them, a ranged row is faster"


FIXED_RULES = scored.FIXED_RULES
CALL_RULES: tuple[Rule, ...] = (_features, _unmodified, ranged.whole_vectors, ranged.page_runs, alignment)

other_head_dims = scored.other_head_dims
offers = scored.offers
prepare = scored.prepare
