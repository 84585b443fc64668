"""The CPU backend with everything that a call may say, against the oracle: corners, drawn mixes, memory, dropout."""

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import oracle_features
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launches import compare
from problems import GROUPS, Problem, is_short, listed, problems
from tensors import ints, qkv, randn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cutlass_fmha import _C, attention, dropout, dropout_mask
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


CORNERS = {
    "bias of huge numbers": {"bias": torch.zeros(33, 65).masked_fill(randn(33, 65, seed=2) > 0.5, -3e38)},
    "huge sinks": {"sinks": torch.tensor([-math.inf, -1e30, 40.0, 1e4])},
    "more than there is": {"seqused_q": ints(99, 7), "seqused_k": ints(99, 50)},
    "an entry for all": {"cache_batch_idx": ints(1, 1)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CORNERS)
def test_corners(name: str, dtype: torch.dtype):
    for causal in CAUSAL:
        for scale in (None, -0.6):
            check(*tensors(dtype=dtype), **CORNERS[name], causal=causal, scale=scale)
    q, k, v = tensors()
    for scale in (1e-30, 1e30):
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


@pytest.mark.parametrize("seqlen_k", [0, 7])
@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
def test_the_lse_is_fp32_whatever_the_default_dtype(default: torch.dtype, seqlen_k: int, request: Any):
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(default)
    assert [x.dtype for x in attention(*fused(1, 5, seqlen_k), return_lse=True)] == [torch.float32] * 2


def test_an_lse_of_zero_is_not_mistaken_and_nan_stays_in_its_row():
    """One key that a query of zeros scores with 0: LSE 0, which torch's kernel also uses for "no key"."""
    q, k, v = fused(1, 3, 1)
    out, lse = check(torch.zeros_like(q), k, v)
    assert (lse == 0).all() and torch.equal(out, v.expand_as(out))
    q, k, v = fused(1, 5, 9)
    q[0, 3, 1] = math.nan
    out, lse = attention(q, k, v, return_lse=True)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3, 1]] and lse.isnan().nonzero().tolist() == [[0, 1, 3]]


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


@pytest.mark.parametrize("said", [{}, {"window": (700, 0), "alibi_slopes": torch.ones(4), "softcap": 2.0}], ids=str)
def test_scores_never_exist_as_a_whole(said: dict[str, Any]):
    largest, given = [0], tensors(1, 1024 if said else 4096, 1024 if said else 4096, head_dim=8)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dim() and x.stride(-1)]
            largest.extend(x.numel() for x in made)
            return result

    with Watch():
        _ = attention(*given, causal=True, **said) if said else plain.forward(*given, 1.0, -1)
    assert 0 < max(largest) <= plain.SCORES_PER_CHUNK < 1024 * 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_batch(dtype: torch.dtype):
    given = tensors(5, 300, 300, dtype=dtype)
    for said in ({"softcap": 3.0, "sinks": randn(4)}, {"batch_invariant": True}):  # which a plain call has to say
        expected = attention(*given, causal=True, return_lse=True, **said)
        for b in range(5):
            alone = attention(*(x[b : b + 1] for x in given), causal=True, return_lse=True, **said)
            assert all(torch.equal(x[0], whole[b]) for x, whole in zip(alone, expected, strict=True))


def check_problem(problem: Problem, dtype: torch.dtype) -> None:
    call = problem.call(dtype, "cpu")
    found = attention(call.q, call.k, call.v, return_lse=True, scale=call.scale, causal=call.causal, **call.features)
    # Products are summed in fp32 one after another, and not several at a time as by a tensor core.
    compare(call, *found, float(problem.head_dim)).check()


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


# Known answers of Random123 (Salmon, Moraes, Dror and Shaw 2011) for philox4x32-7: key, counter, words.
ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
     (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]  # fmt: skip


@pytest.mark.parametrize(("key", "counter", "words"), ANSWERS)
def test_philox_gives_the_known_answers(key: tuple, counter: tuple, words: tuple):
    ours = dropout.philox(key, tuple(torch.tensor([word]) for word in counter))
    for found in (ours, oracle_features.philox(key, counter), _C.host.philox(key[0] | key[1] << 32, counter)):
        assert tuple(map(int, found)) == words


@pytest.mark.parametrize(
    ("p", "below"), [(0.0, 0), (1e-6, 0), (0.3, 19661), (0.48439, 31746), (0.9999, 65529), (1 - 1e-9, 65535)]
)
@pytest.mark.parametrize("seed", [7, -1, torch.tensor([2**63 - 1])], ids=str)
def test_the_mask_is_the_oracles(seed: int | Tensor, p: float, below: int, monkeypatch: pytest.MonkeyPatch):
    """``below`` of 65536 numbers drop."""
    monkeypatch.setattr(dropout, "_CHUNK", 2000)  # several queries at a time, and not all
    mask = dropout_mask(seed, 3, 4, 33, 70, p)
    assert mask.dtype == torch.bool
    expected = [oracle_features.kept(int(seed) % 2**64, below, b, 4, 33, 70) for b in range(3)]
    assert torch.equal(mask, torch.from_numpy(np.stack(expected)))
    for shape in [(0, 4, 3, 5), (2, 0, 3, 5), (2, 4, 0, 5), (2, 4, 3, 0)]:
        assert dropout_mask(seed, *shape, p).shape == shape


def test_a_seed_is_drawn_where_none_is_given():
    call = functools.partial(attention, *torch.randn(3, 1, 64, 2, 16))
    state = torch.get_rng_state()
    first, second = (call(dropout_p=0.5) for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(call(dropout_p=0.5), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    for said in ({"dropout_p": 0.5, "dropout_seed": 3}, {"dropout_p": 0.0}, {"softcap": 2.0}):
        call(**said)
        assert torch.equal(torch.get_rng_state(), state)
