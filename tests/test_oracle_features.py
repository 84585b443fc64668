"""The oracle with features against hand-computed cases, the plain oracle and torch, and planted defects."""

from __future__ import annotations

import functools
import math
from typing import Any

import oracle
import oracle_features
import pytest
import tensors as made
import torch
from tensors import ints, qkv
from torch import Tensor

F = torch.nn.functional
HALF = [torch.float16, torch.bfloat16]
randn = functools.partial(made.randn, dtype=torch.float64)
tensors = functools.partial(qkv, seqlen_q=20, seqlen_k=50, head_dim=16, dtype=torch.float64)


def one_row(*scores: float) -> tuple[Tensor, Tensor, Tensor]:
    """One query and head of head_dim 1, whose keys have these scores and the values 1, 10, 100 ..."""
    k = torch.tensor(scores, dtype=torch.float64).view(1, -1, 1, 1)
    return torch.ones(1, 1, 1, 1, dtype=torch.float64), k, 10.0 ** torch.arange(len(scores)).view(1, -1, 1, 1)


def seen(n_q: int, n_k: int, causal: str = "none", **features: Any) -> list[str]:
    """Which keys each query sees, read off the outputs: keys score the same, and value j is 2^j."""
    q, k = torch.zeros(1, n_q, 1, 1, dtype=torch.float64), torch.zeros(1, n_k, 1, 1, dtype=torch.float64)
    v = 2.0 ** torch.arange(n_k, dtype=torch.float64).view(1, -1, 1, 1)
    out, lse = oracle_features.attention(q, k, v, 1.0, causal, **features)
    numbers = (out[0, :, 0, 0] * lse[0, 0].exp()).round().int().tolist()
    return ["".join("x" if number >> j & 1 else "." for j in range(n_k)) for number in numbers]


# ---- by hand -----------------------------------------------------------------------------------------------


def test_windows_by_hand():
    assert seen(2, 5, window=(1, 0)) == ["..xx.", "...xx"]
    assert seen(2, 5, window=(1, 1)) == ["..xxx", "...xx"]
    assert seen(2, 5, window=(None, 0)) == seen(2, 5, "bottom-right") == ["xxxx.", "xxxxx"]
    assert seen(2, 5, window=(-1, 0)) == ["xxxx.", "xxxxx"]
    assert seen(2, 5, "top-left", window=(0, 3)) == ["x....", ".x..."]
    assert seen(2, 5, "top-left") == ["x....", "xx..."]
    assert seen(3, 2, window=(0, 0)) == ["..", "x.", ".x"]
    assert seen(2, 5, window=(0, None)) == ["...xx", "....x"]


def test_other_masks_by_hand():
    assert seen(2, 5, "top-left", prefix_lengths=ints(3)) == ["xxx..", "xxx.."]
    assert seen(2, 5, "bottom-right", window=(0, None), prefix_lengths=ints(1)) == ["x..x.", "x...x"]
    assert seen(2, 5, mask=torch.tensor([True, False, True, True, False])) == ["x.xx.", "x.xx."]
    assert seen(2, 3, mask=torch.tensor([[True], [False]])) == ["xxx", "..."]
    blocks = (ints(1, 2).view(1, 1, 2), ints(1, 9, 0, 2).view(1, 1, 2, 2), (2, 2))
    assert seen(3, 5, block_mask=blocks) == ["..xx.", "..xx.", "xx..x"]
    assert seen(3, 5, "bottom-right", block_mask=blocks) == ["..x..", "..xx.", "xx..x"]


def test_lengths_by_hand():
    used = seen(3, 5, seqused_q=ints(2), seqused_k=ints(3), causal="bottom-right")
    assert used == ["xx...", "xxx..", "....."]
    # Keys are counted from the first one behind the padding, and the last query sees the last key.
    out, lse = oracle_features.attention(
        torch.zeros(1, 1, 1, 1),
        torch.zeros(1, 5, 1, 1),
        torch.arange(5.0).view(1, 5, 1, 1),
        leftpad_k=ints(3),
    )
    assert out.item() == 3.5 and lse.item() == pytest.approx(math.log(2.0))
    out, lse = oracle_features.attention(
        torch.zeros(1, 1, 1, 1),
        torch.zeros(1, 5, 1, 1),
        torch.ones(1, 5, 1, 1),
        seqused_k=ints(2),
        leftpad_k=ints(3),
    )
    assert out.item() == 0.0 and lse.item() == -math.inf


def test_scores_by_hand():
    q, k, v = one_row(0.0, 1.0)
    _, lse = oracle_features.attention(q, k, v, 1.0, softcap=2.0)
    assert lse.item() == pytest.approx(math.log(1.0 + math.exp(2.0 * math.tanh(0.5))))
    _, lse = oracle_features.attention(q, k, v, 3.0, softcap=2.0, bias=torch.tensor([5.0, 7.0]))
    assert lse.item() == pytest.approx(math.log(math.exp(5.0) + math.exp(7.0 + 2.0 * math.tanh(1.5))))
    # One query at the end of two keys stands at key 1; with "top-left" at key 0.
    slope = torch.tensor([0.5])
    _, lse = oracle_features.attention(q, k, v, 1.0, alibi_slopes=slope)
    assert lse.item() == pytest.approx(math.log(math.exp(-0.5) + math.exp(1.0)))
    _, lse = oracle_features.attention(q, k[:, :1], v[:, :1], 1.0, "top-left", alibi_slopes=slope)
    assert lse.item() == pytest.approx(0.0)
    out, lse = oracle_features.attention(q, k, v, 1.0, sinks=torch.tensor([0.0]))
    assert lse.item() == pytest.approx(math.log(2.0 + math.e))
    assert out.item() == pytest.approx((1.0 + 10.0 * math.e) / (2.0 + math.e))


def test_dropout_by_hand(monkeypatch: pytest.MonkeyPatch):
    q, k, v = one_row(0.0, 0.0, 0.0, 0.0)
    import numpy as np

    monkeypatch.setattr(oracle_features, "kept", lambda *_: np.array([[[True, False, True, False]]]))
    out, lse = oracle_features.attention(q, k, v, 1.0, dropout_p=0.25, dropout_seed=1)
    assert out.item() == pytest.approx(101.0 / 4 / 0.75) and lse.item() == pytest.approx(math.log(4.0))


# ---- against others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", oracle.CAUSAL)
def test_without_features_it_is_the_plain_oracle(causal: str):
    q, k, v = tensors()
    for ours, plain in zip(
        oracle_features.attention(q, k, v, 0.3, causal), oracle.attention(q, k, v, 0.3, causal), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)


def test_masks_and_biases_agree_with_torch():
    q, k, v = tensors()
    bias = randn(2, 4, 20, 50).masked_fill(randn(20, 50, seed=3) > 1.0, -math.inf)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=bias, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(oracle_features.attention(q, k, v, bias=bias)[0], expected)
    mask = bias > -math.inf
    out, _ = oracle_features.attention(q, k, v, bias=bias.nan_to_num(9.0, 9.0, 9.0), mask=mask)
    torch.testing.assert_close(out, expected)


def test_sequences_are_found_wherever_they_are():
    q, k, v = tensors()
    expected = oracle_features.attention(q, k, v, causal="bottom-right", seqused_k=ints(30, 7))
    pages = [x.reshape(20, 5, 2, 16).flip(0) for x in (k, v)]
    table = torch.arange(19, -1, -1, dtype=torch.int32).view(2, 10)
    table[1, 2:] = -1
    packed = {"cu_seqlens_k": ints(0, 30, 37)}
    for keys, values, said in [
        (*pages, {"page_table": table, "seqused_k": ints(30, 7)}),
        (k.flip(0), v.flip(0), {"cache_batch_idx": ints(1, 0), "seqused_k": ints(30, 7)}),
        (torch.cat([k[0, :30], k[1, :7]]), torch.cat([v[0, :30], v[1, :7]]), packed),
        (
            F.pad(k, (0, 0, 0, 0, 2, 0)),
            F.pad(v, (0, 0, 0, 0, 2, 0)),
            {"leftpad_k": ints(2, 2), "seqused_k": ints(32, 9)},
        ),
    ]:
        ours = oracle_features.attention(q, keys, values, causal="bottom-right", **said)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    out, lse = oracle_features.attention(
        q.flatten(0, 1), k, v, causal="bottom-right", cu_seqlens_q=ints(0, 20, 39), seqused_k=ints(30, 7)
    )
    assert torch.equal(out[:20], expected[0][0]) and torch.equal(lse[:, :20], expected[1][0])
    assert out[39].isnan().all() and lse[:, 39].isnan().all()


# ---- the tolerance -----------------------------------------------------------------------------------------

SLOPES, SINKS = torch.tensor([0.05, 0.2, 0.1, 0.0]), torch.tensor([1.0, -2.0, 4.0, 0.0])
MIX = {
    "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS, "window": (60, 5), "dropout_p": 0.2,
    "dropout_seed": 9,
}  # fmt: skip

DEFECTS = {
    "no softcap": {"softcap": 0.0},
    "another softcap": {"softcap": 2.9},
    "slopes of the next head": {"alibi_slopes": SLOPES.roll(1)},
    "no sink": {"sinks": None},
    "sink of the next head": {"sinks": SINKS.roll(1)},
    "window a key too long": {"window": (61, 5)},
    "window a key too short": {"window": (60, 4)},
    "another seed": {"dropout_seed": 10},
    "no dropout": {"dropout_p": 0.0},
    "another probability": {"dropout_p": 0.19},
    "bias of the next key": {"bias": True},
    "a query too many": {"seqused_q": ints(61, 100)},
    "a key too many": {"seqused_k": ints(130, 71)},
}


def a_good_result(
    q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom-right", **features: Any
) -> tuple[Tensor, Tensor]:
    """What kernels do: all in fp32, P rounded relative to the row's maximum, not normalised."""
    f = oracle_features.Features(**features)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    for s in oracle_features.sequences(q, k, v, None, causal, f):
        rows = slice(0, len(s.q))
        scores = s.scores(rows, torch.float32).masked_fill(~s.visible(rows), -math.inf)
        top = scores.amax(-1, keepdim=True).clamp_min(-1e30 if f.sinks is None else -10.0)
        p = torch.exp2((scores - top) * math.log2(math.e))
        total = p.sum(-1, keepdim=True)
        if f.sinks is not None:
            total = total + torch.exp(f.sinks.view(-1, 1, 1) - top)
        weights = s.dropped(p, rows).to(q.dtype).float()
        result = weights @ s.per_query_head(s.v).float() * s.factor / total.clamp_min(1e-30)
        out[s.number, rows] = result.transpose(0, 1).to(q.dtype)
        lse[s.number, :, rows] = (
            (top + total.log()).squeeze(-1).masked_fill(total.squeeze(-1) == 0, -math.inf)
        )
    return out, lse


def problem(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    bias = randn(2, 1, 100, 130).to(dtype)
    lengths = {"seqused_q": ints(60, 100), "seqused_k": ints(130, 70)}
    return tensors(seqlen_q=100, seqlen_k=130, dtype=dtype), MIX | lengths | {"bias": bias, "causal": "none"}


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_good_result_passes(dtype: torch.dtype):
    inputs, features = problem(dtype)
    out, lse = a_good_result(*inputs, **features)
    errors = oracle_features.compare(out, lse, *inputs, **features).check()
    assert errors.out_ratio > 0.0 and errors.lse_ratio > 0.0
    assert oracle_features.compare(out, None, *inputs, **features).lse == 0.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, dtype: torch.dtype):
    inputs, features = problem(dtype)
    wrong = DEFECTS[name] if name != "bias of the next key" else {"bias": features["bias"].roll(1, -1)}
    out, lse = a_good_result(*inputs, **(features | wrong))
    with pytest.raises(AssertionError, match="times the tolerance"):
        oracle_features.compare(out, lse, *inputs, **features).check()
    if name != "a query too many":  # its rows alone are wrong
        with pytest.raises(AssertionError, match="times the tolerance"):
            oracle_features.compare(out, None, *inputs, **features).check()


@pytest.mark.parametrize("dim", [1, 2, 8])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_short_heads_are_judged_fairly(dtype: torch.dtype, dim: int):
    """A row of few elements may cancel to nearly 0, where the unfused math happens to be right."""
    worst = 0.0
    for seed in range(20):
        q, k = randn(1, 300, 1, 16, dtype=dtype, seed=seed), randn(1, 300, 1, 16, dtype=dtype, seed=seed + 50)
        v = randn(1, 300, 1, dim, dtype=dtype, seed=seed + 100)
        out, lse = a_good_result(q, k, v)
        worst = max(worst, oracle_features.compare(out, lse, q, k, v, causal="bottom-right").check().worst)
    assert worst > 0.3


def test_huge_biases_of_hidden_keys_grant_nothing():
    q, k, v = tensors(dtype=torch.float16)
    bias = torch.zeros(50).index_fill(0, torch.arange(25), -1e30)
    out, lse = a_good_result(q, k, v, bias=bias)
    oracle_features.compare(out, lse, q, k, v, causal="bottom-right", bias=bias).check()
    with pytest.raises(AssertionError, match="times the tolerance"):
        oracle_features.compare(out * 1.01, lse, q, k, v, causal="bottom-right", bias=bias).check()


def test_large_biases_grant_their_rounding():
    q, k, v = tensors(dtype=torch.float16)
    out, lse = a_good_result(q, k, v, bias=torch.tensor([4096.3]))
    oracle_features.compare(out, lse, q, k, v, causal="bottom-right", bias=torch.tensor([4096.3])).check()
    shifted = lse - 4096.3
    assert not torch.allclose(shifted, a_good_result(q, k, v)[1], rtol=0, atol=1e-5)


def test_products_of_less_precision_are_granted_their_error():
    """Inputs rounded to 12 bits: a factor is off by 2^-12 at most, a product by 2^-11, or 2^13 half ulps."""
    inputs = tensors(dtype=torch.float32)
    coarse = [x * 4097 - (x * 4097 - x) for x in inputs]  # Dekker's splitting
    out, lse = a_good_result(*coarse)
    with pytest.raises(AssertionError, match="times the tolerance"):
        oracle_features.compare(out, lse, *inputs, causal="bottom-right").check()
    oracle_features.compare(out, lse, *inputs, causal="bottom-right", product_error=2**13).check()


def test_what_overflows_is_infinite():
    q, k, v = tensors(dtype=torch.float16)
    features = {"dropout_p": 0.5, "dropout_seed": 1, "window": (1, None)}
    out, lse = a_good_result(q, k, v.clamp(-2, 2) * 30000, **features)
    assert out.isinf().any() and not out.isinf().all()
    arguments = (lse, q, k, v.clamp(-2, 2) * 30000)
    oracle_features.compare(out, *arguments, causal="bottom-right", **features).check()
    for wrong in (-out, out.nan_to_num(0.0, 0.0, 0.0), out.where(out != out.abs().amin(), math.inf)):
        with pytest.raises(AssertionError, match="times the tolerance"):
            oracle_features.compare(wrong, *arguments, causal="bottom-right", **features).check()


def test_rows_out_of_use_must_be_exact():
    q, k, v = tensors(dtype=torch.float16)
    out, lse = a_good_result(q, k, v, seqused_q=ints(5, 20))
    arguments = {"causal": "bottom-right", "seqused_q": ints(5, 20)}
    oracle_features.compare(out, lse, q, k, v, **arguments).check()
    for tensor, index in [(out, (0, 5, 0, 0)), (lse, (0, 1, 7))]:
        before = tensor[index].clone()
        tensor[index] = 1e-7
        with pytest.raises(AssertionError, match="inf times the tolerance"):
            oracle_features.compare(out, lse, q, k, v, **arguments).check()
        tensor[index] = before


def test_nan_is_an_error():
    q, k, v = tensors(dtype=torch.float16)
    out, lse = a_good_result(q, k, v)
    for index in range(2):
        wrong = [out.clone(), lse.clone()]
        wrong[index].view(-1)[3] = math.nan
        with pytest.raises(AssertionError, match="times the tolerance"):
            oracle_features.compare(*wrong, q, k, v, causal="bottom-right").check()


def test_shapes_and_dtypes_are_checked():
    q, k, v = tensors(dtype=torch.float16)
    out, lse = a_good_result(q, k, v)
    with pytest.raises(AssertionError, match=r"output is \[2, 19, 4, 16\] float16 on cpu, expected"):
        oracle_features.compare(out[:, :19], lse, q, k, v).check()
    with pytest.raises(AssertionError, match=r"softmax_lse is \[2, 4, 20\] float64 .* expected .* float32"):
        oracle_features.compare(out, lse.double(), q, k, v).check()
    with pytest.raises(TypeError, match="windows"):
        oracle_features.compare(out, lse, q, k, v, windows=(1, 1))
