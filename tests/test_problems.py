"""The parity problems themselves: that they are what they say. test_cpu.py runs the CPU backend on them."""

import math

import oracle_features
import pytest
import torch
from operands import FILLS, GUARD, OF_EACH
from problems import Problem, listed


@pytest.mark.parametrize("layout", [*OF_EACH, "packed"])
def test_layouts_hold_the_numbers_and_nan_around_them(layout: str):
    for lengths in ((7, 7), (7, 3)):
        plain = Problem(*lengths, num_heads=4).inputs(torch.float16, 32, "cpu")
        laid = Problem(*lengths, num_heads=4, layout=layout).inputs(torch.float16, 32, "cpu")
        for x, expected in zip(laid, plain, strict=True):
            assert x.shape == expected.shape and x.stride(-1) == 1
            assert layout == "expanded" or torch.equal(x, expected)
            buffer = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()
            aligned = all(n % 16 == 0 for n in (x.data_ptr(), *(2 * stride for stride in x.stride()[:3])))
            assert aligned == (layout != "unaligned")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fills_do_what_they_are_named_for(dtype: torch.dtype):
    assert {problem.fill for problem in listed()} == set(FILLS)

    def lse_and_scores(fill: str, seqlen_k: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = Problem(50, seqlen_k, fill=fill).inputs(dtype, 64, "cpu")
        assert not any(x.isnan().any() for x in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
        return oracle_features.attention(q, k, v)[1], scores

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
    assert scores.max() > 2.0**28 and torch.equal(scores, scores.float().double())
