"""The CPU backend with everything that a call may say, against the oracle: corners, and drawn mixes."""

from __future__ import annotations

import math
from typing import Any

import oracle_features
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launches import compare
from listed_problems import GROUPS
from problems import Problem, problems
from tensors import ints, randn
from torch import Tensor

from cutlass_fmha import attention
from cutlass_fmha.cpu import plain

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CAUSAL = ["none", "top-left", "bottom-right"]
HEADS, HEADS_KV = 4, 2


def tensors(
    batch: int = 2, seqlen_q: int = 33, seqlen_k: int = 65, dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q = randn(batch, seqlen_q, HEADS, dim, dtype=dtype, seed=1)
    k = randn(batch, seqlen_k, HEADS_KV, dim, dtype=dtype, seed=2)
    return q, k, randn(batch, seqlen_k, HEADS_KV, dim, dtype=dtype, seed=3)


def check(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    assert out.is_contiguous() and lse.is_contiguous()
    arguments["causal"] = arguments.get("causal", "none")
    oracle_features.compare(out, lse, q, k, v, **arguments).check()
    return out, lse


def lists(
    sparsity: float, batch: int, heads: int, blocks_q: int, blocks_k: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Block lists of a random mask of blocks, what is behind the counts left as it comes."""
    numbers = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch, heads, blocks_q, blocks_k, generator=numbers) > sparsity
    order = torch.arange(blocks_k).where(kept, 10**6).sort(-1).values
    return kept.sum(-1, dtype=torch.int32), order.to(torch.int32)


# ---- one feature at a time ---------------------------------------------------------------------------------

SCORES = {
    "softcap": {"softcap": 1.5},
    "window": {"window": (9, 4)},
    "left window": {"window": (9, None)},
    "empty window": {"window": (0, 0)},
    "mask": {"mask": randn(HEADS, 33, 65, seed=1) > 0.3},
    "mask of keys": {"mask": randn(2, 1, 1, 65, seed=1) > 0.3},
    "bias": {"bias": 3 * randn(2, HEADS, 33, 65, seed=1)},
    "bias of heads": {"bias": 3 * randn(HEADS, 1, 1, seed=1)},
    "bias with -inf": {"bias": randn(33, 65, seed=1).masked_fill(randn(33, 65, seed=2) > 0.5, -math.inf)},
    "bias of huge numbers": {"bias": torch.zeros(33, 65).masked_fill(randn(33, 65, seed=2) > 0.5, -3e38)},
    "alibi": {"alibi_slopes": randn(HEADS, seed=1)},
    "alibi of batches": {"alibi_slopes": 0.3 * randn(2, HEADS, seed=1)},
    "sinks": {"sinks": 2 * randn(HEADS, seed=1)},
    "huge sinks": {"sinks": torch.tensor([-math.inf, -1e30, 40.0, 1e4])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 3},
    "nearly all dropped": {"dropout_p": 0.99, "dropout_seed": -3},
    "prefix": {"prefix_lengths": ints(0, 40), "window": (3, 2)},
    "prefix beyond the end": {"prefix_lengths": ints(100, 1), "causal": "top-left"},
    "block lists": {"block_mask": (*lists(0.5, 2, 1, 3, 5), (16, 13))},
    "block lists of heads": {"block_mask": (*lists(0.5, 1, HEADS, 5, 3), (8, 30))},
    "lengths": {"seqused_q": ints(33, 7), "seqused_k": ints(0, 50)},
    "more than there is": {"seqused_q": ints(99, 7), "seqused_k": ints(99, 50)},
    "left padding": {"leftpad_k": ints(3, 64), "seqused_k": ints(40, 64)},
    "cache entries": {"cache_batch_idx": ints(1, 1)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_each_feature(name: str, dtype: torch.dtype):
    arguments = SCORES[name]
    for causal in ["causal"] if "causal" in arguments else CAUSAL:
        check(*tensors(dtype=dtype), **({"causal": causal} | arguments))
    check(*tensors(dtype=dtype), **({"scale": -0.6, "causal": "bottom-right"} | arguments))


LENGTHS = [(1, 1), (1, 17), (17, 1), (17, 113), (113, 17), (1, 1023), (1023, 17), (113, 1023), (0, 5), (5, 0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_odd_lengths(lengths: tuple[int, int], dtype: torch.dtype):
    seqlen_q, seqlen_k = lengths
    q, k, v = tensors(1, seqlen_q, seqlen_k, dtype=dtype)
    bias, mask = randn(1, HEADS, 1, seqlen_k), randn(seqlen_q, seqlen_k) > -1
    added = {"bias": bias, "alibi_slopes": randn(HEADS), "sinks": randn(HEADS)}
    check(q, k, v, causal="bottom-right", window=(40, 10), **added)
    check(q, k, v, causal="top-left", mask=mask, dropout_p=0.2, dropout_seed=1, softcap=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_has_its_own_head_dim(dtype: torch.dtype):
    for dim, dim_v in [(16, 24), (24, 16), (1, 3), (192, 128)]:
        q, k, _ = tensors(dim=dim, dtype=dtype)
        out, _ = check(q, k, randn(2, 65, HEADS_KV, dim_v, dtype=dtype), causal="bottom-right")
        assert out.shape == (2, 33, HEADS, dim_v)


def test_rows_without_a_key_are_zero():
    q, k, v = tensors(2, 8, 12)
    hidden = torch.ones(2, 1, 8, 12, dtype=torch.bool)
    hidden[1, :, 2:5] = False
    out, lse = check(q, k, v, mask=hidden)
    assert (out[1, 2:5] == 0).all() and (lse[1, :, 2:5] == -math.inf).all() and lse[0].isfinite().all()
    sinks = randn(HEADS)
    out, lse = check(q, k, v, mask=hidden, sinks=sinks)
    assert (out[1, 2:5] == 0).all() and torch.equal(lse[1, :, 2:5], sinks[:, None].expand(HEADS, 3))
    out, lse = check(q, k, v, seqused_q=ints(3, 0), seqused_k=ints(2, 2), sinks=sinks)
    assert (out[0, 3:] == 0).all() and (out[1] == 0).all()
    assert (lse[0, :, 3:] == -math.inf).all() and (lse[1] == -math.inf).all()


def test_what_is_hidden_may_be_anything():
    """Rows of key and value that no sequence uses are not read: NaN there goes nowhere."""
    q, k, v = tensors(2, 5, 40)
    k[0, 30:], v[0, 30:], k[1, :3], v[1, :3] = math.nan, math.nan, math.nan, math.nan
    out, _ = check(q, k, v, seqused_k=ints(30, 40), leftpad_k=ints(0, 3))
    assert out.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_scores(scale: float):
    q, k, v = tensors()
    check(q, k, v, scale=scale, softcap=3.0, bias=randn(33, 65))
    check(q * 1e-20, k * 1e-20, v * 1e30, scale=scale, sinks=randn(HEADS))


def test_strides_are_free():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    wide = randn(2, 33, HEADS, 130)[:, :, :, ::2].permute(
        0, 2, 1, 3
    )  # [batch, num_heads, seqlen_q, seqlen_k]
    check(q, k[..., :].expand_as(k), v, bias=wide, mask=(randn(65, 33) > 0).T)
    check(q, k[:1].expand_as(k), v, alibi_slopes=randn(8)[::2], bias=randn(1, 1, 1).expand(2, HEADS, 33, 65))


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_chunk_borders_change_nothing(monkeypatch, chunk: int):
    monkeypatch.setattr(plain, "KEYS_PER_CHUNK", chunk)
    monkeypatch.setattr(plain, "SCORES_PER_CHUNK", 0)
    monkeypatch.setattr(plain, "MIN_QUERIES_PER_CHUNK", chunk)
    q, k, v = tensors()
    for name in ("window", "mask", "dropout", "prefix", "block lists", "left padding"):
        check(q, k, v, sinks=randn(HEADS), alibi_slopes=randn(HEADS), **SCORES[name])


# ---- where the rows are ------------------------------------------------------------------------------------


def starts(lengths: list[int], first: int = 0) -> Tensor:
    return torch.tensor([first, *lengths]).cumsum(0).to(torch.int32)


def test_packed_sequences_are_the_loop_over_them():
    lengths_q, lengths_k = [5, 0, 17, 1, 30], [9, 4, 0, 1, 113]
    q, k, v = randn(53, HEADS, 16), randn(127, HEADS_KV, 16), randn(127, HEADS_KV, 8)
    cu_q, cu_k = starts(lengths_q), starts(lengths_k)
    slopes, bias = randn(5, HEADS), randn(5, HEADS, 30, 113)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 30, "max_seqlen_k": 113}
    out, lse = check(
        q, k, v, causal="bottom-right", window=(20, None), alibi_slopes=slopes, bias=bias, **packed
    )
    assert out.shape == (53, HEADS, 8) and lse.shape == (HEADS, 53)
    for b in range(5):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = {"alibi_slopes": slopes[b], "bias": bias[b, :, : lengths_q[b], : lengths_k[b]]}
        alone = [x[None] for x in (q[rows], k[keys], v[keys])]
        out_b, lse_b = attention(*alone, causal=True, window=(20, None), **own, return_lse=True)
        assert torch.equal(out[rows], out_b[0]) and torch.equal(lse[:, rows], lse_b[0])


def test_rows_that_no_sequence_covers_are_left_alone():
    q, k, v = randn(20, HEADS, 16), randn(30, HEADS_KV, 16), randn(30, HEADS_KV, 16)
    q[:3], k[:5], v[25:] = math.nan, math.nan, math.nan
    out, lse = check(q, k, v, cu_seqlens_q=ints(3, 9, 15), cu_seqlens_k=ints(5, 11, 25), causal="top-left")
    assert out[3:15].isfinite().all() and lse[:, 3:15].isfinite().all()


def test_one_side_may_be_packed():
    q, k, v = tensors(3, 7, 20)
    cu = ints(0, 20, 40, 60)
    expected = attention(q, k, v, causal=True, softcap=2.0)
    packed = {"causal": True, "softcap": 2.0, "cu_seqlens_k": cu}
    assert torch.equal(attention(q, k.flatten(0, 1), v.flatten(0, 1), **packed), expected)
    out = attention(q.flatten(0, 1), k, v, causal=True, softcap=2.0, cu_seqlens_q=ints(0, 7, 14, 21))
    assert torch.equal(out, expected.flatten(0, 1))


@pytest.mark.parametrize("page_size", [16, 112])
def test_pages_are_a_contiguous_cache_in_pieces(page_size: int):
    q, k, v = tensors(3, 4, 7 * 16)
    pages = 7 * 16 // page_size
    order = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(0))
    shuffled = [x.reshape(3 * pages, page_size, HEADS_KV, -1)[order] for x in (k, v)]
    table = order.argsort().view(3, pages).to(torch.int32)
    used = ints(112, 50, 0)
    table[1, -(-50 // page_size) :], table[2] = -1, 10**9  # what is not in use is not looked at
    arguments = {"seqused_k": used, "causal": "bottom-right", "leftpad_k": ints(0, 20, 0)}
    out, lse = check(q, *shuffled, page_table=table, **arguments)
    expected, expected_lse = attention(q, k, v, return_lse=True, **arguments)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


# ---- the same bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_and_do_not_depend_on_the_batch(dtype: torch.dtype):
    q, k, v = tensors(5, 40, 300, dtype=dtype)
    arguments = {"causal": True, "softcap": 3.0, "sinks": randn(HEADS), "batch_invariant": True}
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    for _ in range(3):
        again, lse_again = attention(q, k, v, return_lse=True, **arguments)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
    for b in range(5):
        alone, lse_alone = attention(*(x[b : b + 1] for x in (q, k, v)), return_lse=True, **arguments)
        assert torch.equal(out[b], alone[0]) and torch.equal(lse[b], lse_alone[0])


def test_dropout_is_a_function_of_the_seed_and_the_place():
    q, k, v = tensors(2, 40, 300)
    first = attention(q, k, v, dropout_p=0.3, dropout_seed=5)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.3, dropout_seed=torch.tensor([5])))
    assert not torch.equal(first, attention(q, k, v, dropout_p=0.3, dropout_seed=6))
    _, lse = attention(q, k, v, return_lse=True, softcap=1e6)
    _, lse_dropped = attention(q, k, v, return_lse=True, softcap=1e6, dropout_p=0.3, dropout_seed=5)
    assert torch.equal(lse, lse_dropped)


# ---- mixes -------------------------------------------------------------------------------------------------


def check_problem(problem: Problem, dtype: torch.dtype) -> None:
    call = problem.call(dtype, "cpu")
    said = {"scale": call.scale, "causal": call.causal, **call.features}
    out, lse = attention(call.q, call.k, call.v, return_lse=True, **said)
    # Products are summed in fp32 one after another, and not several at a time as by a tensor core.
    compare(call, out, lse, float(problem.head_dim)).check()


@pytest.mark.parametrize("group", GROUPS)
def test_listed_mixes(group: str):
    for number, problem in enumerate(GROUPS[group]):
        check_problem(problem, DTYPES[number % 3])


@example(Problem(1, 1, scale=1.0, fill="constant"), torch.float16)
@given(problem=problems(longest=300), dtype=st.sampled_from(DTYPES[:3]))
@settings(max_examples=200)
def test_drawn_mixes(problem: Problem, dtype: torch.dtype):
    check_problem(problem, dtype)
