"""Which row computes the gradients of a call."""

from __future__ import annotations

from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import wide
from cutlass_fmha.dispatch.families.family import (
    Rule,
    alignment,
    dtype,
    has_no,
    head_dims,
    made_for_device,
    shared_memory,
)
from cutlass_fmha.dispatch.problem import FEATURES, Problem
from cutlass_fmha.dispatch.table import Row, Table
from cutlass_fmha.errors import UnsupportedError

#: What a call may say beyond a causal mask and be differentiable by every row: which keys a query sees, and
#: sinks, which the LSE knows; and by rows that know scores. Names of FEATURES.
KNOWN = frozenset({"window", "prefix", "varlen", "lengths", "leftpad", "sinks"})
SCORED = KNOWN | {"mask", "bias", "softcap", "alibi", "dropout"}
#: By rows for float32 and head dims above 256: what their forward knows.
WIDE = wide.KNOWN & SCORED


def lacking(problem: Problem, known: frozenset[str] = SCORED) -> tuple[str, ...]:
    return tuple(name for name in problem.features if name not in known)


def _features(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    known = WIDE if row.family == "backward_wide" else SCORED if row.scored else KNOWN
    return has_no(names) if (names := lacking(problem, known)) else None


def _left_window(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    return wide.left_window(row, problem, device, table) if row.family == "backward_wide" else None


def _head_dim(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if max(problem.head_dim, problem.value_dim) <= row.head_dim:
        return None
    return f"made for head dims up to {row.head_dim}, and the tensors have {head_dims(problem)}"


RULES: tuple[Rule, ...] = (
    made_for_device,
    dtype,
    _head_dim,
    _features,
    _left_window,
    shared_memory,
    alignment,
)


def reasons(
    row: Row, problem: Problem, device: Device, table: Table, deterministic: bool = False
) -> list[str]:
    """Why a row can't compute the gradients of a problem; empty when it can."""
    found = [sentence for rule in RULES if (sentence := rule(row, problem, device, table)) is not None]
    return [*found, "sums dQ in no fixed order"] if deterministic and not row.scored else found


def choose(problem: Problem, device: Device, name: str | None = None, deterministic: bool = False) -> Row:
    """The row with the least head dim among those that can, which knows no more than it must; or that named.

    Raises UnsupportedError, and ValueError for a name that no row has.
    """
    table = tables.backward()
    if name is not None:
        row = table.by_name(name)
        if why := reasons(row, problem, device, table, deterministic):
            raise UnsupportedError(f"row {name} can't compute the gradients of {problem}: {'; '.join(why)}")
        return row
    against = [(row, reasons(row, problem, device, table, deterministic)) for row in table.rows]
    if possible := [row for row, sentences in against if not sentences]:
        return min(possible, key=lambda row: (row.head_dim, row.scored, row.index))
    if not table.rows:
        raise UnsupportedError("this build of cutlass_fmha has no kernels that compute gradients")
    nearest = sorted(against, key=lambda entry: len(entry[1]))[:3]
    lines = [f"  {row.name}: {'; '.join(sentences)}" for row, sentences in nearest]
    raise UnsupportedError(
        f"no kernel of this build computes the gradients of {problem}:\n" + "\n".join(lines)
    )


def names_of(features: tuple[str, ...]) -> str:
    return ", ".join(FEATURES[name] for name in features)
