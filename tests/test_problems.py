"""The parity problems themselves: that they are what they say. test_cpu.py runs the CPU backend on them."""

from __future__ import annotations

import math

import oracle_features
import pytest
import torch
from listed_problems import listed
from operands import CAUSAL, FILLS, GUARD, OF_EACH
from problems import Problem

DTYPES = [torch.float16, torch.bfloat16]
LISTED = listed()


def test_listed_problems_cover_what_they_should():
    assert len({str(problem) for problem in LISTED}) == len(LISTED)
    assert {problem.layout for problem in LISTED} == {*OF_EACH, "packed"}
    assert {problem.fill for problem in LISTED} == set(FILLS)
    assert {problem.causal for problem in LISTED} == set(CAUSAL)
    assert any(p.seqlen_q == 0 < p.seqlen_k for p in LISTED)
    assert any(p.seqlen_k == 0 < p.seqlen_q for p in LISTED)
    assert any(p.causal == "bottom-right" and p.seqlen_q > p.seqlen_k > 0 for p in LISTED)
    assert any(p.num_heads_kv == 1 < p.num_heads for p in LISTED)
    assert any(1 < p.num_heads_kv < p.num_heads for p in LISTED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [*OF_EACH, "packed"])
def test_layouts_hold_the_numbers_and_nan_around_them(layout: str, dtype: torch.dtype):
    for lengths in ((7, 7), (7, 3)):
        problem = Problem(*lengths, num_heads=4, layout=layout)
        plain = Problem(*lengths, num_heads=4).inputs(dtype, 32, "cpu")
        for x, expected in zip(problem.inputs(dtype, 32, "cpu"), plain, strict=True):
            assert x.shape == expected.shape and x.stride(-1) == 1
            assert layout == "expanded" or torch.equal(x, expected)
            buffer = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()
            aligned = all(n % 16 == 0 for n in (x.data_ptr(), *(2 * stride for stride in x.stride()[:3])))
            assert aligned == (layout != "unaligned")


@pytest.mark.parametrize("dtype", DTYPES)
def test_fills_do_what_they_are_named_for(dtype: torch.dtype):
    def lse_and_scores(fill: str, seqlen_k: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
        problem = Problem(50, seqlen_k, fill=fill, scale=1.0 if fill == "huge" else None, head_dim=32)
        q, k, v = problem.inputs(dtype, 32, "cpu")
        assert not any(x.isnan().any() for x in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * (problem.scale or 32**-0.5)
        return oracle_features.attention(q, k, v, problem.scale)[1], scores

    def times_raised(scores: torch.Tensor, block: int = 64) -> int:
        """Most blocks of one row whose maximum is far above everything before."""
        best = torch.stack([part.amax(-1) for part in scores.split(block, dim=-1)], dim=-1).cummax(-1).values
        return int((best.diff(dim=-1) > math.log(2.0**20)).sum(-1).max())

    assert lse_and_scores("constant")[1].unique().numel() == 1
    assert times_raised(lse_and_scores("steep-ramp", 1000)[1]) >= 14
    assert times_raised(lse_and_scores("normal", 1000)[1]) == 0
    assert times_raised(lse_and_scores("outliers", 1000)[1]) >= 1
    assert (lse_and_scores("all-keys-minus-inf")[0] == -math.inf).all()
    lse, scores = lse_and_scores("first-keys-minus-inf")
    assert lse.isfinite().all() and (scores[..., :100] == -math.inf).all()
    scores = lse_and_scores("near-minus-120")[1]
    assert scores.min() > -135 and scores.max() < -105
    scores = lse_and_scores("huge")[1]
    assert scores.max() > 2.0**31 and torch.equal(scores, scores.float().double())
