"""The CPU backend with everything that a call may say, against the oracle: corners, drawn mixes, memory."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import oracle_features
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launches import compare
from listed_problems import GROUPS, is_short, listed
from problems import Problem, problems
from tensors import ints, qkv, randn
from torch import Tensor

from cutlass_fmha import attention
from cutlass_fmha.cpu import plain

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CAUSAL = ["none", "top-left", "bottom-right"]


tensors = functools.partial(qkv, head_dim=16, dtype=torch.float32)
#: What torch's fused kernel takes.
fused = functools.partial(qkv, heads=2, heads_kv=2, head_dim=8, dtype=torch.float32)


def check(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    assert out.is_contiguous() and lse.is_contiguous()
    arguments["causal"] = arguments.get("causal", "none")
    oracle_features.compare(out, lse, q, k, v, **arguments).check()
    return out, lse


# ---- what is in no drawn or listed problem ----------------------------------------------------------------

CORNERS = {
    "bias of huge numbers": {"bias": torch.zeros(33, 65).masked_fill(randn(33, 65, seed=2) > 0.5, -3e38)},
    "huge sinks": {"sinks": torch.tensor([-math.inf, -1e30, 40.0, 1e4])},
    "a negative seed": {"dropout_p": 0.99, "dropout_seed": -3},
    "prefix beyond the end": {"prefix_lengths": ints(100, 1)},
    "more than there is": {"seqused_q": ints(99, 7), "seqused_k": ints(99, 50)},
    "an entry for all": {"cache_batch_idx": ints(1, 1)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CORNERS)
def test_corners(name: str, dtype: torch.dtype):
    for causal in CAUSAL:
        for scale in (None, -0.6):
            check(*tensors(dtype=dtype), **CORNERS[name], causal=causal, scale=scale)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_scores(scale: float):
    q, k, v = tensors()
    check(q, k, v, scale=scale, softcap=3.0, bias=randn(33, 65))
    check(q * 1e-20, k * 1e-20, v * 1e30, scale=scale, sinks=randn(4))


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_chunk_borders_change_nothing(monkeypatch, chunk: int):
    monkeypatch.setattr(plain, "KEYS_PER_CHUNK", chunk)
    monkeypatch.setattr(plain, "SCORES_PER_CHUNK", 0)
    monkeypatch.setattr(plain, "MIN_QUERIES_PER_CHUNK", chunk)
    for causal in CAUSAL:  # without features, which another function computes
        check_problem(Problem(37, 53, causal, num_heads=4, head_dim=8, head_dim_v=8), torch.float32)
    every = {"sinks": "normal", "alibi": "h", "num_heads": 4, "num_heads_kv": 2, "head_dim": 16}
    for said in (
        {"window": (9, 4)}, {"mask": ("hqk", "plain")}, {"dropout": 0.3}, {"prefix": True},
        {"blocks": (16, 13)}, {"leftpad": True, "used_k": True},
    ):  # fmt: skip
        check_problem(Problem(33, 65, **every, **said, seed=3), torch.float32)


# ---- its two ways to the result, and its memory ------------------------------------------------------------


@pytest.mark.parametrize("seqlen_k", [0, 7])
@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
def test_the_lse_is_fp32_whatever_the_default_dtype(default: torch.dtype, seqlen_k: int):
    q, k, v = fused(1, 5, seqlen_k)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        out, lse = attention(q, k, v, return_lse=True)
    finally:
        torch.set_default_dtype(before)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_an_lse_of_zero_is_not_mistaken():
    """One key that a query of zeros scores with 0: LSE 0, which torch's kernel also uses for "no key"."""
    q, k, v = fused(1, 3, 1)
    out, lse = check(torch.zeros_like(q), k, v)
    assert (lse == 0).all() and torch.equal(out, v.expand_as(out))


def test_nan_stays_in_its_row():
    q, k, v = fused(1, 5, 9)
    q[0, 3, 1] = math.nan
    out, lse = attention(q, k, v, return_lse=True)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3, 1]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 3]]


def test_the_fused_kernel_is_used_where_it_does_the_same_job(monkeypatch):
    used = []
    original = plain._torch_flash
    monkeypatch.setattr(plain, "_torch_flash", lambda *a: used.append(a) or original(*a))
    for expected, shape, causal, scale in [
        *[(True, (8, 8, 2), "none", scale) for scale in (None, -1.0)],
        *[(True, (8, 8, 2), "bottom-right", None), (True, (8, 9, 2), "top-left", None)],
        (True, (1, 9, 2), "bottom-right", None),  # decoding: nothing is hidden
        (False, (8, 9, 2), "bottom-right", None),
        *[(False, (8, 8, 2), "top-left", scale) for scale in (-1.0, 0.0)],
        *[(False, (8, 8, 1), "none", None), (False, (8, 0, 2), "none", None)],
    ]:
        used.clear()
        check(*fused(1, *shape[:2], heads_kv=shape[2]), scale=scale, causal=causal)
        assert bool(used) == expected, (shape, causal, scale)


SAID: dict[str, Any] = {"causal": True, "window": (700, 0), "alibi_slopes": torch.ones(4), "softcap": 2.0}
LONG = {
    "plain": lambda: plain.forward(*tensors(1, 4096, 4096, head_dim=8), 1.0, -1),
    "features": lambda: attention(*tensors(1, 1024, 1024, head_dim=8), **SAID),
}


@pytest.mark.parametrize("way", LONG)
def test_scores_never_exist_as_a_whole(way: str):
    """The largest tensor that is made stays far below seqlen_q x seqlen_k."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor) and x.dim():
                    largest = max(largest, x.numel() if x.stride(-1) else 0)
            return result

    with Watch():
        LONG[way]()
    assert 0 < largest <= plain.SCORES_PER_CHUNK < 1024 * 1024


# ---- the same bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_and_do_not_depend_on_the_batch(dtype: torch.dtype):
    q, k, v = tensors(5, 40, 300, dtype=dtype)
    arguments = {"causal": True, "softcap": 3.0, "sinks": randn(4), "batch_invariant": True}
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    for _ in range(3):
        again, lse_again = attention(q, k, v, return_lse=True, **arguments)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
    for b in range(5):
        alone, lse_alone = attention(*(x[b : b + 1] for x in (q, k, v)), return_lse=True, **arguments)
        assert torch.equal(out[b], alone[0]) and torch.equal(lse[b], lse_alone[0])


# ---- mixes -------------------------------------------------------------------------------------------------


def check_problem(problem: Problem, dtype: torch.dtype) -> None:
    call = problem.call(dtype, "cpu")
    said = {"scale": call.scale, "causal": call.causal, **call.features}
    out, lse = attention(call.q, call.k, call.v, return_lse=True, **said)
    # Products are summed in fp32 one after another, and not several at a time as by a tensor core.
    compare(call, out, lse, float(problem.head_dim)).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [*GROUPS, "plain"])
def test_listed_mixes(group: str, dtype: torch.dtype):
    plain = (replace(p, head_dim=24, head_dim_v=24) for p in listed() if is_short(p))
    for problem in GROUPS.get(group, plain):
        check_problem(problem, dtype)


@example(Problem(1, 1, scale=1.0, fill="constant"), torch.float16)
@given(problem=problems(longest=300), dtype=st.sampled_from(DTYPES[:3]))
@settings(max_examples=200)
def test_drawn_mixes(problem: Problem, dtype: torch.dtype):
    check_problem(problem, dtype)
