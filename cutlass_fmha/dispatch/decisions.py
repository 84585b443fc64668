"""A line for each decision of dispatch, where the logger's level asks for it (``log.configure``).

A decision is made once for calls of the same metadata, when their plan is: repeated calls log nothing.
"""

from __future__ import annotations

import logging

from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.choose import contenders, predicted_us
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.eligibility import eligible_rows
from cutlass_fmha.dispatch.gradients import Route
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row
from cutlass_fmha.log import logger


def decision(problem: Problem, device: Device, row: Row, forced: bool) -> None:
    """Which row runs a problem; on level debug also what else could have, cheapest first."""
    if not logger.isEnabledFor(logging.INFO):
        return
    calibration = store.for_device(device)
    costs = f"{predicted_us(row, problem, device, calibration):.1f} us predicted"
    line = f"{problem} on {device}: {row.name}, {'forced by name, ' if forced else ''}{costs}"
    if logger.isEnabledFor(logging.DEBUG):
        rows = contenders(eligible_rows(problem, device, tables.this_build()), problem)
        others = [other for other in rows if other is not row]
        prices = sorted((predicted_us(other, problem, device, calibration), other.name) for other in others)
        line += f"; {calibration.origin}; others: "
        line += ", ".join(f"{name} {us:.1f} us" for us, name in prices) or "none"
    logger.info("%s", line)


def decision_of_gradients(problem: Problem, device: Device, route: Route, forced: bool) -> None:
    """The same of a backward, whose costs are predicted where there are two routes."""
    if logger.isEnabledFor(logging.INFO):
        why = ", forced by name" * forced + f"; {route.why}" * bool(route.why)
        logger.info("backward of %s on %s: %s%s", problem, device, route.row.name, why)
