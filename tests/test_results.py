"""``out`` and ``lse``: what a call writes to where it is given it, and what it refuses to write to."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import Guarded
from operands import GUARD
from tensors import ints, qkv, randn
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import attention, cascade_attention, merge_states, qk_norm_rope, rotary, rotary_qk, swiglu_mlp
from cutlass_fmha import scaled_dot_product_attention as sdpa
from cutlass_fmha.arguments import results

Q, K, V = qkv(2, 33, 65, 4, 2, 32, head_dim_v=24)
LSE_A, LSE_B = randn(2, 4, 33, seed=1), randn(2, 4, 33, seed=2)
COS = randn(100, 8)
HEADS_FIRST = tuple(x.transpose(1, 2) for x in (Q, K, V))
PACKED = tuple(x.flatten(0, 1) for x in (Q, K, V))
CU = {"cu_seqlens_q": ints(0, 20, 66), "cu_seqlens_k": ints(0, 100, 130)}
NEW = {"k": K[:, :1].clone(), "v": V[:, :1].clone(), "cache_seqlens": ints(5, 9)}

#: Calls that return an output, or one and its LSE.
CALLS: dict[str, Callable[..., Any]] = {
    "plain": functools.partial(attention, *qkv(), return_lse=True),
    "features": functools.partial(attention, Q, K, V, softcap=2.0, causal=True, return_lse=True),
    "without an LSE": functools.partial(attention, Q, K, V, window=(5, 0)),
    "heads first": functools.partial(attention, *HEADS_FIRST, layout="bhsd", return_lse=True),
    "packed": functools.partial(attention, *PACKED, **CU, return_lse=True),
    "float64": functools.partial(attention, *(x.double() for x in (Q, K, V)), return_lse=True),
    "no queries": functools.partial(attention, Q[:, :0], K, V, return_lse=True),
    "SDPA": functools.partial(sdpa, *HEADS_FIRST, enable_gqa=True),
    "SDPA, broadcast": functools.partial(sdpa, randn(3, 1, 2, 5, 16), randn(4, 1, 7, 16), randn(4, 1, 7, 8)),
    "SDPA, two dimensions": functools.partial(sdpa, randn(5, 16), randn(7, 16), randn(7, 8)),
    "a cache": functools.partial(cutlass_fmha.with_kv_cache, Q[:, :1], K.clone(), V.clone(), **NEW, return_lse=True),
    "cascade": functools.partial(cascade_attention, Q, K[0], V[0], K, V, causal=True, return_lse=True),
    "states": functools.partial(merge_states, Q, LSE_A, Q * 2, LSE_B),
    "rotary": functools.partial(rotary, Q, COS, COS, 3),
    "packed rotary": functools.partial(rotary, PACKED[0], COS, COS, ints(1, 2), cu_seqlens=ints(0, 20, 66)),
}  # fmt: skip


def pair(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def poisoned(like: Tensor, strided: bool) -> Guarded:
    """A tensor of that shape in NaN: contiguous, or rows of 8 elements more."""
    *lead, width = like.shape
    strides = torch.empty(*lead, width + 8 * strided, device="meta").stride()
    buffer = torch.empty(2 * GUARD + math.prod(lead) * (width + 8), dtype=like.dtype)
    return Guarded.around(buffer.as_strided(like.shape, strides, GUARD))


MLP = (randn(3, 5, 16), randn(48, 16), randn(7, 24))
CACHES = {f"{x}_cache": torch.zeros(2, 65, 2, n, dtype=Q.dtype) for x, n in (("k", 32), ("v", 24))}
#: Calls beside attention, which take all that they return as ``out``, the last ones a tuple.
BESIDE: dict[str, Callable[..., Any]] = {
    "the MLP": functools.partial(swiglu_mlp, *MLP),
    "q and k rotated": functools.partial(rotary_qk, Q, K[:, :33], COS, COS),
    "q and k normed": functools.partial(qk_norm_rope, Q, K[:, :33], None, randn(32), cos=COS, sin=COS),
    "and appended": functools.partial(
        qk_norm_rope, Q, K[:, :33], V[:, :33], cos=COS, sin=COS, cache_seqlens=ints(3, 9), **CACHES
    ),
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_given_is_what_a_call_would_return(name: str, strided: bool):
    call = CALLS[name]
    expected = dict(zip(("out", "lse"), pair(call()), strict=False))
    any_lse = name in ("cascade", "states")  # which may lie anyhow
    for given in ({"out", "lse"}, {"out"}, {"lse"} & expected.keys()):
        to = {x: poisoned(y, strided and (x == "out" or any_lse)) for x, y in expected.items() if x in given}
        found = pair(call(**{word: x.view for word, x in to.items()}))
        for (word, x), y in zip(expected.items(), found, strict=True):
            assert torch.equal(x, y) and (word not in to or y is to[word].view)
        assert all(x.intact() for x in to.values())


@pytest.mark.parametrize("name", BESIDE)
def test_so_it_is_beside_attention(name: str):
    call = BESIDE[name]
    expected = call()
    for strided in (False, True):
        rooms = tuple(poisoned(x, strided) for x in pair(expected))
        to = tuple(x.view for x in rooms) if isinstance(expected, tuple) else rooms[0].view
        assert call(out=to) is to
        assert all(torch.equal(x, y) for x, y in zip(pair(to), pair(expected), strict=True))
        assert all(x.intact() for x in rooms)
    same = torch.compile(lambda to: call(out=to), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(pair(same(to)), pair(expected), strict=True))
    first, *others = pair(to)
    short = first[..., :-1].contiguous()
    with pytest.raises(ValueError, match=re.escape(f"{'out[0]' if others else 'out'} must have shape ")):
        call(out=(short, *others) if others else short)
    if others:
        with pytest.raises(TypeError, match="out must be a tuple of two tensors, got Tensor"):
            call(out=first)
        with pytest.raises(ValueError, match=re.escape("out[0] must not share memory with q, which")):
            call(out=(call.args[0], *others))


def test_memory_is_shared_or_not_and_results_may_lie_between_operands():
    """By the addresses of all bytes: views of one tensor that alternate, touch or overlap."""
    x = torch.arange(4 * 6 * 8)  # each number is its address
    draw = torch.Generator().manual_seed(0)
    sentence, found = "out must not share memory with q, which is read or written in the same call", set()
    for _ in range(2000):
        sizes, steps = (torch.randint(low, high, (2, 3), generator=draw).tolist() for low, high in ((1, 4), (0, 25)))
        views = [x.as_strided(size, (*step[:2], 1), step[2]) for size, step in zip(sizes, steps, strict=True)]
        one, other = (set(view.flatten().tolist()) for view in views)
        assert results._overlaps_itself(views[0]) or len(one) == views[0].numel()
        shared, refused = not one.isdisjoint(other), False
        try:
            results.check_apart(results.placed({"out": views[0]}), results.placed({"q": views[1]}))
        except ValueError as error:
            refused = str(error) == sentence
        found.add((shared, refused))
    assert found == {(True, True), (False, False), (False, True)}  # the last: may, for all that strides tell
    both = torch.randn(2, 33, 4, 4, 32)  # queries, keys, values and outputs of a token side by side
    q, k, v, out = both.unbind(2)
    expected = attention(q, k, v)
    assert torch.equal(attention(q, k, v, out=out), expected)
    cache = torch.randn(2, 4, 33, 64)
    assert attention(q, k, v, out=cache[..., :32].transpose(1, 2)).data_ptr() == cache.data_ptr()
    with pytest.raises(ValueError, match="out must not share memory with q,"):
        attention(q, k, v, out=both.view(2, 33, 4, 128)[..., 16:48])


@pytest.mark.parametrize("name", ["features", "states", "rotary", "SDPA", "a cache", *BESIDE])
def test_a_gradient_is_refused(name: str):
    plain = (CALLS | BESIDE)[name]
    out = pair(plain())[0].clone() if name in CALLS else plain()
    first = plain.args[0].detach().clone().requires_grad_()
    call = functools.partial(plain.func, first, *plain.args[1:], **plain.keywords)
    with pytest.raises(NotImplementedError, match="out and lse are not taken where a gradient is wanted"):
        call(out=out)
    with torch.no_grad():
        assert (found := call(out=out)) is out or pair(found)[0] is out
    with pytest.raises(NotImplementedError, match="out and lse are not taken"):
        plain(out=(out[0].requires_grad_(), out[1]) if isinstance(out, tuple) else out.requires_grad_())


def test_who_saved_a_result_is_told_that_it_changed():
    for name in ("plain", "states", "rotary"):
        out = pair(CALLS[name]())[0].clone()
        kept = (torch.ones_like(out, requires_grad=True) * out).sum()
        CALLS[name](out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
    with torch.inference_mode():  # whose tensors have no version
        CALLS["plain"](out=torch.empty_like(pair(CALLS["plain"]())[0]))


def test_a_compiled_call_writes_there():
    q, k, v = qkv()

    def step(out: Tensor, lse: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        rotary(q, COS, COS, ints(3, 4), out=turned)
        attention(turned, k, v, causal=True, out=out, lse=lse, return_lse=True)
        merged = merge_states(out, lse, out * 2, lse, out=turned)
        first = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", softcap=2.0, out=out.transpose(1, 2))
        return merged[1] * 2, first + 1

    rooms = [[poisoned(q, True), poisoned(randn(2, 4, 33), False), poisoned(q, False)] for _ in range(2)]
    views = [[x.view for x in to] for to in rooms]
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    expected, found = step(*views[0]), compiled(*views[1])
    torch.testing.assert_close((found, views[1]), (expected, views[0]))
    assert all(x.intact() for x in rooms[1])

    def one(out: Tensor, lse: Tensor) -> list[Tensor]:
        mask = k[0, :, 0, 0] > -1.0
        found = [attention(q, k, v, mask=mask, return_lse=True, **said)[0] for said in ({"out": out}, {"lse": lse})]
        return [*found, cutlass_fmha.with_kv_cache(q, k, v, out=out)]

    for dynamic in (False, True):
        compiled = torch.compile(one, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        torch.testing.assert_close(compiled(*views[1][:2]), one(*views[0][:2]))


def test_opcheck_passes():
    ops = torch.ops.cutlass_fmha
    check = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    strided, lse = torch.empty(2, 33, 4, 32, dtype=Q.dtype)[..., :24], torch.empty(2, 4, 33)
    for to, said in (((strided, None), {}), ((strided, lse), {"softcap": 2.0})):
        check(ops.attend_out.default, (Q, K, V, *to, 0.3, "none", None), said)
    check(ops.merge_states_out.default, (Q, LSE_A, Q * 2, LSE_B, torch.empty_like(Q), LSE_A.clone()))
    check(ops.rotary_out.default, (Q, COS, COS, ints(3, 4), torch.empty_like(Q)))
    k, said = K[:, :33].clone(), {"cos": COS, "sin": COS}
    check(ops.rotary_qk_out.default, (Q, k, torch.empty_like(Q), torch.empty_like(k)), said)
    check(ops.qk_norm_rope_out.default, (Q, k, torch.empty_like(Q), torch.empty_like(k)), said)
    to = (torch.empty_like(Q), ints(0, 0))
    check(ops.qk_norm_rope_append_out.default, (*CACHES.values(), *to, Q, k, V[:, :33], ints(3, 9)), said)


def test_autocasts_dtype_is_that_of_the_result():
    call = functools.partial(attention, Q.float(), K.float(), V.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = call()
        assert torch.equal(call(out=torch.empty_like(expected)), expected)
        with pytest.raises(ValueError, match="out must be bfloat16, as the result is, got float32"):
            call(out=expected.float())
