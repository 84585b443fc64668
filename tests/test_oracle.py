"""The oracle against planted defects; test_cpu.py has what is right."""

import functools
import math
from typing import Any

import oracle
import oracle_features
import pytest
import torch
from oracle_features import compare
from tensors import ints, qkv
from tensors import randn as random
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LN2 = math.log(2.0)
randn = functools.partial(random, dtype=torch.float64)
tensors = functools.partial(qkv, seqlen_q=20, seqlen_k=50, head_dim=16, dtype=torch.float64)


def within(out: Tensor, lse: Tensor | None, *inputs: Tensor, **said: Any) -> bool:
    return compare(out, lse, *inputs, **({"causal": "bottom-right"} | said)).worst <= 1.0


@pytest.mark.parametrize("dtype", HALF)
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype):
    for value in (1.0, 1.5, 2.0, 100.0, 2.0**-10, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 8, 0.0):
        x = torch.tensor(value, dtype=dtype)
        above = (x.view(torch.int16) + 1).view(dtype)
        assert oracle.ulp(x.double(), dtype).item() == (above.double() - x.double()).item(), value


def kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: str = "bottom-right", defect: str = "",
    **features: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in fp32 with P rounded to the dtype before its sum divides it. With ``defect``, one thing is wrong."""
    if defect == "pairs heads with the wrong key head":
        k, v = (x[:, :, [0, 1, 0, 1]] for x in (k, v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    for s in oracle_features.sequences(q, k, v, scale, causal, oracle_features.Features(**features)):
        rows, values = slice(0, len(s.q)), s.per_query_head(s.v).float()
        scores = s.scores(rows, torch.float32)
        if defect == "rounds scores to the input dtype":
            scores = scores.to(q.dtype).float()
        sinks = torch.full((q.shape[2],), -math.inf) if s.features.sinks is None else s.features.sinks
        seen = scores.masked_fill(~s.visible(rows), -math.inf)
        scores = torch.cat([sinks[:, None, None].expand(-1, len(s.q), 1), seen], -1)
        top = scores.cummax(-1).values if defect == "does not rescale" else scores.amax(-1, keepdim=True)
        p = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
        total = p.sum(-1, keepdim=True)
        p = s.dropped(p[..., 1:], rows).to(q.dtype).float()
        acc = torch.zeros(*p.shape[:2], v.shape[-1])
        for block in (slice(begin, begin + 16) for begin in range(0, len(s.k), 16)):
            acc = acc + p[..., block] @ values[:, block]
            if defect == "accumulates in the input dtype":
                acc = acc.to(q.dtype).float()
        out[s.number, rows] = torch.where(total == 0, 0.0, acc * s.factor / total).transpose(0, 1).to(q.dtype)
        units = LN2 if defect == "lse in log2 units" else 1.0
        lse[s.number, :, rows] = (scores.amax(-1) + total.squeeze(-1).log()) / units
    if defect == "leaves a row unwritten":
        out[:, -1, -1] = math.nan
    return out, lse


SLOPES, SINKS = torch.tensor([0.05, 0.2, 0.1, 0.0]), torch.tensor([1.0, -2.0, 4.0, 0.0])
MIX = {
    "causal": "none", "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS, "window": (60, 5),
    "dropout_p": 0.2, "dropout_seed": 9, "seqused_q": ints(60, 100), "seqused_k": ints(130, 70),
    "bias": randn(2, 1, 100, 130),
}  # fmt: skip
PLAIN = {"scale": -0.18, "causal": "bottom-right"}


def test_rows_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch):
    inputs = tensors(seqlen_q=100, seqlen_k=130)
    whole = oracle_features.attention(*inputs, **MIX)
    monkeypatch.setitem(oracle_features.CHUNK, "cpu", 7 * 4 * 130)
    assert all(map(torch.allclose, oracle_features.attention(*inputs, **MIX), whole))
    compare(whole[0], whole[1].float(), *inputs, **MIX).check()


#: Of a problem that says everything, and of one that says nothing: what a wrong kernel does.
OF_MIX: dict[str, Any] = {
    "no softcap": {"softcap": 0.0}, "another softcap": {"softcap": 2.9},
    "slopes of the next head": {"alibi_slopes": SLOPES.roll(1)},
    "no sink": {"sinks": None}, "sink of the next head": {"sinks": SINKS.roll(1)},
    "window a key too long": {"window": (61, 5)}, "window a key too short": {"window": (60, 4)},
    "another seed": {"dropout_seed": 10}, "no dropout": {"dropout_p": 0.0},
    "another probability": {"dropout_p": 0.19},
    "bias of the next key": {"bias": MIX["bias"].roll(1, -1)},  # type: ignore[attr-defined]
    "a query too many": {"seqused_q": ints(61, 100)}, "a key too many": {"seqused_k": ints(130, 71)},
}  # fmt: skip
OF_PLAIN: dict[str, Any] = {
    "drops the last key": {"seqused_k": ints(699, 700)}, "scale without its sign": {"scale": 0.18},
    "sees one key too many": {"window": (-1, 1), "causal": "none"},
}  # fmt: skip
DEFECTS = (
    *("does not rescale", "lse in log2 units", "accumulates in the input dtype", "rounds scores to the input dtype"),
    *("leaves a row unwritten", "pairs heads with the wrong key head"),
)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [*OF_MIX, *OF_PLAIN, *DEFECTS])
def test_a_defect_is_caught(name: str, dtype: torch.dtype):
    inputs, said = tensors(seqlen_q=100, seqlen_k=130, dtype=dtype), MIX
    if name not in OF_MIX:
        inputs, said = qkv(2, 100, 700, dtype=dtype), PLAIN
        inputs[1][:, 300:] *= 2  # later keys score higher
    good = compare(*kernel(*inputs, **said), *inputs, **said).check()
    assert 0.0 < good.out_ratio < 0.7 and 0.0 < good.lse_ratio < 0.6
    out, lse = kernel(*inputs, **(said | (OF_MIX | OF_PLAIN).get(name, {"defect": name})))
    for given in [lse] if name in ("a query too many", "lse in log2 units") else [lse, None]:
        with pytest.raises(AssertionError, match="times the tolerance"):
            compare(out, given, *inputs, **said).check()


def test_biases_grant_no_rounding_where_their_keys_are_hidden():
    inputs = tensors(dtype=torch.float16)
    bias = torch.zeros(50).index_fill(0, torch.arange(25), -1e30)
    out, lse = kernel(*inputs, bias=bias)
    assert within(out, lse, *inputs, bias=bias) and not within(out * 1.01, lse, *inputs, bias=bias)


def test_products_of_less_precision_are_granted_their_error():
    """Inputs rounded to 12 bits: a factor is off by 2^-12 at most, a product by 2^-11, or 2^13 half ulps."""
    inputs = tensors(dtype=torch.float32)
    coarse = [x * 4097 - (x * 4097 - x) for x in inputs]  # Dekker's splitting
    results = kernel(*coarse)
    assert not within(*results, *inputs) and within(*results, *inputs, product_error=2**13)


def test_what_overflows_is_infinite():
    q, k, v = tensors(dtype=torch.float16)
    inputs = (q, k, v.clamp(-2, 2) * 30000)
    features = {"dropout_p": 0.5, "dropout_seed": 1, "window": (1, None)}
    out, lse = kernel(*inputs, **features)
    assert out.isinf().any() and not out.isinf().all() and within(out, lse, *inputs, **features)
    for wrong in (-out, out.nan_to_num(0.0, 0.0, 0.0), out.where(out != out.abs().amin(), math.inf)):
        assert not within(wrong, lse, *inputs, **features)


def test_every_row_is_judged_and_those_without_keys_are_exact():
    """Also the smallest row, beside which an error is no larger than another's tolerance, and NaN."""
    q, k, v = qkv(2, 60, 50)
    q[1, 30, 1, 3] = math.nan
    said = {"scale": 0.18, "seqused_q": ints(60, 55)}
    right = kernel(q, k, v, **said)
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


def test_sequences_that_are_as_alike_as_heads_are_judged_alike_together(monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors(batch=3, heads=6, heads_kv=3, dtype=torch.float16)
    said: dict[str, Any] = {"causal": "top-left", "window": (30, None), "softcap": 2.0}
    found, of_rows = oracle_features.attention(q, k, v, **said)
    out, lse = found.to(q.dtype), of_rows.float()
    out[1, 7, 4] *= 1.5
    lse[2, 5, 3] += 0.1
    together = compare(out, lse, q, k, v, **said)
    monkeypatch.setattr(oracle_features, "SAME_FOR_ALL", set())
    assert together == compare(out, lse, q, k, v, **said) and min(together.out_ratio, together.lse_ratio) > 1.0


def test_shapes_and_dtypes_are_checked():
    q, k, v = tensors(dtype=torch.float16)
    out, lse = kernel(q, k, v)
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
