"""Scored rows, for every mask, score and shape up to their head dims, and those of them for few queries."""

from __future__ import annotations

from cutlass_fmha.cost import Priced
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch.describe import Call
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families.family import (
    Offers,
    Prepared,
    Rule,
    alignment,
    dtype,
    head_dims,
    made_for_device,
    shared_memory,
    whole_blocks,
)
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table
from cutlass_fmha.launch.params import prepare_attention

UNTIMED = 1.25
"""A scored row that nobody timed is taken before a plain one where it should be faster by this factor."""


def _head_dim(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if problem.head_dim <= row.head_dim and problem.value_dim <= row.head_dim_v:
        return None
    most = str(row.head_dim)
    if row.head_dim_v != row.head_dim:
        most += f", {row.head_dim_v} of value"
    return f"made for head dims up to {most}, and the tensors have {head_dims(problem)}"


def _block_mask(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    return whole_blocks(problem, row.tile_m, row.tile_n * row.kv_warps)


FIXED_RULES: tuple[Rule, ...] = (made_for_device, dtype, _head_dim, shared_memory)
CALL_RULES: tuple[Rule, ...] = (_block_mask, alignment)


def lacking(problem: Problem) -> tuple[str, ...]:
    return ()


def other_head_dims(row: Row, problem: Problem) -> str | None:
    fits = problem.head_dim <= row.head_dim and problem.value_dim <= row.head_dim_v
    return None if fits else f"up to {row.head_dim}"


def offers(row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
    cost = known.cost(row, device)
    untimed = problem.is_plain and row.name not in known.rows
    return Priced(row, device, cost.scaled(UNTIMED) if untimed else cost)


def prepare(row: Row, call: Call, device: Device) -> Prepared:
    return Prepared(*prepare_attention(row, call, device))
