"""Plain rows, and those for few queries whose warps divide the keys: they know no more than a diagonal."""

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
    has_no,
    head_dims,
    made_for_device,
    shared_memory,
)
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table
from cutlass_fmha.launch.params import prepare_attention


def _head_dim(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if row.head_dim == problem.head_dim == problem.value_dim:
        return None
    return f"made for head_dim {row.head_dim}, and the tensors have {head_dims(problem)}"


def _features(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    return f"{has_no(problem.features)}: that takes a scored row" if problem.features else None


FIXED_RULES: tuple[Rule, ...] = (made_for_device, dtype, _head_dim, shared_memory)
CALL_RULES: tuple[Rule, ...] = (_features, alignment)


def lacking(problem: Problem) -> tuple[str, ...]:
    return problem.features


def other_head_dims(row: Row, problem: Problem) -> str | None:
    return None if row.head_dim == problem.head_dim == problem.value_dim else str(row.head_dim)


def offers(row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
    return Priced(row, device, known.cost(row, device))


def prepare(row: Row, call: Call, device: Device) -> Prepared:
    return Prepared(*prepare_attention(row, call, device))
