"""The public functions: what they accept, what they compute, what a call may say and what reaches the op."""

import inspect
import typing
from typing import Any, get_type_hints

import pytest
import torch
from tensors import drawn, ints, laid
from test_bad_calls import BLOCKS, CU_K, CU_Q, PACKED, PAGED, TABLE, K, Q, V
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_fmha
from cutlass_fmha import attention, cpu, scaled_dot_product_attention
from cutlass_fmha.arguments import op_arguments
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.arguments.signature import FOREIGN
from cutlass_fmha.features import CallArguments, FeatureArguments, Features

F = torch.nn.functional


def test_float64_is_of_the_cpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 8, 1, 64, device="cuda")
        assert attention(q, q, q).dtype == torch.float32
        with pytest.raises(ValueError, match="q must be float16 or bfloat16 or float32 on cuda, got float64"):
            attention(q.double(), q.double(), q.double())


def test_signatures_are_torchs_the_ops_and_list_the_features():
    ours = inspect.signature(scaled_dot_product_attention).parameters
    plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in ours.values()]
    torchs = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert ", ".join(plain) == torchs + ", out=None"  # the last is ours alone
    assert ours["out"].kind == inspect.Parameter.KEYWORD_ONLY
    *features, numbers = [x for x in torch.ops.cutlass_fmha.attend.default._schema.arguments if x.kwarg_only]
    assert {x.name: x.default_value for x in features} == Features._field_defaults
    assert tuple(x.name for x in features) == Features._fields
    assert numbers.name == "numbers"  # which stands for three others in a compiled graph
    hints = get_type_hints(FeatureArguments, vars(typing) | {"Tensor": torch.Tensor})
    assert set(hints) == op_arguments.TENSORS | op_arguments.INTEGERS | op_arguments.FLOATS | op_arguments.OTHERS
    said = {*hints, *RESULTS}
    assert set(CallArguments.__annotations__) == said and all(name in attention.__doc__ for name in said)
    listed = inspect.signature(attention).parameters
    assert set(listed) == {"q", "k", "v", "scale", "causal", "return_lse", "layout", "row"} | said
    assert [name for name, each in listed.items() if each.kind != each.KEYWORD_ONLY] == ["q", "k", "v"]
    assert listed["window"].annotation == "tuple[int | None, int | None] | None"
    for function in (cutlass_fmha.with_kv_cache, cutlass_fmha.cascade_attention):
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert not set(FOREIGN) & set(listed)


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
    **{f"grouped, {2 + len(b)}d": ((*b, 8, 5, 16), (*b, 2, 7, 16), []) for b in ((1,), (2,), (3, 2))},
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_mean_what_torch_means(name: str, is_causal: bool):
    """Also where the last dimension is not contiguous: contiguous() leaves an empty tensor's strides as they are."""
    q_shape, k_shape, _ = SHAPES[name]
    said = {"is_causal": is_causal, "enable_gqa": name.startswith("grouped"), "scale": 0.2 if is_causal else None}
    for how in ("", "last dimension"):
        given = [laid(x, how) for x in drawn(q_shape, k_shape, k_shape)]
        expected = F.scaled_dot_product_attention(*given, **said)
        torch.testing.assert_close(scaled_dot_product_attention(*given, **said), expected)


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


(BATCH, SEQLEN_Q, HEADS, DIM), (_, SEQLEN_K, HEADS_KV, _) = Q.shape, K.shape


def call(**arguments: Any) -> Any:
    return attention(**({"q": Q, "k": K, "v": V} | arguments))


def test_what_says_nothing_is_a_plain_call(monkeypatch):
    monkeypatch.setattr(cpu, "attend", None)
    nothing = dict.fromkeys(("causal", *FeatureArguments.__annotations__))
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


def test_what_is_legal_together():
    call(k=K[:1], v=V[:1], cache_batch_idx=ints(0, 0))
    call(window=(0, 2**29), prefix_lengths=ints(100, 0))
    call(block_mask=(BLOCKS[0] * 0, BLOCKS[1] - 5, (4, 4)))
    call(**PAGED, page_table=ints(3, -7, 9, 9).view(2, 2), seqused_k=ints(5, 0), leftpad_k=ints(0, 5))
    heads_first = {name: tensor.transpose(1, 2) for name, tensor in PAGED.items()}
    long, cu = torch.empty((2**29 + 1, 1, 16), device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 9, "max_seqlen_k": 9}
    assert attention(long, long, long, **packed).shape == long.shape
    out = call(q=Q.transpose(1, 2), **heads_first, page_table=TABLE, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), call(**PAGED, page_table=TABLE))
