"""What a call may say besides: every rule about it, with its sentence; and that each reaches the op."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import pytest
import torch

from cutlass_fmha import attention, check_features, cpu_general, keywords, ops
from cutlass_fmha.features import Features, Keywords, Sizes

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, DIM = 2, 6, 10, 4, 2, 16
Q = torch.randn(BATCH, SEQLEN_Q, HEADS, DIM)
K, V = torch.randn(2, BATCH, SEQLEN_K, HEADS_KV, DIM)
PACKED = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}
PAGED = {name: torch.randn(4, 16, HEADS_KV, DIM) for name in "kv"}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CU_Q, CU_K, TABLE = ints(0, 6, 12), ints(0, 10, 20), ints(0, 1, 2, 3).view(2, 2)
MASK, BIAS = torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool), torch.zeros(SEQLEN_Q, SEQLEN_K)
BLOCKS = (torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32), (4, 4))


def call(**arguments: Any) -> Any:
    return attention(**({"q": Q, "k": K, "v": V} | arguments))


# ---- one list of names -------------------------------------------------------------------------------------


def test_the_ops_keyword_arguments_are_the_fields_of_features():
    arguments = [x for x in torch.ops.cutlass_fmha.attend.default._schema.arguments if x.kwarg_only]
    assert {x.name: x.default_value for x in arguments} == Features._field_defaults
    assert tuple(x.name for x in arguments) == Features._fields


def test_attention_takes_the_names_that_its_type_has():
    import typing

    hints = get_type_hints(Keywords, vars(typing) | {"Tensor": torch.Tensor})
    assert set(hints) == keywords.TENSORS | keywords.INTEGERS | keywords.FLOATS | keywords.OTHERS
    assert all(name in attention.__doc__ for name in hints)
    with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword argument 'windows'"):
        call(windows=None)


def test_what_says_nothing_is_a_plain_call(monkeypatch):
    monkeypatch.setattr(cpu_general, "attend", None)
    nothing = dict.fromkeys(keywords.TENSORS | keywords.INTEGERS | keywords.FLOATS | keywords.OTHERS)
    expected = call()
    for said in (nothing, {"softcap": 0, "dropout_p": 0.0, "dropout_seed": 3, "batch_invariant": False}):
        assert torch.equal(call(**said), expected)
    assert torch.equal(call(window=(-1, None)), expected)
    with pytest.raises(TypeError, match="not callable"):
        call(softcap=1)


def test_every_keyword_reaches_the_op(monkeypatch):
    seen = {}

    def attend(query, key, value, scale, causal, features, sizes):
        seen.update(features=features, sizes=sizes, scale=scale, causal=causal)
        return query, torch.empty(0)

    monkeypatch.setattr(cpu_general, "attend", attend)
    tensors = {"mask": MASK, "bias": BIAS, "prefix_lengths": ints(1, 2), "alibi_slopes": torch.ones(HEADS)}
    lengths = {"seqused_q": ints(1, 2), "seqused_k": ints(3, 4), "leftpad_k": ints(0, 1)}
    cache = {"cache_batch_idx": ints(1, 0), "sinks": torch.ones(HEADS)}
    rest = {"window": (3, None), "softcap": 2, "dropout_p": 0.5, "dropout_seed": 7, "num_splits": 2}
    call(scale=2, causal="top-left", block_mask=BLOCKS, **tensors, **lengths, **cache, **rest)
    features = seen["features"]
    for name, value in (tensors | lengths | cache).items():
        assert torch.equal(getattr(features, name), value)
    assert (features.window_left, features.window_right) == (3, -1)
    assert (features.softcap, features.dropout_p, features.num_splits) == (2.0, 0.5, 2)
    assert torch.equal(features.dropout_seed, torch.tensor([7]))
    assert features.block_counts is BLOCKS[0] and features.block_indices is BLOCKS[1]
    assert (features.block_m, features.block_n) == BLOCKS[2]
    assert (seen["scale"], seen["causal"]) == (2.0, "top-left")
    assert seen["sizes"] == Sizes(BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, DIM, DIM, None, 0)
    call(
        **PACKED, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=6, max_seqlen_k=11, batch_invariant=True
    )
    features = seen["features"]
    assert (features.max_seqlen_q, features.max_seqlen_k, features.batch_invariant) == (6, 11, True)
    assert features.cu_seqlens_q is CU_Q and features.cu_seqlens_k is CU_K
    assert seen["sizes"] == Sizes(BATCH, 6, 11, HEADS, HEADS_KV, DIM, DIM, 12, 0)
    call(**PAGED, page_table=TABLE)
    assert seen["features"].page_table is TABLE
    assert seen["sizes"] == Sizes(BATCH, SEQLEN_Q, 32, HEADS, HEADS_KV, DIM, DIM, None, 16)


def test_sinks_of_the_tensors_dtype_are_converted(monkeypatch):
    seen = []
    monkeypatch.setattr(
        cpu_general, "attend", lambda *arguments: seen.append(arguments[5]) or (arguments[0], torch.empty(0))
    )
    for dtype, given, expected in [
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float64, torch.float64, torch.float64),
    ]:
        attention(Q.to(dtype), K.to(dtype), V.to(dtype), sinks=torch.ones(HEADS, dtype=given))
        assert seen.pop().sinks.dtype == expected


# ---- refusals ----------------------------------------------------------------------------------------------

WRONG_TYPES = [
    ({"mask": [[True]]}, "mask must be a torch.Tensor or None, got list"),
    ({"cu_seqlens_q": [0, 12]}, "cu_seqlens_q must be a torch.Tensor or None, got list"),
    ({"num_splits": 2.0}, "num_splits must be an int or None, got float"),
    ({"max_seqlen_k": True}, "max_seqlen_k must be an int or None, got bool"),
    ({"softcap": "30"}, "softcap must be a float, got str"),
    ({"dropout_p": torch.tensor(0.1)}, "dropout_p must be a float, got Tensor"),
    ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed must be an int or None, got float"),
    ({"batch_invariant": 1}, "batch_invariant must be a bool, got int"),
    ({"window": 3}, r"window must be a pair \(left, right\) or None, got 3"),
    ({"window": (1, 2, 3)}, r"window must be a pair \(left, right\) or None, got \(1, 2, 3\)"),
    ({"window": (1.0, 2)}, "window_left must be an int or None, got float"),
    ({"block_mask": BLOCKS[0]}, r"block_mask must be a triple \(block_counts, .* got Tensor"),
    ({"block_mask": (*BLOCKS[:2], 64)}, r"block_mask must end with a pair \(block_m, block_n\), got 64"),
    ({"block_mask": (None, BLOCKS[1], (4, 4))}, "block_counts must be a torch.Tensor or None, got NoneType"),
    ({"block_mask": (*BLOCKS[:2], (4, "4"))}, "block_n must be an int or None, got str"),
    ({"q": 1, "softcap": 1.0}, "q must be a torch.Tensor, got int"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_TYPES)
def test_a_wrong_type_is_refused(arguments: dict, message: str):
    with pytest.raises(TypeError, match=message):
        call(**arguments)


COMBINATIONS = [
    (
        {**PAGED, "page_table": TABLE, "cu_seqlens_k": CU_K},
        "page_table and cu_seqlens_k exclude each other: both say where the keys of a sequence are",
    ),
    (
        {**PAGED, "page_table": TABLE, "cache_batch_idx": ints(0, 1)},
        "page_table and cache_batch_idx exclude each other: a row of the page table already belongs",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "cache_batch_idx": ints(0, 1)},
        "cache_batch_idx and cu_seqlens_k exclude each other: packed keys have no batch entries",
    ),
    (
        {"batch_invariant": True, "num_splits": 2},
        "batch_invariant and num_splits exclude each other: batch_invariant fixes the split itself",
    ),
    ({"max_seqlen_q": 6}, "max_seqlen_q is only taken with cu_seqlens_q"),
    ({"max_seqlen_k": 6}, "max_seqlen_k is only taken with cu_seqlens_k"),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "layout": "bhsd"},
        'layout must be "bshd" with cu_seqlens_q or cu_seqlens_k: packed tensors are',
    ),
    (
        {"q": PACKED["q"], "cu_seqlens_q": CU_Q, "mask": MASK},
        "mask with packed sequences needs max_seqlen_q: it says how long its rows must be",
    ),
    (
        {"k": PACKED["k"], "v": PACKED["v"], "cu_seqlens_k": CU_K, "bias": torch.zeros(20)},
        "bias with packed sequences needs max_seqlen_k",
    ),
    (
        {"q": PACKED["q"], "cu_seqlens_q": CU_Q, "block_mask": BLOCKS},
        "block_mask with packed sequences needs max_seqlen_q",
    ),
]

NUMBERS = [
    ({"window": (-2, 3)}, r"window_left must be -1 \(no limit\) or 0 to 2\*\*29, got -2"),
    ({"window": (3, 2**29 + 1)}, r"window_right must be -1 \(no limit\) or 0 to 2\*\*29, got 536870913"),
    ({"softcap": -1.0}, r"softcap must be 0 \(none\) or positive, 2e38 at most, got -1.0"),
    ({"softcap": math.inf}, r"softcap must be 0 \(none\) or positive, 2e38 at most, got inf"),
    ({"softcap": math.nan}, r"softcap must be 0 \(none\) or positive, 2e38 at most, got nan"),
    ({"dropout_p": 1}, "dropout_p must be at least 0 and less than 1, got 1.0"),
    ({"dropout_p": -0.1}, "dropout_p must be at least 0 and less than 1, got -0.1"),
    ({"num_splits": 0}, "num_splits must be 1 to 64 or None, got 0"),
    ({"num_splits": 65}, "num_splits must be 1 to 64 or None, got 65"),
    ({"dropout_p": 0.1, "dropout_seed": 2**63}, "dropout_seed must fit in 64 bits, got 9223372036854775808"),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": -1},
        r"max_seqlen_q must be 0 to 2\*\*29, got -1",
    ),
]

OPERANDS = [
    (
        {"cu_seqlens_q": CU_Q},
        r"q must have 3 dimensions, \[total tokens, num_heads, head_dim\] with cu_seqlens_q, got shape",
    ),
    ({"cu_seqlens_k": CU_K}, r"k must have 3 dimensions, .* with cu_seqlens_k, got shape \(2, 10, 2, 16\)"),
    (
        {**PACKED, "softcap": 1.0},
        r"q must have 4 dimensions, \[batch, seqlen, num_heads, head_dim\], got shape",
    ),
    (
        {"v": V[0], "page_table": TABLE, "k": PAGED["k"]},
        r"v must have 4 dimensions, \[pages, page size, num_heads, head_dim\] with page_table, got shape",
    ),
    ({"softcap": 1.0, "layout": "bhsd", "k": K[0]}, r"k must have 4 dimensions, \[batch, num_heads, seqlen"),
    ({"softcap": 1.0, "q": Q[..., :0]}, r"q must have a head_dim \(last dimension\) of at least 1, got 0"),
    ({"softcap": 1.0, "k": K[..., :8]}, r"k must have q's head_dim \(last dimension\) 16, got 8"),
    ({"softcap": 1.0, "v": V[:, :3]}, r"v must have k's shape but for the last dimension, \(2, 10, 2\), got"),
    ({"softcap": 1.0, "q": Q[:, :, :3]}, "k must have a number of heads that divides q's 3, got 2"),
    ({"softcap": 1.0, "k": K[:1], "v": V[:1]}, "k must have q's batch size 2, got 1"),
    (
        {"q": PACKED["q"], "cu_seqlens_q": ints(0, 5, 6, 12)},
        "k must have cu_seqlens_q's batch size 3, got 2",
    ),
    (
        {"softcap": 1.0, "v": torch.empty(2, 10, DIM, 2).mT},
        r"v must be contiguous in its last dimension, got a stride of 2 there: pass v.contiguous\(\)",
    ),
    ({"softcap": 1.0, "k": K.half()}, "k must have q's dtype float32, got float16"),
    (
        {"k": PAGED["k"][:, :0], "v": PAGED["v"][:, :0], "page_table": TABLE},
        "k must have pages of a multiple of 16 keys, got 0",
    ),
    (
        {"k": PAGED["k"][:, :10], "v": PAGED["v"][:, :10], "page_table": TABLE},
        "k must have pages of a multiple of 16 keys, got 10",
    ),
]

LENGTHS = [
    ({"seqused_k": ints(1, 2).long()}, "seqused_k must be int32, got int64"),
    ({"seqused_q": ints(1)}, r"seqused_q must have shape \(2,\), got \(1,\)"),
    ({"leftpad_k": ints(1, 2, 3)}, r"leftpad_k must have shape \(2,\), got \(3,\)"),
    ({"prefix_lengths": ints(1, 2).view(2, 1)}, r"prefix_lengths must have shape \(2,\), got \(2, 1\)"),
    ({"cache_batch_idx": ints(1, 2, 3, 4)[::2]}, r"cache_batch_idx must be contiguous: pass cache_batch_idx"),
    ({"seqused_k": ints(1, 2).to("meta")}, "seqused_k must be on q's device cpu, got meta"),
    ({**PACKED, "cu_seqlens_q": CU_Q.long(), "cu_seqlens_k": CU_K}, "cu_seqlens_q must be int32, got int64"),
    (
        {**PACKED, "cu_seqlens_q": ints(), "cu_seqlens_k": CU_K},
        r"cu_seqlens_q must have shape \[batch \+ 1\], got \(0,\)",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": ints(0, 20)},
        r"cu_seqlens_k must have shape \(3,\), got \(2,\)",
    ),
    ({**PAGED, "page_table": TABLE.long()}, "page_table must be int32, got int64"),
    (
        {**PAGED, "page_table": TABLE[0]},
        r"page_table must have 2 dimensions, \[batch, pages\], got shape \(2,\)",
    ),
    ({**PAGED, "page_table": TABLE.T}, "page_table must be contiguous in its last dimension"),
    (
        {**PAGED, "page_table": TABLE[:1]},
        r"page_table must have a row for each of 2 sequences, got shape \(1, 2\)",
    ),
]

SCORES = [
    ({"mask": BIAS}, "mask must be bool, got float32: what is added to scores is a bias"),
    (
        {"mask": MASK[:, :9]},
        r"mask must be broadcastable to \[batch, num_heads, seqlen_q, seqlen_k\], \(2, 4, 6, 10\), got shape "
        r"\(6, 9\)",
    ),
    ({"mask": MASK[None, None, None]}, r"mask must be broadcastable to .* got shape \(1, 1, 1, 6, 10\)"),
    ({"bias": BIAS.half()}, "bias must have q's dtype float32, got float16"),
    ({"bias": BIAS.expand(3, 1, 6, 10)}, r"bias must be broadcastable to .* got shape \(3, 1, 6, 10\)"),
    ({"alibi_slopes": torch.ones(4).half()}, "alibi_slopes must be float32, got float16"),
    (
        {"alibi_slopes": torch.ones(2)},
        r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(2,\)",
    ),
    ({"sinks": torch.ones(4).half()}, "sinks must be float32 or of the tensors' dtype float32, got float16"),
    ({"sinks": torch.ones(2)}, r"sinks must have shape \(4,\), got \(2,\)"),
    ({"sinks": torch.ones(8)[::2]}, r"sinks must be contiguous: pass sinks.contiguous\(\)"),
    (
        {"dropout_p": 0.1, "dropout_seed": ints(3)},
        r"dropout_seed must be int64 of shape \(1,\), got int32 of shape \(1,\)",
    ),
    (
        {"dropout_p": 0.1, "dropout_seed": torch.tensor(3)},
        r"dropout_seed must be int64 of shape \(1,\), got int64 of shape \(\)",
    ),
    ({"block_mask": (*BLOCKS[:2], (0, 4))}, r"block_mask must have blocks of at least 1 query and 1 key"),
    ({"block_mask": (BLOCKS[0].long(), *BLOCKS[1:])}, "block_counts must be int32, got int64"),
    (
        {"block_mask": (BLOCKS[0][..., :1], *BLOCKS[1:])},
        r"block_counts must have shape \[batch or 1, num_heads or 1, query blocks\] with batch 2, "
        r"num_heads 4 and 2 query blocks, got \(1, 1, 1\)",
    ),
    (
        {"block_mask": (BLOCKS[0], BLOCKS[0], (4, 4))},
        r"block_indices must have shape \[batch or 1, num_heads or 1, query blocks, entries at most\] .* got",
    ),
    ({"block_mask": (BLOCKS[0].expand(1, 3, 2), *BLOCKS[1:])}, r"block_counts must .* got \(1, 3, 2\)"),
]

CONTENTS = [
    (
        {**PACKED, "cu_seqlens_q": ints(0, 6, 13), "cu_seqlens_k": CU_K},
        r"cu_seqlens_q must rise from 0 to 12 at most, got \[0, 6, 13\]",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": ints(0, 10, 9)},
        r"cu_seqlens_k must rise from 0 to 20 at most, got \[0, 10, 9\]",
    ),
    (
        {**PACKED, "cu_seqlens_q": ints(-1, 6, 12), "cu_seqlens_k": CU_K},
        "cu_seqlens_q must rise from 0 to 12 at most",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 5},
        "max_seqlen_q is 5, and cu_seqlens_q has a sequence of 6",
    ),
    ({"seqused_k": ints(3, -1)}, "seqused_k must hold numbers of 0 or more, got -1"),
    ({"seqused_q": ints(-3, 1)}, "seqused_q must hold numbers of 0 or more, got -3"),
    ({"leftpad_k": ints(3, -1)}, "leftpad_k must hold numbers of 0 or more, got -1"),
    ({"prefix_lengths": ints(3, -1)}, "prefix_lengths must hold numbers of 0 or more, got -1"),
    ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must hold numbers of 0 to 1, got 2"),
    ({**PAGED, "page_table": TABLE + 1}, "page_table must hold numbers of 0 to 3, got 4"),
    ({**PAGED, "page_table": TABLE - 1, "seqused_k": ints(5, 5)}, "page_table must hold .* got -1"),
    ({"block_mask": (BLOCKS[0] * 4, *BLOCKS[1:])}, "block_counts must hold numbers of 0 to 3, got 4"),
    ({"block_mask": (BLOCKS[0] * 2, *BLOCKS[1:])}, "block_indices must ascend"),
    (
        {"block_mask": (BLOCKS[0], BLOCKS[1] - 1, (4, 4))},
        "block_indices must hold numbers of 0 or more, got -1",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [*COMBINATIONS, *NUMBERS, *OPERANDS, *LENGTHS, *SCORES, *CONTENTS]
)
def test_what_is_illegal_is_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        call(**arguments)


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


def test_a_packed_length_beyond_the_kernels_needs_a_bound():
    packed = torch.empty_strided((2**29 + 1, 1, 16), (0, 0, 1), device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_k": 9}
    with pytest.raises(
        ValueError, match=r"q must have a seqlen of 2\*\*29 at most, got 536870913: pass max_seq"
    ):
        attention(packed, packed, packed, **arguments)
    out = attention(packed, packed, packed, **arguments, max_seqlen_q=9)
    assert out.shape == packed.shape


@pytest.mark.parametrize(
    ("given", "missing"), [("block_counts", "block_indices"), ("block_indices", "block_counts")]
)
def test_the_op_needs_both_block_lists(given: str, missing: str):
    lists = {"block_counts": BLOCKS[0], "block_indices": BLOCKS[1], "block_m": 4, "block_n": 4}
    lists.pop(missing)
    with pytest.raises(ValueError, match=f"{given} is only taken with {missing}"):
        torch.ops.cutlass_fmha.attend(Q, K, V, 1.0, "none", False, None, **lists)


def test_the_op_needs_a_seed_and_converted_sinks():
    attend = torch.ops.cutlass_fmha.attend
    with pytest.raises(ValueError, match="dropout_p is only taken with dropout_seed"):
        attend(Q, K, V, 1.0, "none", False, None, dropout_p=0.1)
    with pytest.raises(ValueError, match="sinks must be float32, got float16"):
        attend(Q.half(), K.half(), V.half(), 1.0, "none", False, None, sinks=torch.ones(HEADS).half())


def test_contents_of_meta_tensors_are_not_read():
    meta = {name: tensor.to("meta") for name, tensor in (PACKED | {"cu_seqlens_q": CU_Q}).items()}
    out, lse = call(**meta, cu_seqlens_k=CU_K.to("meta"), return_lse=True)
    assert out.shape == (12, HEADS, DIM) and lse.shape == (HEADS, 12)


def test_broadcast_strides():
    sizes = Sizes(BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, DIM, DIM, None, 0)
    for shape in [(6, 10), (1, 10), (6, 1), (4, 1, 10), (2, 1, 6, 10), (1, 4, 1, 1), ()]:
        tensor = torch.empty(shape)
        expanded = tensor.expand(sizes.batch, sizes.num_heads, sizes.seqlen_q, sizes.seqlen_k)
        assert check_features.broadcast_strides(tensor, sizes) == expanded.stride()


def test_the_dispatcher_is_skipped_only_where_no_tensor_listens(monkeypatch):
    class LooksLikeCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(ops, "Tensor", LooksLikeCuda)
    plain = BIAS.as_subclass(LooksLikeCuda)
    assert ops.others_can_skip_dispatcher({"bias": plain, "softcap": 1.0, "window_left": 3})
    assert ops.others_can_skip_dispatcher({})
    assert not ops.others_can_skip_dispatcher({"bias": plain, "sinks": plain.detach().requires_grad_()})
    with torch.no_grad():
        assert ops.others_can_skip_dispatcher({"sinks": plain.detach().requires_grad_()})
    assert not ops.others_can_skip_dispatcher({"bias": torch._neg_view(plain)})
    monkeypatch.undo()
    assert not ops.others_can_skip_dispatcher({"bias": BIAS})
