"""Which row runs a problem: of the eligible ones the cheapest by predicted cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cutlass_fmha.arguments import refusal
from cutlass_fmha.cost import predict, store
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.any_rows import no_rows
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.eligibility import eligible_rows, family, reasons
from cutlass_fmha.dispatch.families.family import Offers
from cutlass_fmha.dispatch.problem import MAX_KEY_SPAN, Problem, class_of, typical
from cutlass_fmha.dispatch.table import WIDE, Row, Table
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.launch.recent import Recent

MAX_CHOICES = 8192


def choose(
    problem: Problem,
    device: Device,
    row: str | None = None,
    table: Table | None = None,
    calibration: Calibration | None = None,
) -> Row:
    """The row that runs a problem: the cheapest eligible one, or the one named ``row``.

    ``calibration``: what is known of the rows' costs; that of the device (``store.for_device``) when None.
    Raises UnsupportedError with the nearest rows' reasons (with those of ``row`` when it is given), and
    ValueError for a name that no row has.
    """
    table = table or tables.this_build()
    if row is not None:
        return _named(row, problem, device, table)
    known = calibration or store.for_device(device)
    # Whoever holds a table and its costs keeps their ids from being anybody else's.
    where = (device, devices.forced_arch(), id(table), id(known))
    key = (class_of(problem), where)
    if (found := _chosen.get(key) or _chosen.revive(key)) is not None:
        return found[0]
    winner = cheapest(in_question(problem, device, table, known, where), typical(problem))
    _chosen.put(key, (winner, table, known))
    return winner


def _named(name: str, problem: Problem, device: Device, table: Table) -> Row:
    if (nothing := no_rows(device, table)) is not None:
        raise UnsupportedError(nothing)
    row = table.by_name(name)
    if why := reasons(row, problem, device, table):
        raise UnsupportedError(f"row {name} can't run this problem ({problem}) on {device}: {'; '.join(why)}")
    return row


#: What ``choose`` found: with it the table and the costs by which it did.
_chosen: Recent[tuple[object, ...], tuple[Row, Table, Calibration]] = Recent(MAX_CHOICES)


class Contender(NamedTuple):
    """A row that cost decides on, and what tells its costs."""

    row: Row
    offers: Offers


class Contest(list[Contender]):
    """The rows that cost decides between, and the number of the one that won last: it is asked first."""

    last = 0


#: By what keeps rows from a problem, lengths apart.
_in_question: Recent[tuple[object, ...], tuple[Contest, Table, Calibration]] = Recent(MAX_CHOICES)


def in_question(
    problem: Problem, device: Device, table: Table, known: Calibration, where: tuple[object, ...]
) -> Contest:
    """The rows that cost decides between. Raises UnsupportedError where there is none.

    ``where``: stands for device, table and costs.
    """
    key = (
        where,
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.alignment,
        problem.features,
        problem.window[0] >= 0,
        problem.causal == "top-left",
        problem.block_mask,
        problem.key_span <= MAX_KEY_SPAN,
        problem.score_runs,
        problem.packable_mask,
        problem.is_decode,
    )
    if (found := _in_question.get(key) or _in_question.revive(key)) is not None:
        return found[0]
    if (nothing := no_rows(device, table)) is not None:
        raise UnsupportedError(nothing)
    eligible = eligible_rows(problem, device, table)
    if not eligible:
        raise UnsupportedError(refusal.message(problem, device, table))
    rows = contenders(eligible, problem)
    made = Contest(Contender(row, family(row).offers(row, problem, device, known)) for row in rows)
    _in_question.put(key, (made, table, known))
    return made


def cheapest(rows: Contest, problem: Problem) -> Row:
    """The row of the least ``price``, the first of several.

    The row that won last is asked first, the others in the order of what they take at least, up to the first
    that can't win.
    """
    if len(rows) == 1:
        return rows[0].row
    last = winner = rows.last
    least = rows[last].offers.us(problem)
    others = [(offers.at_least(problem), n) for n, (_, offers) in enumerate(rows) if n != last]
    for bound, number in sorted(others):
        if bound > least:
            break
        us = rows[number].offers.us(problem)
        if us < least or (us == least and number < winner):
            least, winner = us, number
    rows.last = winner
    return rows[winner].row


def price(row: Row, problem: Problem, device: Device, calibration: Calibration) -> float:
    """What rows are chosen by: the predicted microseconds, more of a scored row that nobody timed."""
    return family(row).offers(row, problem, device, calibration).us(problem)


def predicted_us(row: Row, problem: Problem, device: Device, calibration: Calibration | None = None) -> float:
    """Predicted microseconds of one launch: a model that ranks rows, not a measurement.

    ``calibration``: what the model was told of this GPU; the one that counts here when None.
    """
    calibration = calibration or store.for_device(device)
    if row.family in (*WIDE, "masked"):  # whose offers are what they take
        return price(row, problem, device, calibration)
    return predict(row, problem, device, calibration.cost(row, device))


def contenders(eligible: Sequence[Row], problem: Problem) -> Sequence[Row]:
    """The eligible rows that cost decides between; the others are for problems that these can't run.

    Scored rows do more than a plain problem needs: where a plain row takes it, they are only in question for
    decoding, since plain rows don't split keys among blocks. Of those, the ones of the least head dims are:
    the others compute the same and more zeros. Copying element by element is for operands that nothing else
    takes: with others it has never been the fastest, and where all rows cost about the same, a prediction
    could err in its favour.
    """
    if not problem.is_decode:
        eligible = [row for row in eligible if not row.takes_features] or eligible
    least = min(((row.head_dim, row.head_dim_v) for row in eligible if row.takes_features), default=None)
    eligible = [row for row in eligible if not row.takes_features or (row.head_dim, row.head_dim_v) == least]
    return [row for row in eligible if row.family in WIDE or row.copy != "element"] or eligible
