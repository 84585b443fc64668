"""What keeps a row from a problem: a list of reasons, empty when it can run it."""

from __future__ import annotations

from collections.abc import Mapping

from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import masked, plain, ranged, score_mod, scored, wide, wide_scored
from cutlass_fmha.dispatch.families.family import Family
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table

FAMILIES: Mapping[str, Family] = {
    "plain": plain,
    "few_query": plain,
    "ranged": ranged,
    "score_mod": score_mod,
    "masked": masked,
    "scored": scored,
    "few_query_scored": scored,
    "wide": wide,
    "wide_scored": wide_scored,
}


def family(row: Row) -> Family:
    return FAMILIES[row.family]


def lacking(row: Row, problem: Problem) -> tuple[str, ...]:
    """The features of a problem that a row doesn't know."""
    return family(row).lacking(problem)


def reasons(row: Row, problem: Problem, device: Device, table: Table | None = None) -> list[str]:
    """Why a row can't run a problem on a device, one sentence each; empty when it can."""
    table = table or tables.this_build()
    of = family(row)
    sentences = (rule(row, problem, device, table) for rule in (*of.FIXED_RULES, *of.CALL_RULES))
    return [sentence for sentence in sentences if sentence is not None]


def irrelevance(row: Row, problem: Problem, device: Device, table: Table) -> tuple[str, str] | None:
    """What a row is for that has nothing to do with a problem, as ("another dtype", "float16").

    None for a row for this architecture, dtype and head dim: its reasons are worth reading.
    """
    if row.arch != devices.rows_arch(device, table.architectures):
        return "another architecture", f"sm_{row.arch}"
    if row.dtype != problem.dtype:
        return "another dtype", row.dtype
    others = family(row).other_head_dims(row, problem)
    return None if others is None else ("other head dims", others)


def eligible_rows(problem: Problem, device: Device, table: Table) -> list[Row]:
    """The rows that have no reason against them."""
    return [row for row in _made_for(problem, device, table) if not _refused(row, problem, device, table)]


def _refused(row: Row, problem: Problem, device: Device, table: Table) -> bool:
    return any(rule(row, problem, device, table) for rule in family(row).CALL_RULES)


def _made_for(problem: Problem, device: Device, table: Table) -> tuple[Row, ...]:
    """The rows that nothing keeps from a problem but what else the call says: looked up by what they are made
    for, the device, the dtype and the head dims."""
    arch = devices.rows_arch(device, table.architectures)
    key = (device, arch, problem.dtype, problem.head_dim, problem.head_dim_v)
    if (rows := table.made_for.get(key)) is None:
        rows = tuple(
            row for row in table.rows if not any(rule(row, problem, device, table) for rule in family(row).FIXED_RULES)
        )
        table.made_for[key] = rows
    return rows
