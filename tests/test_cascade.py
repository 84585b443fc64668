"""Merging states and cascade attention: CPU tensors, the op as torch sees it, what is refused."""

from __future__ import annotations

import math

import oracle_features
import pytest
import torch
from oracle_helpers import COMPUTED, COMPUTED_IN_FP32, assert_merged, bits
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


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (7, 3, 40), (1, 1, 1, 1), (2, 3, 1, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_is_the_weighted_mean(shape: tuple[int, ...], dtype: torch.dtype):
    a, b = states(shape, dtype)
    output, lse = merged(a, b)
    assert output.dtype == dtype and lse.dtype == torch.float32
    assert output.is_contiguous() and lse.is_contiguous()
    assert_merged(output, lse, [a, b], COMPUTED.get(dtype, COMPUTED_IN_FP32))


def test_states_of_attention_merge_into_attention():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 9, 4, 16, generator=generator)
    k, v = torch.randn(2, 2, 30, 2, 16, generator=generator)
    parts = [cutlass_fmha.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(7), slice(7, 30))]
    output, lse = merged(*parts)
    whole, whole_lse = cutlass_fmha.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_side_passes_the_others_bits_on(dtype: torch.dtype):
    a, b = states(dtype=dtype)
    a[0].flatten()[:3] = torch.tensor([-0.0, INF, torch.nan]).to(dtype)
    a[1].flatten()[:2] = torch.tensor([-0.0, INF])
    empty = torch.full_like(b[0], torch.nan), torch.full_like(b[1], -INF)
    for output, lse in (merged(a, empty), merged(empty, a)):
        assert torch.equal(bits(output), bits(a[0]))
        assert torch.equal(bits(lse), bits(a[1]))


def test_two_empty_sides_are_empty():
    (o, lse), _ = states()
    empty = torch.full_like(o, torch.nan), torch.full_like(lse, -INF)
    output, merged_lse = merged(empty, empty)
    assert torch.equal(bits(output), bits(torch.zeros_like(o)))
    assert torch.equal(merged_lse, empty[1])


def test_rows_are_empty_one_by_one():
    a, b = states()
    a[1][0, 1, 2] = -INF
    b[1][1, 0, :] = -INF
    a[1][1, 0, 3] = -INF
    assert_merged(*merged(a, b), [a, b])


def test_an_infinite_lse_outweighs_finite_ones():
    a, b = states()
    infinite = a[0], torch.full_like(a[1], INF)
    output, lse = merged(infinite, b)
    assert torch.equal(output, a[0]) and (lse == INF).all()
    output, lse = merged(infinite, (b[0], infinite[1]))
    torch.testing.assert_close(output, (a[0] + b[0]) / 2)
    assert (lse == INF).all()


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


def test_the_sides_can_be_exchanged():
    a, b = states(dtype=torch.float16, seed=3)
    for one, other in zip(merged(a, b), merged(b, a), strict=True):
        assert torch.equal(one, other)


def test_any_strides():
    a, b = states()
    wide = torch.empty(2, 5, 3, 40)[..., 3:19].copy_(a[0])
    heads_first = b[0].transpose(1, 2).contiguous().transpose(1, 2)
    lse_b = b[1].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    found = merged((wide, a[1].mT.contiguous().mT), (heads_first, lse_b))
    for one, other in zip(found, merged(a, b), strict=True):
        assert torch.equal(one, other)
    row = a[0][:1, :1].expand(2, 5, 3, 16)
    assert torch.equal(merged((row, a[1]), b)[0], merged((row.contiguous(), a[1]), b)[0])


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
    shapes = (
        (shared, heads_kv, dim),
        (shared, heads_kv, dim_v),
        (batch, own, heads_kv, dim),
        (batch, own, heads_kv, dim_v),
    )
    return q, *(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def whole_keys(k_shared: Tensor, v_shared: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The shared keys before each sequence's own."""
    batch = k.shape[0]
    return (
        torch.cat((k_shared.expand(batch, *k_shared.shape), k), 1),
        torch.cat((v_shared.expand(batch, *v_shared.shape), v), 1),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim_v", [16, 8])
def test_cascade_is_attention_over_both_parts(causal: bool, dim_v: int):
    q, *keys = cascade_inputs(dim_v=dim_v)
    output, lse = cascade_attention(q, *keys, causal=causal, scale=0.3, return_lse=True)
    k, v = whole_keys(*keys)
    oracle_features.compare(
        output, lse, q, k, v, scale=0.3, causal="bottom-right" if causal else "none"
    ).check()
    assert torch.equal(cascade_attention(q, *keys, causal=causal, scale=0.3), output)


def test_cascade_with_softcap_and_sinks():
    q, *keys = cascade_inputs()
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    output, lse = cascade_attention(q, *keys, causal=True, softcap=2.0, sinks=sinks, return_lse=True)
    k, v = whole_keys(*keys)
    errors = oracle_features.compare(output, lse, q, k, v, causal="bottom-right", softcap=2.0, sinks=sinks)
    errors.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_empty_part_passes_the_others_bits_on(dtype: torch.dtype):
    q, k_shared, v_shared, k, v = cascade_inputs(dtype=dtype)
    nothing = k_shared[:0], v_shared[:0]
    own = cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
    for one, other in zip(
        cascade_attention(q, *nothing, k, v, causal=True, return_lse=True), own, strict=True
    ):
        assert torch.equal(bits(one), bits(other))

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


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o_b": torch.zeros(2, 5, 3, 16).half()}, "o_b must have o_a's dtype float32, got float16"),
        ({"o_b": torch.zeros(2, 5, 3, 8)}, r"o_b must have o_a's shape \(2, 5, 3, 16\), got \(2, 5, 3, 8\)"),
        ({"o_a": torch.zeros(16), "o_b": torch.zeros(16)}, r"o_a must have shape \[batch, .* got \(16,\)"),
        (
            {"o_a": torch.zeros(2, 5, 3, 16).int(), "o_b": torch.zeros(2, 5, 3, 16).int()},
            "o_a must be float16 or",
        ),
        (
            {"lse_a": torch.zeros(2, 5, 3)},
            r"lse_a must have shape \(2, 3, 5\), as o_a has it, got \(2, 5, 3\)",
        ),
        ({"lse_b": torch.zeros(2, 3, 5).double()}, "lse_b must be float32, got float64"),
        ({"lse_b": torch.zeros(3, 5)}, r"lse_b must have shape \(2, 3, 5\)"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor], message: str, place: str):
    (o_a, lse_a), (o_b, lse_b) = states()
    given = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b} | change
    with pytest.raises(ValueError, match=message):
        merge_states(**{name: tensor.to(place) for name, tensor in given.items()})


def test_rows_must_be_contiguous():
    (_, lse_a), (o_b, lse_b) = states()
    with pytest.raises(ValueError, match="o_a must be contiguous in its last dimension, got a stride of 2"):
        merge_states(torch.zeros(2, 5, 3, 32)[..., ::2], lse_a, o_b, lse_b)


def test_devices_must_agree():
    (o_a, lse_a), (o_b, lse_b) = states()
    with pytest.raises(ValueError, match="lse_b must be on o_a's device meta, got cpu"):
        merge_states(o_a.to("meta"), lse_a.to("meta"), o_b.to("meta"), lse_b)


def test_cascade_names_what_does_not_fit():
    q, k_shared, v_shared, k, v = cascade_inputs()
    with pytest.raises(
        ValueError, match=r"k_shared must have 3 dimensions, \[seqlen_shared, num_heads_kv, head_dim\]"
    ):
        cascade_attention(q, k_shared[None], v_shared, k, v)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        cascade_attention(q[0], k_shared, v_shared, k, v)
    with pytest.raises(TypeError, match="window"):
        cascade_attention(q, k_shared, v_shared, k, v, window=(3, 0))  # type: ignore[call-arg]


def test_a_gradient_is_refused():
    a, b = states()
    with pytest.raises(NotImplementedError, match="no backward yet"):
        merged((a[0].requires_grad_(), a[1]), b)
    with torch.no_grad():
        merged(a, b)


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
