"""The oracle against hand-computed cases, against torch in fp64, and against planted defects.

The tolerance is only worth something if a correct online softmax stays below it and a wrong one does not, so
both are shown here with a model of the kernels' arithmetic.
"""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from tensors import qkv
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16]
LN2 = math.log(2.0)


def test_two_keys_by_hand():
    # Scores 0 and ln 3 give probabilities 1/4 and 3/4.
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).reshape(1, 1, 1, 2)
    k = torch.tensor([[0.0, 5.0], [math.log(3.0), 7.0]], dtype=torch.float64).reshape(1, 2, 1, 2)
    v = torch.tensor([[4.0, 8.0], [0.0, -4.0]], dtype=torch.float64).reshape(1, 2, 1, 2)
    out, lse = oracle.attention(q, k, v, scale=1.0)
    assert torch.allclose(out.flatten(), torch.tensor([1.0, -1.0], dtype=torch.float64), atol=1e-15)
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-15)
    # The default scale is 1 / sqrt(head_dim).
    _, scaled = oracle.attention(q, k, v)
    assert scaled.item() == pytest.approx(math.log(1.0 + 3.0 ** (1.0 / math.sqrt(2.0))), abs=1e-15)


def test_which_keys_are_visible_by_hand():
    assert oracle.visible(2, 3, "none").int().tolist() == [[1, 1, 1], [1, 1, 1]]
    assert oracle.visible(2, 3, "top-left").int().tolist() == [[1, 0, 0], [1, 1, 0]]
    assert oracle.visible(2, 3, "bottom-right").int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert oracle.visible(3, 2, "top-left").int().tolist() == [[1, 0], [1, 1], [1, 1]]
    assert oracle.visible(3, 2, "bottom-right").int().tolist() == [[0, 0], [1, 0], [1, 1]]
    with pytest.raises(ValueError, match="causal must be one of"):
        oracle.visible(1, 1, "upper-left")


def test_rows_without_a_key_are_zero_with_lse_minus_infinity():
    q, k, v = qkv(2, 5, 2)
    out, lse = oracle.attention(q, k, v, causal="bottom-right")
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert (out[:, 3:] != 0).all()
    assert lse[:, :, 3:].isfinite().all()
    assert (oracle.unfused(q, k, v, causal="bottom-right")[:, :3] == 0).all()
    out, lse = oracle.attention(q, k[:, :0], v[:, :0])
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_scores_of_minus_infinity_count_as_masked():
    q, k, v = qkv(2, 3, 6)
    q = q.abs() + 0.5
    k[:, :4, :, 0] = -math.inf
    out, lse = oracle.attention(q, k, v)
    expected, expected_lse = oracle.attention(q, k[:, 4:], v[:, 4:])
    assert torch.allclose(out, expected)
    assert torch.allclose(lse, expected_lse)


def test_ties_of_huge_scores_share_the_weight():
    q = torch.full((1, 1, 1, 1), 2.0**50, dtype=torch.float64)
    k = torch.tensor([1.0, 3.0, 3.0, -3.0], dtype=torch.float64).reshape(1, 4, 1, 1) * 2.0**50
    v = torch.tensor([9.0, 1.0, 2.0, 9.0], dtype=torch.float64).reshape(1, 4, 1, 1)
    assert oracle.attention(q, k, v, scale=1.0)[0].item() == 1.5


def test_query_heads_of_a_group_share_one_key_head():
    q, k, v = qkv(2, 7, 9, heads=6, heads_kv=2)
    out, lse = oracle.attention(q, k, v)
    for head in range(6):
        kv = slice(head // 3, head // 3 + 1)
        alone, alone_lse = oracle.attention(q[:, :, head : head + 1], k[:, :, kv], v[:, :, kv])
        assert torch.equal(out[:, :, head : head + 1], alone)
        assert torch.equal(lse[:, head : head + 1], alone_lse)
    with pytest.raises(ValueError, match="no multiple"):
        oracle.attention(q[:, :, :5], k, v)


@pytest.mark.parametrize("causal", oracle.CAUSAL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (17, 113), (113, 17), (64, 64)])
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
def test_agrees_with_torch_in_fp64(causal: str, seqlen_q: int, seqlen_k: int, scale: float | None):
    q, k, v = (x.double() for x in qkv(2, seqlen_q, seqlen_k))
    out, lse = oracle.attention(q, k, v, scale, causal)
    mask = oracle.visible(seqlen_q, seqlen_k, causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    seen = mask.any(-1)
    assert torch.allclose(out[:, seen], expected[:, seen], rtol=1e-12, atol=1e-13)
    used = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) * used
    expected_lse = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
    assert torch.allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv(2, 50, 70)
    both = oracle.attention, oracle.unfused
    whole = [*both[0](q, k, v, causal="bottom-right"), both[1](q, k, v, causal="bottom-right")]
    monkeypatch.setitem(oracle._CHUNK_ELEMENTS, "cpu", 70 * 8 * 7)
    assert len(list(oracle._chunks(q, k))) == 8
    parts = [*both[0](q, k, v, causal="bottom-right"), both[1](q, k, v, causal="bottom-right")]
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype):
    for value in (1.0, 1.5, 2.0, 100.0, 2.0**-10, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 8, 0.0):
        x = torch.tensor(value, dtype=dtype)
        above = (x.view(torch.int16) + 1).view(dtype)
        expected = above.double() - x.double()
        assert oracle.ulp(x.double(), dtype).item() == expected.item(), value


# ---- the tolerance -----------------------------------------------------------------------------------------

DEFECTS = (
    "drops the last key", "sees one key too many", "does not rescale", "pairs heads with the wrong key head",
    "scale without its sign", "lse in log2 units", "accumulates in the input dtype",
    "rounds scores to the input dtype", "leaves a row unwritten",
)  # fmt: skip


def model_of_the_kernels(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: str, defect: str = "", tile: int = 16,
    limit: float = 2.0**15,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Online softmax in fp32 with P rounded to the dtype, whose reference is raised only when a block's p
    exceed ``limit``: the loosest thing a correct kernel does. With ``defect``, one thing is wrong."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    head_of = [(h % k.shape[2] if defect == DEFECTS[3] else h // group) for h in range(heads)]
    keys, values = k[:, :, head_of].transpose(1, 2).float(), v[:, :, head_of].transpose(1, 2).float()
    if defect == DEFECTS[4]:
        scale = abs(scale)
    mask = oracle.visible(seqlen_q, seqlen_k, causal)
    if defect == DEFECTS[1]:
        mask = mask | mask.roll(1, dims=1)
    if defect == DEFECTS[0]:
        mask = mask & (torch.arange(seqlen_k) < seqlen_k - 1)
    r = torch.full((batch, heads, seqlen_q, 1), -math.inf)
    total, acc = torch.zeros_like(r), torch.zeros(batch, heads, seqlen_q, head_dim)
    for begin in range(0, seqlen_k, tile):
        block = slice(begin, min(begin + tile, seqlen_k))
        scores = (q.transpose(1, 2).float() @ keys[:, :, block].transpose(-1, -2)) * scale
        if defect == DEFECTS[7]:
            scores = scores.to(q.dtype).float()
        scores = (scores / LN2).masked_fill(~mask[:, block], -math.inf)
        trial = torch.exp2(scores - r).sum(-1, keepdim=True)
        raised = torch.where(trial <= limit, r, torch.maximum(r, scores.amax(-1, keepdim=True)))
        factor = torch.exp2(r - raised.masked_fill(raised == -math.inf, 0.0))
        if defect == DEFECTS[2]:
            factor = torch.where(r == -math.inf, factor, 1.0)
        r = raised
        p = torch.exp2(scores - r.masked_fill(r == -math.inf, 0.0))
        total = total * factor + p.sum(-1, keepdim=True)
        acc = acc * factor + p.to(q.dtype).float() @ values[:, :, block]
        if defect == DEFECTS[6]:
            acc = acc.to(q.dtype).float()
    empty = total == 0
    out = torch.where(empty, 0.0, acc / total).transpose(1, 2).to(q.dtype)
    lse = torch.where(empty, -math.inf, (r + total.log2()) * (1.0 if defect == DEFECTS[5] else LN2)).squeeze(
        -1
    )
    if defect == DEFECTS[8]:
        out[:, -1, -1] = math.nan
    return out.contiguous(), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", oracle.CAUSAL)
@pytest.mark.parametrize(("scale", "limit"), [(0.18, 1.0), (-3.0, 2.0**15)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (17, 113), (113, 17), (65, 65), (5, 1023)])
def test_a_correct_online_softmax_passes(
    dtype: torch.dtype, causal: str, scale: float, limit: float, seqlen_q: int, seqlen_k: int
):
    q, k, v = qkv(2, seqlen_q, seqlen_k, dtype=dtype, seed=seqlen_q + seqlen_k)
    out, lse = model_of_the_kernels(q, k, v, scale, causal, limit=limit)
    errors = oracle.assert_close(out, q, k, v, scale, causal, lse)
    assert errors.worst > 0.0 or seqlen_k == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_caught(dtype: torch.dtype, defect: str):
    q, k, v = qkv(2, 100, 700, dtype=dtype)
    k[:, 300:] *= 2  # later keys score higher, so that the reference has to be raised
    scale = -0.18
    out, lse = model_of_the_kernels(q, k, v, scale, "bottom-right", limit=64.0)
    assert oracle.assert_close(out, q, k, v, scale, "bottom-right", lse).worst < 0.6
    out, lse = model_of_the_kernels(q, k, v, scale, "bottom-right", defect, limit=64.0)
    with pytest.raises(AssertionError, match="times the tolerance"):
        oracle.assert_close(out, q, k, v, scale, "bottom-right", lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_in_the_smallest_row_is_not_hidden_by_the_largest(dtype: torch.dtype):
    q, k, v = qkv(2, 400, 400, dtype=dtype)
    out, _ = model_of_the_kernels(q, k, v, 0.18, "top-left")
    oracle.assert_close(out, q, k, v, 0.18, "top-left")
    small = out.double().abs().amax(dim=(0, 2, 3)).argmin()
    out[:, small] *= 1.1
    with pytest.raises(AssertionError, match="times the tolerance"):
        oracle.assert_close(out, q, k, v, 0.18, "top-left")


def test_masked_rows_must_be_exactly_zero_and_minus_infinity():
    q, k, v = qkv(2, 6, 2)
    out, lse = model_of_the_kernels(q, k, v, 0.18, "bottom-right")
    oracle.assert_close(out, q, k, v, 0.18, "bottom-right", lse)
    wrong = [(out, (0, 0, 0, 0), 1e-7), (lse, (0, 0, 0), -1e30), (lse, (0, 0, 5), -math.inf)]
    for tensor, index, value in wrong:
        wrong = {"out": out.clone(), "lse": lse.clone()}
        wrong["out" if tensor is out else "lse"][index] = value
        with pytest.raises(AssertionError, match="times the tolerance"):
            oracle.assert_close(wrong["out"], q, k, v, 0.18, "bottom-right", wrong["lse"])


def test_nan_belongs_where_the_reference_has_it_and_nowhere_else():
    q, k, v = qkv(2, 6, 20)
    q[0, 2, 1, 3] = math.nan
    out, lse = model_of_the_kernels(q, k, v, 0.18, "none")
    oracle.assert_close(out, q, k, v, 0.18, "none", lse)
    with pytest.raises(AssertionError, match="times the tolerance"):
        oracle.assert_close(out.nan_to_num(0.0), q, k, v, 0.18, "none", lse)


def test_shapes_and_dtypes_are_checked():
    q, k, v = qkv(2, 6, 6)
    out, lse = model_of_the_kernels(q, k, v, 0.18, "none")
    with pytest.raises(AssertionError, match=r"output is \[2, 5, 4, 32\] float16 on cpu, expected"):
        oracle.assert_close(out[:, :5], q, k, v)
    with pytest.raises(AssertionError, match=r"output is .* float32"):
        oracle.assert_close(out.float(), q, k, v)
    with pytest.raises(AssertionError, match=r"softmax_lse is \[2, 4, 6\] float64 .*, expected .* float32"):
        oracle.assert_close(out, q, k, v, lse=lse.double())
    with pytest.raises(AssertionError, match="softmax_lse is"):
        oracle.assert_close(out, q, k, v, lse=lse.transpose(1, 2))
