"""The oracle against hand-computed cases, against torch in fp64, and against planted defects.

A correct online softmax stays below the tolerance and a wrong one does not: a model of the kernels' arithmetic.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import oracle
import oracle_features
import pytest
import torch
import torch.nn.functional as F
from oracle_features import compare
from tensors import ints, qkv
from tensors import randn as random
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LN2 = math.log(2.0)
BIAS, SLOPE = torch.tensor([5.0, 7.0]), torch.tensor([0.5])
randn = functools.partial(random, dtype=torch.float64)
tensors = functools.partial(qkv, seqlen_q=20, seqlen_k=50, head_dim=16, dtype=torch.float64)


def within(out: Tensor, lse: Tensor | None, *inputs: Tensor, **said: Any) -> bool:
    return compare(out, lse, *inputs, **({"causal": "bottom-right"} | said)).worst <= 1.0


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


def test_masks_by_hand():
    assert seen(2, 5, window=(1, 0)) == ["..xx.", "...xx"]
    assert seen(2, 5, window=(1, 1)) == ["..xxx", "...xx"]
    assert seen(2, 5, window=(None, 0)) == seen(2, 5, "bottom-right") == ["xxxx.", "xxxxx"]
    assert seen(2, 5, window=(-1, 0)) == ["xxxx.", "xxxxx"]
    assert seen(2, 5, "top-left", window=(0, 3)) == ["x....", ".x..."]
    assert seen(2, 5, "top-left") == ["x....", "xx..."]
    assert seen(3, 2, "bottom-right") == ["..", "x.", "xx"]
    assert seen(3, 2, window=(0, 0)) == ["..", "x.", ".x"]
    assert seen(2, 5, window=(0, None)) == ["...xx", "....x"]
    assert seen(2, 5, "top-left", prefix_lengths=ints(3)) == ["xxx..", "xxx.."]
    assert seen(2, 5, "bottom-right", window=(0, None), prefix_lengths=ints(1)) == ["x..x.", "x...x"]
    assert seen(2, 5, mask=torch.tensor([True, False, True, True, False])) == ["x.xx.", "x.xx."]
    assert seen(2, 3, mask=torch.tensor([[True], [False]])) == ["xxx", "..."]
    blocks = (ints(1, 2).view(1, 1, 2), ints(1, 9, 0, 2).view(1, 1, 2, 2), (2, 2))
    assert seen(3, 5, block_mask=blocks) == ["..xx.", "..xx.", "xx..x"]
    assert seen(3, 5, "bottom-right", block_mask=blocks) == ["..x..", "..xx.", "xx..x"]
    used = {"seqused_q": ints(2), "seqused_k": ints(3), "causal": "bottom-right"}
    assert seen(3, 5, **used) == ["xx...", "xxx..", "....."]
    # Keys are counted from the first one behind the padding, and the last query sees the last key.
    assert seen(2, 5, "bottom-right", leftpad_k=ints(3)) == ["...x.", "...xx"]


@pytest.mark.parametrize(
    ("scores", "scale", "said", "weights", "total"),
    [
        ((0.0, math.log(3.0)), 1.0, {}, (1, 3), 4),
        ((0.0, 2.0), None, {}, (1, math.exp(2)), 1 + math.exp(2)),  # of head_dim 1
        ((), 1.0, {}, (), 0),
        ((0.0, 1.0), 1.0, {"seqused_k": ints(1), "leftpad_k": ints(2)}, (), 0),
        ((0.0, 1.0), 1.0, {"softcap": 2.0}, (1, math.exp(2 * math.tanh(0.5))), None),
        ((0.0, 1.0), 3.0, {"softcap": 2.0, "bias": BIAS}, (math.exp(5), math.exp(7 + 2 * math.tanh(1.5))), None),
        # One query at the end of two keys stands at key 1; with "top-left" at key 0.
        ((0.0, 1.0), 1.0, {"alibi_slopes": SLOPE}, (math.exp(-0.5), math.e), None),
        ((0.0, 1.0), 1.0, {"alibi_slopes": SLOPE, "causal": "top-left", "window": (-1, 9)}, (1, 0), None),
        ((0.0, 1.0), 1.0, {"sinks": torch.tensor([0.0])}, (1, math.e), 2 + math.e),
        ((0.0,) * 4, 1.0, {"dropout_p": 0.25, "dropout_seed": 1}, (4 / 3, 0, 4 / 3, 0), 4),
    ],
)
def test_scores_by_hand(scores, scale, said: dict[str, Any], weights, total: float | None, monkeypatch):
    monkeypatch.setattr(oracle_features, "kept", lambda *_: np.array([[[True, False, True, False]]]))
    out, lse = oracle_features.attention(*one_row(*scores), scale, **said)
    total = sum(weights) if total is None else total
    assert out.item() == pytest.approx(sum(w * 10**j for j, w in enumerate(weights)) / max(total, 1))
    assert lse.item() == pytest.approx(math.log(total) if total else -math.inf)


def test_ties_of_huge_scores_share_the_weight():
    """In an LSE of 2^101 the logarithm of the sum is lost."""
    assert oracle_features.attention(*one_row(2.0**100, 3 * 2.0**100, 3 * 2.0**100))[0].item() == 55.0


@pytest.mark.parametrize("dtype", HALF)
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype):
    for value in (1.0, 1.5, 2.0, 100.0, 2.0**-10, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 8, 0.0):
        x = torch.tensor(value, dtype=dtype)
        above = (x.view(torch.int16) + 1).view(dtype)
        assert oracle.ulp(x.double(), dtype).item() == (above.double() - x.double()).item(), value


@pytest.mark.parametrize("rows", [2**22, 7])
@pytest.mark.parametrize("causal", oracle.CAUSAL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (17, 113), (113, 17)])
@pytest.mark.parametrize("scale", [None, -0.7])
def test_it_agrees_with_torch_in_fp64(
    causal: str, seqlen_q: int, seqlen_k: int, scale: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(oracle_features.CHUNK, "cpu", rows * 4 * seqlen_k)
    q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    bias = randn(2, 4, seqlen_q, seqlen_k).masked_fill(randn(seqlen_q, seqlen_k, seed=3) > 1.0, -math.inf)
    hidden = bias.masked_fill(~oracle.visible(seqlen_q, seqlen_k, causal), -math.inf)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, hidden, scale=scale, enable_gqa=True)
    expected = expected.transpose(1, 2).nan_to_num(0.0)  # a row without keys
    scores = heads_first[0] @ heads_first[1].repeat_interleave(2, 1).mT * (0.25 if scale is None else scale)
    for said in ({"bias": bias}, {"bias": bias.nan_to_num(9.0, 9.0, 9.0), "mask": bias > -math.inf}):
        out, lse = oracle_features.attention(q, k, v, scale, causal, **said)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(lse, (scores + hidden).logsumexp(-1), rtol=1e-12, atol=1e-12)


def model_of_the_kernels(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: str = "bottom-right",
    limit: float = 2.0**15, defect: str = "", **features: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Online softmax in fp32 with P rounded to the dtype, whose reference is raised only when a block's p
    exceed ``limit``: the loosest thing a correct kernel does. With ``defect``, one thing is wrong."""
    f = oracle_features.Features(**features)
    if defect == "pairs heads with the wrong key head":
        k, v = (x[:, :, [0, 1, 0, 1]] for x in (k, v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    for s in oracle_features.sequences(q, k, v, scale, causal, f):
        rows = slice(0, len(s.q))
        scores, values = s.scores(rows, torch.float32), s.per_query_head(s.v).float()
        if defect == "rounds scores to the input dtype":
            scores = scores.to(q.dtype).float()
        scores = (scores / LN2).masked_fill(~s.visible(rows), -math.inf)
        kept = s.dropped(torch.ones_like(scores), rows)
        r = torch.full((*scores.shape[:2], 1), -math.inf)
        total, acc = torch.zeros_like(r), torch.zeros(*scores.shape[:2], v.shape[-1])
        if f.sinks is not None:
            r, total = r.copy_(f.sinks.view(-1, 1, 1) / LN2), total + 1.0
        for block in (slice(begin, begin + 16) for begin in range(0, len(s.k), 16)):
            trial = torch.exp2(scores[..., block] - r).sum(-1, keepdim=True)
            top = torch.maximum(r, scores[..., block].amax(-1, keepdim=True))
            raised = torch.where(trial <= limit, r, top)
            finite = raised.masked_fill(raised == -math.inf, 0.0)
            factor = torch.exp2(r - finite)
            if defect == "does not rescale":
                factor = torch.where(r == -math.inf, factor, 1.0)
            r, p = raised, torch.exp2(scores[..., block] - finite)
            total = total * factor + p.sum(-1, keepdim=True)
            acc = acc * factor + (p * kept[..., block]).to(q.dtype).float() @ values[:, block]
            if defect == "accumulates in the input dtype":
                acc = acc.to(q.dtype).float()
        result = torch.where(total == 0, 0.0, acc * s.factor / total)
        out[s.number, rows] = result.transpose(0, 1).to(q.dtype)
        units = 1.0 if defect == "lse in log2 units" else LN2
        lse[s.number, :, rows] = torch.where(total == 0, -math.inf, (r + total.log2()) * units).squeeze(-1)
    if defect == "leaves a row unwritten":
        out[:, -1, -1] = math.nan
    return out, lse


SLOPES, SINKS = torch.tensor([0.05, 0.2, 0.1, 0.0]), torch.tensor([1.0, -2.0, 4.0, 0.0])
MIX = {
    "causal": "none", "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS, "window": (60, 5),
    "dropout_p": 0.2, "dropout_seed": 9, "seqused_q": ints(60, 100), "seqused_k": ints(130, 70),
    "bias": randn(2, 1, 100, 130),
}  # fmt: skip
PLAIN = {"scale": -0.18, "limit": 64.0}

#: Of a problem that says everything, and of one that says nothing: what a wrong kernel does.
OF_MIX: dict[str, dict[str, Any]] = {
    "no softcap": {"softcap": 0.0}, "another softcap": {"softcap": 2.9},
    "slopes of the next head": {"alibi_slopes": SLOPES.roll(1)},
    "no sink": {"sinks": None}, "sink of the next head": {"sinks": SINKS.roll(1)},
    "window a key too long": {"window": (61, 5)}, "window a key too short": {"window": (60, 4)},
    "another seed": {"dropout_seed": 10}, "no dropout": {"dropout_p": 0.0},
    "another probability": {"dropout_p": 0.19},
    "bias of the next key": {"bias": MIX["bias"].roll(1, -1)},  # type: ignore[attr-defined]
    "a query too many": {"seqused_q": ints(61, 100)}, "a key too many": {"seqused_k": ints(130, 71)},
}  # fmt: skip
OF_PLAIN: dict[str, dict[str, Any]] = {
    "drops the last key": {"seqused_k": ints(699, 700)},
    "sees one key too many": {"window": (-1, 1), "causal": "none"},
    "scale without its sign": {"scale": 0.18},
}
DEFECTS = (
    "does not rescale", "lse in log2 units", "accumulates in the input dtype",
    "rounds scores to the input dtype", "leaves a row unwritten", "pairs heads with the wrong key head",
)  # fmt: skip


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [*OF_MIX, *OF_PLAIN, *DEFECTS])
def test_a_defect_is_caught(name: str, dtype: torch.dtype):
    if name in OF_MIX:
        inputs, said = tensors(seqlen_q=100, seqlen_k=130, dtype=dtype), MIX
    else:
        inputs, said = qkv(2, 100, 700, dtype=dtype), PLAIN
        inputs[1][:, 300:] *= 2  # later keys score higher, so that the reference has to be raised
    asked = {"causal": "bottom-right", **{key: x for key, x in said.items() if key != "limit"}}
    good = compare(*model_of_the_kernels(*inputs, **said), *inputs, **asked).check()
    assert 0.0 < good.out_ratio < 0.7 and 0.0 < good.lse_ratio < 0.6
    out, lse = model_of_the_kernels(*inputs, **(said | (OF_MIX | OF_PLAIN).get(name, {"defect": name})))
    for given in [lse] if name in ("a query too many", "lse in log2 units") else [lse, None]:
        with pytest.raises(AssertionError, match="times the tolerance"):
            compare(out, given, *inputs, **asked).check()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", oracle.CAUSAL)
@pytest.mark.parametrize(("scale", "limit"), [(0.18, 1.0), (-3.0, 2.0**15)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (17, 113), (113, 17), (65, 65), (5, 1023)])
def test_a_correct_online_softmax_passes(
    dtype: torch.dtype, causal: str, scale: float, limit: float, seqlen_q: int, seqlen_k: int
):
    inputs = qkv(2, seqlen_q, seqlen_k, dtype=dtype, seed=seqlen_q + seqlen_k)
    out, lse = model_of_the_kernels(*inputs, scale, causal, limit)
    errors = compare(out, lse, *inputs, scale, causal).check()
    assert errors.worst > 0.0 or seqlen_k == 1


@pytest.mark.parametrize("dim", [1, 2, 8])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_short_heads_are_judged_fairly(dtype: torch.dtype, dim: int):
    """A row of few elements may cancel to nearly 0, where the unfused math happens to be right."""
    worst = 0.0
    for seed in range(20):
        q, k = (randn(1, 300, 1, 16, seed=seed + n).to(dtype) for n in (0, 50))
        v = randn(1, 300, 1, dim, seed=seed + 100).to(dtype)
        out, lse = model_of_the_kernels(q, k, v)
        worst = max(worst, compare(out, lse, q, k, v, causal="bottom-right").check().worst)
    assert worst > 0.3


def test_biases_grant_their_rounding_unless_their_keys_are_hidden():
    inputs = tensors(dtype=torch.float16)
    bias = torch.zeros(50).index_fill(0, torch.arange(25), -1e30)
    out, lse = model_of_the_kernels(*inputs, bias=bias)
    assert within(out, lse, *inputs, bias=bias) and not within(out * 1.01, lse, *inputs, bias=bias)
    bias = torch.tensor([4096.3])
    out, lse = model_of_the_kernels(*inputs, bias=bias)
    assert within(out, lse, *inputs, bias=bias)
    assert not torch.allclose(lse - 4096.3, model_of_the_kernels(*inputs)[1], rtol=0, atol=1e-5)


def test_products_of_less_precision_are_granted_their_error():
    """Inputs rounded to 12 bits: a factor is off by 2^-12 at most, a product by 2^-11, or 2^13 half ulps."""
    inputs = tensors(dtype=torch.float32)
    coarse = [x * 4097 - (x * 4097 - x) for x in inputs]  # Dekker's splitting
    results = model_of_the_kernels(*coarse)
    assert not within(*results, *inputs) and within(*results, *inputs, product_error=2**13)


def test_what_overflows_is_infinite():
    q, k, v = tensors(dtype=torch.float16)
    inputs = (q, k, v.clamp(-2, 2) * 30000)
    features = {"dropout_p": 0.5, "dropout_seed": 1, "window": (1, None)}
    out, lse = model_of_the_kernels(*inputs, **features)
    assert out.isinf().any() and not out.isinf().all() and within(out, lse, *inputs, **features)
    for wrong in (-out, out.nan_to_num(0.0, 0.0, 0.0), out.where(out != out.abs().amin(), math.inf)):
        assert not within(wrong, lse, *inputs, **features)


def test_every_row_is_judged_and_those_without_keys_are_exact():
    """Also the smallest row, beside which an error is no larger than another's tolerance, and NaN."""
    q, k, v = qkv(2, 60, 50)
    q[1, 30, 1, 3] = math.nan
    said = {"scale": 0.18, "seqused_q": ints(60, 55)}
    right = model_of_the_kernels(q, k, v, **said)
    assert within(*right, q, k, v, **said)
    small = int(right[0][0, 10:].double().abs().amax(dim=(1, 2)).argmin()) + 10
    for which, index, value in (
        (0, (0, small), right[0][0, small] * 1.1),
        *((0, (b, row, 0, 0), x) for b, row, x in ((0, 0, 1e-7), (1, 55, 1e-7), (0, 20, math.nan))),
        *((1, (b, 0, row), x) for b, row, x in ((0, 0, -1e30), (1, 55, 1e-7), (0, 20, -math.inf))),
        (1, (0, 0, 20), math.nan),
        (0, (1, 30, 1), 0.0),
    ):
        wrong = [x.clone() for x in right]
        wrong[which][index] = value
        assert not within(*wrong, q, k, v, **said)


@pytest.mark.parametrize("causal", oracle.CAUSAL)
def test_sequences_that_are_as_alike_as_heads_are_judged_alike_together(causal: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors(batch=3, heads=6, heads_kv=3, dtype=torch.float16)
    said: dict[str, Any] = {"causal": causal, "window": (30, None), "softcap": 2.0}
    found, of_rows = oracle_features.attention(q, k, v, **said)
    out, lse = found.to(q.dtype), of_rows.float()
    out[1, 7, 4] *= 1.5
    lse[2, 5, 3] += 0.1
    together = compare(out, lse, q, k, v, **said)
    monkeypatch.setattr(oracle_features, "SAME_FOR_ALL", set())
    assert together == compare(out, lse, q, k, v, **said) and min(together.out_ratio, together.lse_ratio) > 1.0


def test_shapes_and_dtypes_are_checked():
    q, k, v = tensors(dtype=torch.float16)
    out, lse = model_of_the_kernels(q, k, v)
    for given, expected in (
        ((out[:, :19], lse), r"output is .*2, 19, 4, 16.*float16.*, expected"),
        ((out.float(), lse), "output is .*float32"),
        ((out, lse.double()), r"softmax_lse is .*2, 4, 20.*float64.* expected .*float32"),
        ((out, lse.mT), "softmax_lse is"),
    ):
        with pytest.raises(AssertionError, match=expected):
            compare(*given, q, k, v).check()
    with pytest.raises(TypeError, match="windows"):
        compare(out, lse, q, k, v, windows=(1, 1))
