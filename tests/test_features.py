"""What a call may say besides: every rule about it, with its sentence; and that each reaches the op."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import torch
from tensors import ints
from test_bad_calls import BIAS, BLOCKS, CU_K, CU_Q, MASK, PACKED, PAGED, TABLE, K, Q, V
from test_ops import LooksLikeCuda

from cutlass_fmha import attention, cpu
from cutlass_fmha.arguments import op_arguments
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.features import CallArguments, FeatureArguments, Features
from cutlass_fmha.ops import dispatcher

(BATCH, SEQLEN_Q, HEADS, DIM), (_, SEQLEN_K, HEADS_KV, _) = Q.shape, K.shape


def call(**arguments: Any) -> Any:
    return attention(**({"q": Q, "k": K, "v": V} | arguments))


# ---- one list of names -------------------------------------------------------------------------------------


def test_the_ops_keyword_arguments_are_the_fields_of_features():
    arguments = [x for x in torch.ops.cutlass_fmha.attend.default._schema.arguments if x.kwarg_only]
    *features, numbers = arguments  # the last stands for three others in a compiled graph
    assert {x.name: x.default_value for x in features} == Features._field_defaults
    assert tuple(x.name for x in features) == Features._fields and numbers.name == "numbers"


def test_attention_takes_the_names_that_its_type_has():
    import typing

    hints = get_type_hints(FeatureArguments, vars(typing) | {"Tensor": torch.Tensor})
    known = op_arguments.TENSORS | op_arguments.INTEGERS | op_arguments.FLOATS | op_arguments.OTHERS
    assert set(hints) == known
    assert set(CallArguments.__annotations__) == {*hints, *RESULTS}
    assert all(name in attention.__doc__ for name in CallArguments.__annotations__)


def test_what_says_nothing_is_a_plain_call(monkeypatch):
    monkeypatch.setattr(cpu, "attend", None)
    nothing = dict.fromkeys(FeatureArguments.__annotations__)
    expected = call()
    for said in (nothing, {"softcap": 0, "dropout_p": 0.0, "dropout_seed": 3, "batch_invariant": False}):
        assert torch.equal(call(**said), expected)
    assert torch.equal(call(window=(-1, None)), expected)
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
    for dtype, given, expected in [
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float64, torch.float64, torch.float64),
    ]:
        attention(Q.to(dtype), K.to(dtype), V.to(dtype), sinks=torch.ones(HEADS, dtype=given))
        assert seen.pop().sinks.dtype == expected


# ---- what is taken --------------------------------------------------------------------------------------


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
        plain = x.clone(memory_format=torch.contiguous_format)
        assert torch.equal(call(**with_argument(name, x)), call(**with_argument(name, plain)))
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
    short = torch.empty(1, 1, 1, 16, device="meta")
    long = torch.empty_strided((1, 2**29 + 1, 1, 16), (0, 0, 0, 1), device="meta")
    with pytest.raises(ValueError, match=r"k must have a seqlen of 2\*\*29 at most, got 536870913"):
        attention(short, long, long)
    packed = long[0]
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_k": 9}
    with pytest.raises(ValueError, match=r"q must have a seqlen of 2\*\*29 at most, got 536870913: pass"):
        attention(packed, packed, packed, **arguments)
    out = attention(packed, packed, packed, **arguments, max_seqlen_q=9)
    assert out.shape == packed.shape


def test_the_dispatcher_is_skipped_only_where_no_tensor_listens(monkeypatch):
    monkeypatch.setattr(dispatcher, "Tensor", LooksLikeCuda)
    plain = BIAS.as_subclass(LooksLikeCuda)
    assert dispatcher.others_can_skip_dispatcher([plain, 1.0, 3])
    assert dispatcher.others_can_skip_dispatcher([])
    assert not dispatcher.others_can_skip_dispatcher([plain, plain.clone().requires_grad_()])
    with torch.no_grad():
        assert dispatcher.others_can_skip_dispatcher([plain.detach().requires_grad_()])
    assert not dispatcher.others_can_skip_dispatcher([torch._neg_view(plain)])
    monkeypatch.undo()
    assert not dispatcher.others_can_skip_dispatcher([BIAS])
