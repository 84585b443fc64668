"""Merging states and cascade attention: CPU tensors, the op as torch sees it, what is refused."""

from __future__ import annotations

import math
from typing import Any

import oracle_features
import pytest
import torch
from oracle_helpers import bits
from torch import Tensor

import cutlass_fmha
from cutlass_fmha.cascade import cascade_attention, merge_states

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

INF = math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
State = tuple[Tensor, Tensor]


def states(shape=(2, 5, 3, 16), dtype=torch.float32, count=2, seed=0) -> list[State]:
    """Random ones: outputs of ``shape``, LSEs from -20 to 20."""
    generator = torch.Generator().manual_seed(seed)
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    return [
        (
            torch.randn(shape, generator=generator).to(dtype),
            torch.rand(lse_shape, generator=generator) * 40 - 20,
        )
        for _ in range(count)
    ]


def merged(a: State, b: State) -> State:
    return merge_states(*a, *b)


# ---- values ------------------------------------------------------------------------------------------------


def test_nan_stays_in_its_row():
    a, b = states()
    a[1][0, 2, 3] = torch.nan
    b[0][1, 4, 0, 5] = torch.nan
    output, lse = merged(a, b)
    expected = torch.zeros(output.shape, dtype=torch.bool)
    expected[0, 3, 2] = True
    expected[1, 4, 0, 5] = True
    assert torch.equal(output.isnan(), expected)
    assert lse.isnan().sum() == 1 and lse[0, 2, 3].isnan()


def test_weights_that_underflow_and_lses_that_are_large():
    a, b = states()
    far = a[0], a[1] + 3e38
    output, lse = merged(far, b)
    assert torch.equal(output, a[0]) and torch.equal(lse, far[1])


@pytest.mark.parametrize("shape", [(0, 5, 3, 16), (2, 0, 3, 16), (2, 5, 0, 16), (0, 3, 16)])
def test_nothing_to_merge(shape: tuple[int, ...]):
    output, lse = merged(*states(shape))
    assert output.shape == shape and lse.shape == (*shape[:-3], shape[-2], shape[-3])


# ---- cascade attention -------------------------------------------------------------------------------------


def cascade_inputs(
    batch=3, seqlen_q=5, shared=20, own=12, heads=4, heads_kv=2, dim=16, dim_v=16, dtype=torch.float32
):
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(batch, seqlen_q, heads, dim, generator=generator).to(dtype)
    dims = (heads_kv, dim), (heads_kv, dim_v)
    shapes = (*((shared, *x) for x in dims), *((batch, own, *x) for x in dims))
    return q, *(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def whole_keys(k_shared: Tensor, v_shared: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The shared keys before each sequence's own."""
    batch = k.shape[0]
    pairs = ((k_shared, k), (v_shared, v))
    return tuple(torch.cat((first.expand(batch, *first.shape), x), 1) for first, x in pairs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim_v", "said"), [(16, {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}), (8, {})]
)
def test_cascade_is_attention_over_both_parts(causal: bool, dim_v: int, said: dict[str, Any]):
    q, *keys = cascade_inputs(dim_v=dim_v)
    said = {"scale": 0.3, **said}
    output, lse = cascade_attention(q, *keys, causal=causal, return_lse=True, **said)
    causal_of = ("none", "bottom-right")[causal]
    oracle_features.compare(output, lse, q, *whole_keys(*keys), causal=causal_of, **said).check()
    assert torch.equal(cascade_attention(q, *keys, causal=causal, **said), output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_empty_part_passes_the_others_bits_on(dtype: torch.dtype):
    q, k_shared, v_shared, k, v = cascade_inputs(dtype=dtype)
    nothing = k_shared[:0], v_shared[:0]
    own = cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
    for a, b in zip(cascade_attention(q, *nothing, k, v, causal=True, return_lse=True), own, strict=True):
        assert torch.equal(bits(a), bits(b))

    rows = q.reshape(1, 15, 4, 16)
    shared, shared_lse = cutlass_fmha.attention(rows, k_shared[None], v_shared[None], return_lse=True)
    output, lse = cascade_attention(q, k_shared, v_shared, k[:, :0], v[:, :0], causal=True, return_lse=True)
    assert torch.equal(bits(output), bits(shared.view(q.shape)))
    assert torch.equal(bits(lse), bits(shared_lse.view(4, 3, 5).transpose(0, 1)))

    output, lse = cascade_attention(q, *nothing, k[:, :0], v[:, :0], return_lse=True)
    assert (output == 0).all() and (lse == -INF).all()


def test_own_keys_of_several_lengths():
    q, k_shared, v_shared, k, v = cascade_inputs()
    seqused_k = torch.tensor([12, 0, 3], dtype=torch.int32)
    output, lse = cascade_attention(
        q, k_shared, v_shared, k, v, causal=True, seqused_k=seqused_k, return_lse=True
    )
    for b, length in enumerate(seqused_k.tolist()):
        keys = whole_keys(k_shared, v_shared, k[b : b + 1, :length], v[b : b + 1, :length])
        if length >= q.shape[1]:
            one = slice(b, b + 1)
            oracle_features.compare(output[one], lse[one], q[one], *keys, causal="bottom-right").check()
    shared = cutlass_fmha.attention(q[1:2], k_shared[None], v_shared[None])
    torch.testing.assert_close(output[1:2], shared)


def test_packed_sequences():
    q, k_shared, v_shared, k, v = cascade_inputs()
    cu_seqlens_q = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 4, 9, 12], dtype=torch.int32)
    output, lse = cascade_attention(
        q[0], k_shared, v_shared, k[0], v[0], causal=True, return_lse=True,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=3, max_seqlen_k=5,
    )  # fmt: skip
    assert output.shape == q[0].shape and lse.shape == (4, 5)
    for queries, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 5), slice(9, 12))):
        both = whole_keys(k_shared, v_shared, k[:1, keys], v[:1, keys])
        oracle_features.compare(
            output[None, queries], lse[None, :, queries], q[:1, queries], *both, causal="bottom-right"
        ).check()


def test_paged_own_keys():
    q, k_shared, v_shared, k, v = cascade_inputs(own=32)
    pages = torch.randperm(6, generator=torch.Generator().manual_seed(0)).view(3, 2).to(torch.int32)
    k_pages, v_pages = torch.empty(2, 6, 16, 2, 16).unbind(0)
    for pool, keys in ((k_pages, k), (v_pages, v)):
        pool[pages.long()] = keys.view(3, 2, 16, 2, 16)
    found = cascade_attention(q, k_shared, v_shared, k_pages, v_pages, causal=True, page_table=pages)
    torch.testing.assert_close(found, cascade_attention(q, k_shared, v_shared, k, v, causal=True))


# ---- what torch expects of an op ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (7, 3, 40), (0, 3, 16)])
def test_opcheck_passes(shape: tuple[int, ...]):
    a, b = states(shape)
    torch.library.opcheck(torch.ops.cutlass_fmha.merge_states.default, (*a, *b))
    strided = a[0].transpose(-2, -3).contiguous().transpose(-2, -3), a[1].mT.contiguous().mT
    torch.library.opcheck(torch.ops.cutlass_fmha.merge_states.default, (*strided, *b))


def test_cascade_compiles_whole():
    q, *keys = cascade_inputs()
    compiled = torch.compile(cascade_attention, fullgraph=True, backend="aot_eager")
    found = compiled(q, *keys, causal=True, return_lse=True)
    for one, other in zip(found, cascade_attention(q, *keys, causal=True, return_lse=True), strict=True):
        torch.testing.assert_close(one, other)
