"""The package's way to plain rows, and what lies far apart, against dense fp64 attention: ``make parity``.

test_parity_features.py has every row.

CUTLASS_FMHA_FORCE_ARCH=89 proves the sm_89 rows through their PTX, =120 the sm_120 rows of a proxy build.
"""

from __future__ import annotations

import gpu
import oracle_features
import pytest
import torch
from operands import CAUSAL, place
from parity_report import ParityReport
from problems import Problem

import cutlass_fmha
from cutlass_fmha import _C

# A warning of some torch release is no failure of a kernel.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = torch.device("cuda", 0)
ROWS = gpu.rows()
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def attend(
    row: _C.Row | None, problem: Problem, device: torch.device, layout: str, parity: ParityReport
) -> None:
    """The public function on a problem, in ``layout``, against the oracle."""
    dtype, head_dim = (gpu.torch_dtype(row), row.head_dim) if row else (torch.bfloat16, 64)
    q, k, v = problem.inputs(dtype, head_dim, device)
    given = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bhsd" else [q, k, v]
    out, lse = cutlass_fmha.attention(
        *given, scale=problem.scale, causal=problem.causal, return_lse=True, layout=layout,
        row=row.name if row else None,
    )  # fmt: skip
    out = out.transpose(1, 2) if layout == "bhsd" else out
    errors = oracle_features.compare(out, lse, q, k, v, problem.scale, problem.causal, problem.exact_scores)
    if row:
        parity.record(row.name, problem, errors)
    errors.check()


@by_row
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention_runs_the_row_it_is_told_to(row: _C.Row, layout: str, parity: ParityReport):
    for causal in CAUSAL:
        attend(row, Problem(113, 140, causal, num_heads=4, seed=1), DEVICE, layout, parity)
    for memory in ("packed", "expanded", "bhsd") + (("unaligned",) if row.alignment == 2 else ()):
        attend(
            row, Problem(70, 70, "bottom-right", num_heads=4, layout=memory, seed=2), DEVICE, layout, parity
        )
    attend(row, Problem(5, 0), DEVICE, layout, parity)
    attend(row, Problem(0, 5), DEVICE, layout, parity)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("memory", ["bshd", "packed", "unaligned", "expanded"])
def test_attention_picks_a_row_that_can(layout: str, memory: str, parity: ParityReport):
    for length in (1, 65, 500):
        attend(None, Problem(length, 500, "bottom-right", layout=memory, num_heads=4), DEVICE, layout, parity)


def test_sdpa_is_top_left_causal():
    inputs = Problem(50, 90, num_heads=4, num_heads_kv=4).inputs(torch.float16, 64, DEVICE)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    ours = cutlass_fmha.scaled_dot_product_attention(q, k, v, is_causal=True)
    oracle_features.compare(ours.transpose(1, 2), None, *inputs, causal="top-left").check()


# ---- offsets that need 64 bits -----------------------------------------------------------------------------


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.head_dim == 64 and r.dtype == "bfloat16"], ids=lambda r: r.name
)
def test_tensors_of_more_than_two_to_the_31_elements(row: _C.Row, parity: ParityReport):
    batch = gpu.FAR // (64 * 8 * 64) + 2
    x = torch.empty(batch, 64, 8, 64, dtype=torch.bfloat16, device=DEVICE).normal_()
    out = cutlass_fmha.attention(x, x, x, causal=True, row=row.name)
    for i in (0, batch // 2, batch - 1):
        part = x[i : i + 1]
        errors = oracle_features.compare(out[i : i + 1], None, part, part, part, causal="bottom-right")
        parity.record(row.name, f"batch {i} of {batch} x 64 x 8 x 64", errors)


def test_the_guards_notice_a_stray_write():
    # What the other tests rely on, without a kernel: a write just outside an output, and one in a row's
    # padding.
    for offset in (-1, 64 * 3 * 8 * 2):
        guarded = gpu.Guarded.around(place(torch.zeros(2, 3, 8, 64, device=DEVICE, dtype=torch.float16)))
        assert guarded.intact()
        guarded.buffer[guarded.view.storage_offset() + offset] = 0.0
        assert not guarded.intact()
    guarded = gpu.Guarded.around(place(torch.zeros(2, 3, 8, 64, device=DEVICE).half(), row_pad=8))
    guarded.view.fill_(0.0)
    assert guarded.intact()
    guarded.buffer[guarded.view.storage_offset() + 64] = torch.nan
    assert not guarded.intact()
