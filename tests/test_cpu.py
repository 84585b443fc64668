"""The CPU backend in every corner, its two ways to the result, and its memory."""

from __future__ import annotations

import functools
import math

import oracle_features
import pytest
import torch
from tensors import qkv

from cutlass_fmha import attention
from cutlass_fmha.cpu import plain

tensors = functools.partial(qkv, dtype=torch.float32)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check(q, k, v, scale=None, causal="none", exact_scores=False):
    out, lse = attention(q, k, v, scale=scale, causal=causal, return_lse=True)
    # Products are summed in fp32 one after another, and not several at a time as by a tensor core.
    granted = {"exact_scores": exact_scores, "product_error": float(q.shape[-1])}
    oracle_features.compare(out, lse, q, k, v, scale, causal, **granted).check()
    return out, lse


@pytest.mark.parametrize("seqlen_k", [0, 7])
@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
def test_the_lse_is_fp32_whatever_the_default_dtype(default: torch.dtype, seqlen_k: int):
    q, k, v = tensors(1, 5, seqlen_k, 2, 2, 8)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        out, lse = attention(q, k, v, return_lse=True)
    finally:
        torch.set_default_dtype(before)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_an_lse_of_zero_is_not_mistaken():
    """One key that a query of zeros scores with 0: LSE 0, which torch's kernel also uses for "no key"."""
    q, k, v = tensors(1, 3, 1, 2, 2, 8)
    out, lse = check(torch.zeros_like(q), k, v)
    assert (lse == 0).all() and torch.equal(out, v.expand(1, 3, 2, 8))


def test_nan_stays_in_its_row():
    q, k, v = tensors(1, 5, 9, 2, 2, 8)
    q[0, 3, 1] = math.nan
    out, lse = attention(q, k, v, return_lse=True)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3, 1]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 3]]


def test_the_fused_kernel_is_used_where_it_does_the_same_job(monkeypatch):
    used = []
    original = plain._torch_flash
    monkeypatch.setattr(plain, "_torch_flash", lambda *a: used.append(a) or original(*a))
    for expected, shape, causal, scale in [
        (True, (1, 8, 8, 2, 2), "none", None),
        (True, (1, 8, 8, 2, 2), "none", -1.0),
        (True, (1, 8, 8, 2, 2), "bottom-right", None),
        (True, (1, 8, 9, 2, 2), "top-left", None),
        (True, (1, 1, 9, 2, 2), "bottom-right", None),  # decoding: nothing is hidden
        (False, (1, 8, 9, 2, 2), "bottom-right", None),
        (False, (1, 8, 8, 2, 2), "top-left", -1.0),
        (False, (1, 8, 8, 2, 2), "top-left", 0.0),
        (False, (1, 8, 8, 2, 1), "none", None),
        (False, (1, 8, 0, 2, 2), "none", None),
    ]:
        used.clear()
        check(*tensors(*shape, 16), scale, causal)
        assert bool(used) == expected, (shape, causal, scale)


LONG = {
    "plain": lambda: plain.forward(*tensors(1, 4096, 4096, 2, 1, 8), 1.0, -1),
    "features": lambda: attention(
        *tensors(1, 1024, 1024, 4, 2, 8),
        causal=True,
        window=(700, 0),
        alibi_slopes=torch.ones(4),
        softcap=2.0,
    ),
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
