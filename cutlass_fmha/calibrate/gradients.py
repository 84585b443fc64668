"""Which rows that compute gradients are timed, and on what: those that differ in their tiles of keys alone, where
lengths decide between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cutlass_fmha.calibrate.measurements import GIVE_UP, Sample
from cutlass_fmha.calibrate.problems import Limits
from cutlass_fmha.calibrate.progress import Progress
from cutlass_fmha.calibrate.timing import Launch, RowTimer
from cutlass_fmha.cost import store
from cutlass_fmha.cost.gradients import prices, walks_us
from cutlass_fmha.dispatch import gradients
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.launch import gradients as launches

if TYPE_CHECKING:
    from cutlass_fmha.dispatch.table import Row, Table

PASSES = 3.5
"""Operations of the gradients over those of the forward, recomputed scores included: five products, two of them."""
WANTED = (True, True, True, False, False)
# (batch, heads of 132, seqlen, causal): few blocks and many, short walks and long.
_DESIGNED = (
    (8, 12, 512, "none"),
    (8, 12, 512, "bottom-right"),
    (32, 12, 512, "bottom-right"),
    (2, 16, 1024, "none"),
    (16, 16, 1024, "bottom-right"),
    (1, 16, 2048, "bottom-right"),
    (8, 16, 2048, "none"),
    (4, 16, 4096, "none"),
    (4, 16, 4096, "bottom-right"),
)


def competing(device: Device, table: Table) -> list[list[Row]]:
    """Rows of a device that differ in their tiles alone, in one dtype: the other takes as long."""
    found: dict[tuple[int, bool], list[Row]] = {}
    for row in table.rows:
        problem = Problem(1, 1, 1, 1, 1, row.head_dim, row.dtype)
        if not gradients.writes_scores(row) and not gradients.reasons(row, problem, device, table):
            of_kind = found.setdefault((row.head_dim, row.scored), [])
            of_kind += [row] * (not of_kind or of_kind[0].dtype == row.dtype)
    return [rows for rows in found.values() if len(rows) > 1]


def problems(row: Row, sm_count: int, limits: Limits) -> list[Problem]:
    """Those that a row and its like are timed on: heads grow with the GPU, so that waves fill alike on all of them."""
    found = []
    for batch, of_132, seqlen, causal in _DESIGNED:
        heads = max(1, round(of_132 * sm_count / 132))
        problem = Problem(batch, seqlen, seqlen, heads, heads, row.head_dim, row.dtype, causal)
        if limits.allow(problem, PASSES):
            found.append(problem)
    return found


class GradientTimer(RowTimer):
    """Times whole backwards: the row's walks with the kernels before and after them."""

    def _launch(self, row: Row, problem: Problem, sets: int) -> Launch:
        shape = (sets, problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
        pool = self.pools[problem.dtype].values
        q, k, v, dout = (pool.new_empty(shape).normal_() for _ in range(4))
        scale = problem.head_dim**-0.5
        forward = torch.ops.cutlass_fmha.attend
        found = [forward(q[n], k[n], v[n], scale, problem.causal, True, None) for n in range(sets)]

        def launch(number: int) -> None:
            tensors, (output, lse) = (q[number], k[number], v[number]), found[number]
            launches.launch(dout[number], tensors, output, lse, None, scale, problem.causal, {}, WANTED, row.name)

        return launch


def collect(index: int, device: Device, limits: Limits) -> list[Sample]:
    """Times rows that compete on CUDA device ``index``, the likely fastest first."""
    table = tables.backward()
    asked = [
        (rows, problem) for rows in competing(device, table) for problem in problems(rows[0], device.sm_count, limits)
    ]
    timer = GradientTimer(index, [problem for _, problem in asked])
    progress, samples = Progress("gradients", len(asked)), []
    for rows, problem in asked:
        priced = zip(rows, prices(rows, device, store.default(device)), strict=True)
        us = {row.name: walks_us(row, problem, device, price) for row, price in priced}
        in_order = sorted(rows, key=lambda row: us[row.name])
        samples.append(Sample(problem, timer.time(problem, in_order, GIVE_UP)))
        progress.step(str(problem.head_dim))
    return samples
