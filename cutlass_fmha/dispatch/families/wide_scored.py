"""Wide rows for all that a call may say: float32, and head dims from 257 to 512.

Where tensors are aligned, calls are planned as scored rows' are; where not, launched as wide rows' are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cutlass_fmha import _C
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch import blocks
from cutlass_fmha.dispatch.describe import Call
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families import scored, wide
from cutlass_fmha.dispatch.families.family import Offers, Prepared, Rule, whole_blocks
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row, Table
from cutlass_fmha.launch.params import prepare_attention

#: TFLOP/s of one SM, by datasheets as ``wide``'s are, and GB/s: nothing of this was measured.
_SM_TFLOPS: Mapping[tuple[int, str], float] = {
    (89, "tf32x3"): 82.6 / 128 / 3 * 0.5,
    (90, "tf32x3"): 35 / 132,
    (120, "tf32x3"): 104.8 / 170 / 3 * 0.5,
    (89, "m16n8k16"): 121 / 58 * 0.3,
    (90, "m16n8k16"): 100 / 132,
    (120, "m16n8k16"): 209.5 / 170 * 0.3,
}
_SM_GBPS = 12.0


def _block_mask(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    return whole_blocks(problem, row.tile_m, row.tile_n)


FIXED_RULES = wide.FIXED_RULES
CALL_RULES: tuple[Rule, ...] = (_block_mask,)

lacking = scored.lacking
other_head_dims = wide.other_head_dims


def predicted_us(row: Row, problem: Problem, device: Device) -> float:
    """Microseconds of a launch by datasheet, to rank rows by."""
    pack, splits, _ = blocks.divide(row, problem, device)
    launched = -(-problem.seqlen_q * pack // row.tile_m) * problem.num_heads // pack * problem.batch * splits
    first, keys = problem.visible_keys(0, problem.seqlen_q - 1)
    steps: float = -(-max(0, keys - first) // (row.tile_n * splits))
    if problem.causal != "none" and not problem.is_decode:
        steps /= 2  # of most tiles
    numbers = row.tile_n * (problem.head_dim + problem.value_dim)
    of_step = max(
        2.0 * row.tile_m * numbers / _SM_TFLOPS[row.arch, row.mma] / 1e6,
        numbers * row.element_bytes / _SM_GBPS / 1e3,
    )
    waves = -(-launched // device.sm_count)
    return wide.LAUNCH_US * (2 if splits > 1 else 1) + waves * steps * of_step


def offers(row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
    return wide.ByDatasheet(row, device, predicted_us)


def prepare(row: Row, call: Call, device: Device) -> Prepared:
    if wide.whole_vectors(row, call):
        return Prepared(*prepare_attention(row, call, device))
    pack, splits, _ = blocks.divide(row, call.problem, device)
    launch = partial(wide.launch, row, call.sizes, call.causal, pack=pack, splits=splits)
    return Prepared(_C.AttentionParams(), launch=launch)
