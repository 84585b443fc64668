"""What an ``UnsupportedError`` says: what to change, the nearest rows' reasons, what the others are for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import eligibility
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import FEATURES, FULL_ALIGNMENT, Problem
from cutlass_fmha.dispatch.table import Row, Table

#: What the second line begins with, where a change helps.
WHAT_TO_CHANGE = "what to change: "
#: Lines of rows that have the same reasons.
NEAREST = 4
#: Ways out that are told, and changes that one of them takes.
WAYS_OUT, CHANGES = 4, 3


class Change(NamedTuple):
    """Something that a caller may do, and the problem that is left then."""

    what: str
    problem: Problem


#: Changes of one kind that may help with a problem, the least first.
Kind = Callable[[Problem, Sequence[Row]], Iterator[Change]]


def message(problem: Problem, device: Device, table: Table) -> str:
    """Why no row of a build runs a problem on a device: at most 15 lines, the first of them a sentence."""
    why = {row.name: eligibility.reasons(row, problem, device, table) for row in table.rows}
    arch = devices.rows_arch(device, table.architectures)
    own = [row for row in table.rows if row.arch == arch and row.dtype == problem.dtype]
    near = own or table.rows
    lines = [f"no row of this build can run this problem ({problem}) on {device}:"]
    if found := ways_out(problem, device, table):
        lines.append(WHAT_TO_CHANGE + "; or ".join(way_out.what for way_out in found))

    def distance(row: Row) -> tuple[int, int, int]:
        return len(why[row.name]), _gap(row, problem), len(eligibility.lacking(row, problem))

    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(near, key=distance):
        groups.setdefault(tuple(why[row.name]), []).append(row)
    shown = list(groups.items())[:NEAREST]
    lines.append("nearest rows:")
    for reasons, rows in shown:
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        lines.append(f"  {rows[0].name}{more}: {'; '.join(reasons)}")
    lines += _further(near, sum(len(rows) for _, rows in shown), problem, device, table)
    lines.append(
        "every row's reasons: cutlass_fmha.explain, called alike, with all_rows=True; "
        "or `python -m cutlass_fmha explain` with --all"
    )
    return "\n".join(lines)


def _gap(row: Row, problem: Problem) -> int:
    """How far a row's head dim is from one that would do."""
    gap = max(problem.head_dim, problem.value_dim) - row.head_dim
    return max(0, gap) if row.takes_features or row.family == "wide" else abs(gap)


def _further(near: Sequence[Row], shown: int, problem: Problem, device: Device, table: Table) -> Iterator[str]:
    """How many rows are not told of, and why."""
    counts = Counter({"with other reasons, as many or more": len(near) - shown})
    names = {row.name for row in near}
    for row in table.rows:
        if row.name not in names and (irrelevant := eligibility.irrelevance(row, problem, device, table)):
            counts[f"for {irrelevant[0]}"] += 1
    if told := ", ".join(f"{count} {what}" for what, count in counts.items() if count):
        yield f"further rows: {told}"


def summary(irrelevant: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """A line for each of the things that rows are for and a problem isn't, with how many rows there are."""
    for heading in dict.fromkeys(heading for heading, _ in irrelevant):
        values = {value: count for (other, value), count in irrelevant.items() if other == heading}
        told = ", ".join(f"{value} ({count})" for value, count in values.items())
        total = sum(values.values())
        yield f"{total} {'row' if total == 1 else 'rows'} for {heading}: {told}"


# ---- what to change ----------------------------------------------------------------------------------------


def ways_out(problem: Problem, device: Device, table: Table) -> list[Change]:
    """Changes of as few things as possible; after each, some row runs the problem. Empty if none helps."""
    arch = devices.rows_arch(device, table.architectures)
    rows = [row for row in table.rows if row.arch == arch]

    def runs(changed: Problem) -> bool:
        return bool(eligibility.eligible_rows(changed, device, table))

    kinds: tuple[Kind, ...] = (_features, _window, _blocks, _head_dims, _dtypes, _alignment, _key_span)
    for size in range(1, CHANGES + 1):
        found: list[Change] = []
        for chosen in itertools.combinations(kinds, size):
            working = (steps for steps in _chains(chosen, problem, rows) if runs(steps[-1].problem))
            # The first is the least change of its kind, but for dtypes, which are alike.
            found += (
                Change(" and ".join(step.what for step in steps), steps[-1].problem)
                for steps in itertools.islice(working, None if chosen == (_dtypes,) else 1)
            )
        if found:
            return found[:WAYS_OUT]
    return []


def _chains(kinds: Sequence[Kind], problem: Problem, rows: Sequence[Row]) -> Iterator[tuple[Change, ...]]:
    """One change of each kind, one after the other."""
    for change in kinds[0](problem, rows):
        if len(kinds) == 1:
            yield (change,)
            continue
        for rest in _chains(kinds[1:], change.problem, rows):
            yield (change, *rest)


def _without(problem: Problem, names: Sequence[str]) -> Problem:
    return replace(
        problem,
        features=tuple(name for name in problem.features if name not in names),
        window=(-1, -1) if "window" in names else problem.window,
        block_mask=None if "block_mask" in names else problem.block_mask,
        page_size=0 if "pages" in names else problem.page_size,
        num_splits=None if "splits" in names else problem.num_splits,
    )


def _features(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    """Dropping one, or what some rows lack."""
    sets = {*((name,) for name in problem.features), *(eligibility.lacking(row, problem) for row in rows)} - {()}
    for names in sorted(sets, key=lambda names: (len(names), names)):
        told = [FEATURES[name] for name in names]
        what = " and ".join(filter(None, (", ".join(told[:-1]), told[-1])))
        yield Change(f"drop {what}", _without(problem, names))


def _window(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    left, right = problem.window
    if left >= 0 and right >= 0:
        yield Change("give the window no left limit", replace(problem, window=(-1, right)))
    if left >= 0:
        yield Change("drop the window", _without(problem, ("window",)))


def _blocks(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    if problem.block_mask is None:
        return
    units = {(row.tile_m, row.tile_n * row.kv_warps) for row in rows if row.scored}
    for m, n in sorted(units, reverse=True):  # of the rows for many queries
        what = f"use a block mask of multiples of {m} x {n}"
        yield Change(what, replace(problem, block_mask=(m, n)))


def _head_dims(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    """Those of the rows that are smaller."""
    largest = max(problem.head_dim, problem.value_dim)
    for least in sorted({min(row.head_dim, row.head_dim_v) for row in rows}, reverse=True):
        if least >= largest:
            continue
        smaller = replace(problem, head_dim=min(problem.head_dim, least), head_dim_v=min(problem.value_dim, least))
        yield Change(f"use head dims of at most {least}", smaller)


def _dtypes(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    for dtype in dict.fromkeys(row.dtype for row in rows):
        if dtype != problem.dtype:
            yield Change(f"use {dtype}", replace(problem, dtype=dtype))


def _alignment(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    if problem.alignment < FULL_ALIGNMENT:
        what = f"align pointers and strides to {FULL_ALIGNMENT} bytes"
        yield Change(what, replace(problem, alignment=FULL_ALIGNMENT))


def _key_span(problem: Problem, rows: Sequence[Row]) -> Iterator[Change]:
    if problem.key_span > 0:
        yield Change("pass contiguous k and v", replace(problem, key_span=0))
