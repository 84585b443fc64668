"""The public functions: what they accept, what they compute, what a call may say and what reaches the op."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from typing import Any, get_type_hints

import pytest
import torch
from calls import BIAS, BLOCKS, CU_K, CU_Q, MASK, PACKED, PAGED, TABLE, K, Q, V
from tensors import LooksLikeCuda, ints, qkv, randn
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_fmha
from cutlass_fmha import attention, cpu, scaled_dot_product_attention
from cutlass_fmha.arguments import op_arguments
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.features import CallArguments, FeatureArguments, Features
from cutlass_fmha.ops import dispatcher

F = torch.nn.functional
tensors = functools.partial(qkv, dtype=torch.bfloat16)


def test_the_public_names():
    assert set(cutlass_fmha.__all__) == {
        "UnsupportedError", "Workspace", "__version__", "attention", "cascade_attention", "dropout_mask",
        "explain", "explain_swiglu_mlp", "geglu", "gelu_and_mul", "memory_plan", "merge_states",
        "qk_norm_rope", "rms_norm", "rotary", "rotary_qk", "scaled_dot_product_attention", "sdpa",
        "set_deterministic_workspace", "silu_and_mul", "swiglu", "swiglu_mlp", "with_kv_cache",
    }  # fmt: skip
    assert all(hasattr(cutlass_fmha, name) for name in cutlass_fmha.__all__)
    assert cutlass_fmha.__version__[0].isdecimal()


@pytest.mark.parametrize(("causal", "meaning"), [(False, "none"), (None, "none"), (True, "bottom-right")])
def test_causal_has_two_alignments_and_bottom_right_is_the_default(causal: bool | None, meaning: str):
    found, wanted = (attention(*tensors(), causal=said, return_lse=True) for said in (causal, meaning))
    assert all(map(torch.equal, found, wanted))


def test_float64_is_of_the_cpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 8, 1, 64, device="cuda")
        assert attention(q, q, q).dtype == torch.float32
        with pytest.raises(ValueError, match="q must be float16 or bfloat16 or float32 on cuda, got float64"):
            attention(q.double(), q.double(), q.double())


def test_the_signature_is_torchs():
    ours = inspect.signature(scaled_dot_product_attention).parameters
    plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in ours.values()]
    torchs = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert ", ".join(plain) == torchs + ", out=None"  # the last is ours alone
    assert ours["out"].kind == inspect.Parameter.KEYWORD_ONLY


#: Of queries and of keys, and of masks that broadcast to their scores.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = {
    "4d": ((2, 4, 5, 16), (2, 4, 7, 16), [(5, 7), (1, 7), (5, 1), (4, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7)]),
    "3d": ((4, 5, 16), (4, 7, 16), [(5, 7), (4, 5, 7), (1, 1, 7)]),
    "2d": ((5, 16), (7, 16), [(5, 7), (7,)]),
    "6d": ((2, 1, 3, 4, 5, 16), (2, 1, 3, 4, 7, 16), [(5, 7), (3, 4, 5, 7), (3, 1, 1, 7), (2, 1, 1, 1, 5, 7)]),
    "broadcast batch": ((2, 4, 5, 16), (1, 4, 7, 16), [(5, 7), (2, 1, 1, 7)]),
    "broadcast heads": ((2, 4, 5, 16), (2, 1, 7, 16), [(4, 5, 7)]),
    "broadcast query": ((1, 1, 5, 16), (2, 3, 7, 16), []),
    "broadcast rank": ((2, 4, 5, 16), (4, 7, 16), []),
    "more queries": ((2, 4, 9, 16), (2, 4, 5, 16), []),
    "as many queries": ((2, 4, 7, 16), (2, 4, 7, 16), []),
    "no queries": ((2, 4, 0, 16), (2, 4, 7, 16), []),
    "no keys": ((2, 4, 5, 16), (2, 4, 0, 16), []),
    "no batch": ((0, 4, 5, 16), (0, 4, 7, 16), []),
    "no batch, 5d": ((3, 0, 4, 5, 16), (3, 0, 4, 7, 16), []),
}


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_mean_what_torch_means(name: str, is_causal: bool):
    q_shape, k_shape, _ = SHAPES[name]
    given = drawn(q_shape, k_shape, k_shape)
    expected = F.scaled_dot_product_attention(*given, is_causal=is_causal)
    torch.testing.assert_close(scaled_dot_product_attention(*given, is_causal=is_causal), expected)


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_grouped_heads_mean_what_they_mean_to_torch(lead: tuple[int, ...]):
    given = drawn((*lead, 8, 5, 16), (*lead, 2, 7, 16), (*lead, 2, 7, 16))
    expected = F.scaled_dot_product_attention(*given, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(*given, scale=0.2, enable_gqa=True), expected)
    with pytest.raises(ValueError, match=r"dimensions that broadcast, .*\(enable_gqa=True lets key"):
        scaled_dot_product_attention(*given)


def test_no_rows_lie_anywhere():
    """contiguous() leaves an empty tensor as it is, strides and all."""
    empty = torch.empty(1, 2, 0, 16, 2)[..., 0]
    assert scaled_dot_product_attention(empty, empty, empty).shape == empty.shape


def test_a_last_dimension_that_is_not_contiguous_is_copied():
    given = [x.transpose(2, 3) for x in drawn((2, 4, 16, 5), (2, 4, 16, 7), (2, 4, 16, 7))]
    torch.testing.assert_close(scaled_dot_product_attention(*given), F.scaled_dot_product_attention(*given))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name, (*_, masks) in SHAPES.items() if masks])
def test_masks_mean_what_they_mean_to_torch(name: str, kind: torch.dtype):
    q_shape, k_shape, mask_shapes = SHAPES[name]
    dtype = torch.float64 if kind == torch.float64 else torch.float32
    for shape in mask_shapes:
        *given, mask = drawn(q_shape, k_shape, k_shape, shape, dtype=dtype)
        if kind == torch.bool:
            mask = mask > -0.5
            mask[..., 0] = True  # torch's kernels have their own ideas of a row without keys
        expected = F.scaled_dot_product_attention(*given, attn_mask=mask)
        torch.testing.assert_close(scaled_dot_product_attention(*given, attn_mask=mask), expected)
        if kind != torch.float64:
            half = scaled_dot_product_attention(*(x.half() for x in given), attn_mask=mask)
            torch.testing.assert_close(half, expected.half(), rtol=1e-2, atol=1e-2)


def test_a_row_that_a_mask_empties_is_zero():
    q, k, v = torch.randn(3, 1, 2, 4, 16).unbind(0)
    hides = torch.tensor([[True] * 4, [False] * 4, [True] * 4, [False, True, True, True]])
    for mask in (hides, torch.zeros(4, 4).masked_fill(~hides, -math.inf)):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert (out[:, :, 1] == 0).all() and out.isfinite().all()
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(out[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]])


# ---- what a call may say besides ---------------------------------------------------------------------------

(BATCH, SEQLEN_Q, HEADS, DIM), (_, SEQLEN_K, HEADS_KV, _) = Q.shape, K.shape


def call(**arguments: Any) -> Any:
    return attention(**({"q": Q, "k": K, "v": V} | arguments))


def test_the_ops_keyword_arguments_are_the_fields_of_features():
    *features, numbers = [x for x in torch.ops.cutlass_fmha.attend.default._schema.arguments if x.kwarg_only]
    assert {x.name: x.default_value for x in features} == Features._field_defaults
    assert tuple(x.name for x in features) == Features._fields
    assert numbers.name == "numbers"  # which stands for three others in a compiled graph


def test_attention_takes_the_names_that_its_type_has():
    hints = get_type_hints(FeatureArguments, vars(typing) | {"Tensor": torch.Tensor})
    known = op_arguments.TENSORS | op_arguments.INTEGERS | op_arguments.FLOATS | op_arguments.OTHERS
    assert set(hints) == known
    assert set(CallArguments.__annotations__) == {*hints, *RESULTS}
    assert all(name in attention.__doc__ for name in CallArguments.__annotations__)


def test_what_says_nothing_is_a_plain_call(monkeypatch):
    monkeypatch.setattr(cpu, "attend", None)
    nothing = dict.fromkeys(FeatureArguments.__annotations__)
    without_effect = {"softcap": 0, "dropout_p": 0.0, "dropout_seed": 3, "batch_invariant": False}
    for said in (nothing, without_effect, {"window": (-1, None)}):
        assert torch.equal(call(**said), call())
    with pytest.raises(TypeError, match="not callable"):
        call(softcap=1)


def test_what_changes_no_result_reaches_the_op(monkeypatch):
    """Whatever else is said changes one: test_cpu.py compares all of it with the oracle."""
    seen: list[Features] = []
    monkeypatch.setattr(cpu, "attend", lambda *given: seen.append(given[5]) or (given[0], torch.empty(0)))
    call(num_splits=2)
    call(batch_invariant=True)
    call(**PACKED, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=6, max_seqlen_k=11)
    assert (seen[0].num_splits, seen[1].batch_invariant) == (2, True)
    assert (seen[2].max_seqlen_q, seen[2].max_seqlen_k) == (6, 11)
    # And sinks in the dtype that it takes, though they may have the tensors'.
    half, bfloat, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for dtype, given in ((half, half), (bfloat, single), (double, single), (double, double)):
        attention(Q.to(dtype), K.to(dtype), V.to(dtype), sinks=torch.ones(HEADS, dtype=given))
        assert seen.pop().sinks.dtype == (double if dtype == double else single)


#: Arguments that may lie anywhere, the others' rows are contiguous; each with a call that it goes with.
STRIDED = ("mask", "bias", "alibi_slopes", "dropout_seed", "block_counts", "block_indices")
LAID = {
    "mask": torch.rand(BATCH, HEADS, SEQLEN_Q, SEQLEN_K) < 0.7,
    "bias": torch.randn(BATCH, HEADS, SEQLEN_Q, SEQLEN_K),
    "alibi_slopes": torch.rand(BATCH, HEADS), "sinks": torch.randn(HEADS), "dropout_seed": torch.tensor([3]),
    "block_counts": ints(*range(8)).view(BATCH, HEADS, 1) % 3,
    "block_indices": torch.arange(24, dtype=torch.int32).view(BATCH, HEADS, 1, 3),
    **{name: ints(3, 1) for name in ("seqused_q", "seqused_k", "leftpad_k", "prefix_lengths")},
    "cache_batch_idx": ints(1, 0), "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "page_table": TABLE,
}  # fmt: skip


def laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """x with gaps, or some of its numbers, shared by its rows."""
    if how == "strided":
        odd = (slice(1, None, 2),) * x.dim()
        wide = x.new_zeros([2 * size for size in x.shape])
        wide[odd] = x
        return wide[odd]
    if how == "overlapping":
        return x.flatten()[: sum(x.shape) - x.dim() + 1].as_strided(x.shape, (1,) * x.dim())
    last = x.dim() - (1 if x.dim() > 2 else 0)  # lists must ascend
    return x[tuple(slice(0, 1) for _ in range(last))].expand(x.shape)


def with_argument(name: str, x: torch.Tensor) -> dict[str, Any]:
    if name.startswith("cu_seqlens"):
        return {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, name: x}
    if name.startswith("block_"):
        lists = {"block_counts": ints(1).expand(1, 1, 1), "block_indices": ints(0, 1, 2).view(1, 1, 1, 3)}
        return {"block_mask": (*(lists | {name: x}).values(), (8, 4))}
    return {name: x} | (PAGED if name == "page_table" else {"dropout_p": 0.3} if "seed" in name else {})


@pytest.mark.parametrize("how", ["strided", "expanded", "overlapping"])
@pytest.mark.parametrize("name", LAID)
def test_a_tensor_lies_anywhere_or_is_refused(name: str, how: str):
    x = laid(LAID[name], how)
    if name in STRIDED or x.is_contiguous() or (name == "page_table" and x.stride(1) == 1):
        contiguous = with_argument(name, x.clone(memory_format=torch.contiguous_format))
        assert torch.equal(call(**with_argument(name, x)), call(**contiguous))
    else:
        with pytest.raises(ValueError, match=f"{name} must be contiguous.*: pass {name}.contiguous"):
            call(**with_argument(name, x))


def test_what_is_legal_together():
    """Combinations that look as if they could be refused."""
    both = {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    call(**both, max_seqlen_q=6, max_seqlen_k=10, mask=MASK, bias=BIAS, causal=True, window=(2, 3))
    call(**both, mask=MASK[:1, :1], seqused_q=ints(6, 3), seqused_k=ints(10, 0), leftpad_k=ints(1, 1))
    call(q=PACKED["q"], cu_seqlens_q=CU_Q, cache_batch_idx=ints(1, 1))
    call(q=PACKED["q"], cu_seqlens_q=CU_Q, **PAGED, page_table=TABLE, leftpad_k=ints(3, 0))
    call(k=PACKED["k"], v=PACKED["v"], cu_seqlens_k=CU_K, softcap=1.0)
    call(k=K[:1], v=V[:1], cache_batch_idx=ints(0, 0))
    call(window=(0, 2**29), prefix_lengths=ints(100, 0))
    call(block_mask=(BLOCKS[0] * 0, BLOCKS[1] - 5, (4, 4)))
    call(**PAGED, page_table=ints(3, -7, 9, 9).view(2, 2), seqused_k=ints(5, 0))
    heads_first = {name: tensor.transpose(1, 2) for name, tensor in PAGED.items()}
    out = call(q=Q.transpose(1, 2), **heads_first, page_table=TABLE, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), call(**PAGED, page_table=TABLE))


def test_a_length_beyond_the_kernels_is_refused_and_a_packed_one_needs_a_bound():
    long = torch.empty_strided((1, 2**29 + 1, 1, 16), (0, 0, 0, 1), device="meta")
    with pytest.raises(ValueError, match=r"k must have a seqlen of 2\*\*29 at most, got 536870913"):
        attention(long[:, :1], long, long)
    packed, cu = long[0], torch.empty(3, dtype=torch.int32, device="meta")
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_k": 9}
    with pytest.raises(ValueError, match=r"q must have a seqlen of 2\*\*29 at most, got 536870913: pass"):
        attention(packed, packed, packed, **arguments)
    assert attention(packed, packed, packed, **arguments, max_seqlen_q=9).shape == packed.shape


def test_the_dispatcher_is_skipped_only_where_no_tensor_listens(monkeypatch):
    skips = dispatcher.others_can_skip_dispatcher
    assert not skips([BIAS])
    monkeypatch.setattr(dispatcher, "Tensor", LooksLikeCuda)
    plain = BIAS.as_subclass(LooksLikeCuda)
    leaf = plain.detach().requires_grad_()
    assert skips([plain, 1.0, 3]) and skips([]) and not skips([plain, leaf]) and not skips([torch._neg_view(plain)])
    with torch.no_grad():
        assert skips([leaf])
