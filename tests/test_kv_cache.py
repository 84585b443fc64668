"""Appending to caches and attention over them, on the CPU and past the dispatcher. test_autocast.py compiles steps."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_kernels import install, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import LooksLikeCuda, ints, randn
from test_parity_helpers import KINDS, places_in, table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cutlass_fmha
from cutlass_fmha import _C, kv_cache
from cutlass_fmha.kv_cache import with_kv_cache
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import append_kv, dispatcher
from cutlass_fmha.rotary import rotary

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

append_kv_ = torch.ops.cutlass_fmha.append_kv_
Step = functools.partial[Any]


def test_a_position_may_be_an_int_and_a_cache_that_says_no_length_is_full():
    cache, q = Cache("contiguous"), randn(3, 2, 6, 16)
    whole = with_kv_cache(q, cache.k_cache, cache.v_cache, causal=True, softcap=3.0)
    assert torch.equal(whole, cutlass_fmha.attention(q, cache.k_cache, cache.v_cache, causal=True, softcap=3.0))
    x, table_ = randn(2, 4, 2, 16), table(16, 16)
    for first in (0, 12):
        assert torch.equal(rotary(x, *table_, first), rotary(x, *table_, ints(first, first)))
    for batch, seqlen, first in ((0, 3, ints()), (2, 0, ints(1, 2)), (0, 4, 3), (2, 0, 99)):
        assert rotary(randn(batch, seqlen, 5, 24), *table_, first).shape == (batch, seqlen, 5, 24)


class Cache:
    """A cache with what a call appends to it: contiguous, by entries, or in pages that lie anywhere."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, dims: Any = (16, 16), batch: int = 3) -> None:
        entries, rows, self.places = places_in(kind, batch)
        self.k_cache, self.v_cache = (randn(entries, rows, 2, dim, dtype=dtype, seed=i) for i, dim in enumerate(dims))


SIDES = st.one_of(st.none(), st.integers(0, 9))


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 18)), min_size=1, max_size=5),
    seqlen_q=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    around=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    rotated=st.sampled_from((None, "cache_seqlens", "rotary_seqlens", "an int")),
    options=st.fixed_dictionaries({"causal": st.sampled_from((False, True, "top-left"))}, optional={
        "window": st.tuples(SIDES, SIDES), "softcap": st.just(3.0), "num_splits": st.integers(1, 4)}),
    **dict.fromkeys(("packed", "alike", "padded", "appended", "interleaved", "bounded"), st.booleans()),
)  # fmt: skip
def test_a_step_is_an_append_and_attention_over_the_cache(
    lengths, packed, seqlen_q, kind, dtype, around, rotated, alike, padded, appended, interleaved, bounded, options
):
    """``packed``: with rows around, which are nobody's; ``alike``: all as long. test_parity_helpers.py has fp64."""
    counts, before = zip(*lengths, strict=True)
    batch = len(lengths)
    counts, before = counts if packed else (4,) * batch, before[:1] * batch if alike else before
    cache, expected = (Cache(kind, dtype, (16, 8), batch) for _ in range(2))
    begins = [around[0] + sum(counts[:b]) for b in range(batch + 1)]
    rows = (begins[-1] + around[1],) if packed else (batch, 4)
    q = randn(*(rows if packed else (batch, seqlen_q)), 6, 16, dtype=dtype, seed=7)
    k, v = (randn(*rows, 2, dim, dtype=dtype, seed=dim) for dim in (16, 8))
    used, rotation, bounds = ints(*before), {}, {}
    said: dict[str, Any] = {"leftpad_k": used // 2 if padded else None, **cache.places}
    if packed:
        said["cu_seqlens_q"] = ints(*begins)
        bounds = {"max_seqlen_q": max(counts)} if bounded else {}
    if bounded:
        bounds["max_seqlen_k"] = max(a + b * appended for a, b in zip(before, counts, strict=True))
    if rotated and appended:
        rotation = dict(zip(("rotary_cos", "rotary_sin"), table(40, 8), strict=True))
        rotation["rotary_interleaved"] = interleaved
        first = {"cache_seqlens": None, "rotary_seqlens": ints(*(30 - n for n in counts)), "an int": 7}[rotated]
        rotation["rotary_seqlens"] = first
    found = with_kv_cache(
        q, cache.k_cache, cache.v_cache, *((k, v) if appended else ()), **said, **rotation, **bounds, **options,
        cache_seqlens=before[0] if alike else used, return_lse=True,
    )  # fmt: skip
    caches = expected.k_cache, expected.v_cache
    if rotation:
        # Or all queries stand at the first position.
        moves = options["causal"] is not False or any(side is not None for side in options.get("window", ()))
        rotation |= {"query": q, "advance_query": moves}
        rotation["rotary_seqlens"] = ints(*[7] * batch) if rotated == "an int" else first
    if appended:
        turned, used = append_kv_(*caches, k, v, used, **said, **rotation)
        q = turned if rotation else q
    wanted = cutlass_fmha.attention(q, *caches, **said, **bounds, **options, seqused_k=used, return_lse=True)
    assert all(map(torch.equal, (*found, cache.k_cache, cache.v_cache), (*wanted, *caches)))


def test_opcheck_passes():
    cos, sin = table(30, 12)
    x = randn(3, 5, 2, 16)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    check = torch.library.opcheck
    for laid, said in ((x, {}), (heads_first, {"interleaved": True})):
        check(torch.ops.cutlass_fmha.rotary.default, (laid, cos, sin, ints(0, 1, 2)), said)
    rotation = {"query": randn(3, 2, 6, 16), "rotary_cos": cos, "rotary_sin": sin}
    packed = rotation | {"cu_seqlens_q": ints(0, 4, 4, 15), "query": randn(15, 6, 16)}
    for kind in KINDS:
        cache = Cache(kind)
        caches = (cache.k_cache, cache.v_cache)
        for said in ({}, rotation):
            check(append_kv_.default, (*caches, x, randn(3, 5, 2, 16), ints(0, 5, 19)), cache.places | said)
        check(append_kv_.default, (*caches, x.flatten(0, 1), randn(15, 2, 16), ints(0, 5, 9)), cache.places | packed)


class Launches(list[tuple[int, dict[str, Any]]]):
    """Row and fields of what was launched, in order. Of an append the lengths are written."""

    def run(self, row: int, params: Any, device: int, stream: int) -> None:
        self.append((row, fields(params)))
        if isinstance(params, _C.AppendParams):  # which the CPU's ops read
            lengths, used = (vector(x, params.batch) for x in (params.cache_seqlens, params.seqused_k))
            used.copy_(lengths + params.seqlen_new)


def fields(params: Any) -> dict[str, Any]:
    """All that parameters say, but for where what is made by the call itself lies."""
    own = {"seqused_k", "sinks", "o", "lse", "out", "partial_o", "partial_lse", "partial_low"}
    said = {name: getattr(params, name) for name in vars(type(params)) if name not in own and name[0] != "_"}
    nested = {name: fields(x) for name, x in said.items() if type(x) in (_C.Rotary, _C.RotaryParams)}
    return {name: x for name, x in said.items() if not callable(x)} | nested


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """What goes to the GPU; calls on tensors that look like CUDA's need not go through the dispatcher."""
    found = Launches()
    install(monkeypatch, found.run)
    monkeypatch.setattr(dispatcher, "Tensor", LooksLikeCuda)
    plan.clear()
    yield found
    plan.clear()


def turn(seqlen_q: int = 1, appended: bool = True, kind: str = "contiguous", **said: Any) -> Step:
    cache = Cache(kind, torch.float16, (64, 64))
    q, *new = (randn(3, seqlen_q, heads, 64, dtype=torch.float16) for heads in (6, 2, 2))
    said |= {"cache_seqlens": ints(0, 5, 9), **cache.places}
    return functools.partial(with_kv_cache, q, cache.k_cache, cache.v_cache, *(new if appended else ()), **said)


def on_gpu(step: Step, q: Tensor | None = None) -> Step:
    """Or with another query, as it is."""
    args, said = tree_map_only(Tensor, lambda x: x.as_subclass(LooksLikeCuda), (step.args, step.keywords))
    return functools.partial(with_kv_cache, args[0] if q is None else q, *args[1:], **said)


COS, SIN = table(40, 32)
TURNS = {
    "nothing": turn(),
    "causal": turn(2, causal=True, return_lse=True),
    "a scale": turn(scale=0.3, causal="top-left"),
    "features": turn(window=(4, 0), softcap=3.0, sinks=torch.zeros(6, dtype=torch.float16), num_splits=2),
    "pages": turn(kind="pages", batch_invariant=True),
    "entries, padded": turn(kind="entries", leftpad_k=ints(0, 1, 2)),
    "rotated": turn(2, rotary_cos=COS, rotary_sin=SIN, causal=True),
    "rotated, from there": turn(rotary_cos=COS, rotary_sin=SIN, rotary_interleaved=True, rotary_seqlens=ints(1, 2, 3)),
    "as it is": turn(appended=False),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_step_by_a_plan_launches_what_the_ops_do(name: str, launched: Launches, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as by_ops:
        by_ops.setattr(dispatcher, "simulated", lambda: True)
        expected = TURNS[name]()
    through_dispatcher, step = list(launched), on_gpu(TURNS[name])
    assert len(through_dispatcher) == 1 + (name != "as it is")
    for op in ("append_kv_", "attend"):
        monkeypatch.setattr(torch.ops.cutlass_fmha, op, None)
    rotated = {"q"} if "rotated" in name else set()
    for _ in range(2):
        launched.clear()
        found = step()
        for (row, said), (own_row, own) in zip(launched, through_dispatcher, strict=True):
            assert row == own_row and {x for x in said if said[x] != own[x]} <= rotated
        outputs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        assert all(x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype for x, y in outputs)
        for module, each in ((plan, "prepare"), (append_kv, "prepare"), (kv_cache, "_checked")):
            monkeypatch.setattr(module, each, None)  # all of it is known


def test_what_differs_is_another_plan_and_numbers_are_checked_at_each_call(launched: Launches):
    step = on_gpu(TURNS["rotated"])
    q = step.args[0]
    for said, kept in (({}, 1), ({"scale": 2.0}, 1), ({"softcap": 1.0}, 2), ({"rotary_interleaved": True}, 3)):
        step(**said)
        assert len(plan._plans) == kept, said
    on_gpu(step, torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).as_subclass(LooksLikeCuda))()
    step(cache_seqlens=7, rotary_seqlens=3)
    step(cache_seqlens=8, rotary_seqlens=None)
    assert len(launched) == 14 and len(plan._plans) == 5  # of tensors, with and without positions
    for wrong, error, sentence in (
        ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved must be a bool, got int"),
        ({"num_splits": True}, TypeError, "num_splits must be an int or None, got bool"),
        ({"cache_seqlens": 23, "rotary_seqlens": 3}, ValueError, "leave room for 2 new rows among the 24"),
        ({"cache_seqlens": 7, "rotary_seqlens": 39}, ValueError, "has position 40"),
    ):
        with pytest.raises(error, match=sentence):
            step(**wrong)
    assert len(launched) == 14


def test_a_step_that_something_listens_to_goes_through_the_dispatcher(launched: Launches):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    step, seen = on_gpu(TURNS["rotated"]), []
    with Mode():
        output = step()
    assert launched == [] and torch.isfinite(output).all()
    ours = [each for each in seen if "cutlass_fmha" in each]
    assert ours == [f"cutlass_fmha.{op}.default" for op in ("append_kv_", "attend")]
    with torch.autocast("cpu", torch.float16):
        step()  # attention's part was done before: of the append alone the op is asked
    assert len(launched) == 1 and "softcap" in launched.pop()[1]
    with pytest.raises(NotImplementedError, match="no backward"):
        on_gpu(step, step.args[0].detach().requires_grad_())()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for cutlass_fmha::append_kv_"):
        torch.vmap(lambda q: on_gpu(step, q)())(step.args[0][None])
    assert launched == []
    step()
    assert len(launched) == 2


@pytest.mark.parametrize("said", [{}, {"mask": torch.ones(1, 24, dtype=torch.bool)}], ids=["planned", "one by one"])
def test_a_step_counts_its_writes_once(said: dict[str, Any], launched: Launches):
    """As autograd does it: whoever saved a cache for a backward is told."""
    for _ in range(2):
        step = on_gpu(turn(**said))
        versions = [x._version for x in step.args]
        step()
        assert [x._version - before for x, before in zip(step.args, versions, strict=True)] == [0, 1, 1, 0, 0]
    weight = torch.ones(64, dtype=torch.float16, requires_grad=True)
    product = (weight.as_subclass(LooksLikeCuda) * step.args[1]).sum()
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        functools.partial(with_kv_cache, *(x.clone() for x in step.args), **step.keywords)()


def test_the_op_counts_its_writes_once(monkeypatch: pytest.MonkeyPatch):
    """In whichever way torch goes through it: autograd, or what is left of that in inference."""
    monkeypatch.setattr(append_kv, "write", lambda a: a.results())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        k_cache, v_cache, key = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4), torch.ones(1, 2, 2, 4)
        with mode():
            append_kv_(k_cache, v_cache, key, key, ints(3))
        assert (k_cache._version, v_cache._version, key._version) == (1, 1, 0)
