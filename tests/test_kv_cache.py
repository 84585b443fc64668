"""Rotary embedding, appending to caches and attention over them: CPU tensors, the ops, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import oracle_features
import pytest
import torch
from fake_kernels import install, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_helpers import places
from tensors import ints, randn
from test_ops import LooksLikeCuda
from test_parity_helpers import KINDS, places_in, table
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_fmha
from cutlass_fmha import _C, kv_cache
from cutlass_fmha.kv_cache import with_kv_cache
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import append_kv, dispatcher
from cutlass_fmha.rotary import rotary

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

append_kv_ = torch.ops.cutlass_fmha.append_kv_


def test_a_position_may_be_an_int():
    x, (cos, sin) = randn(2, 4, 2, 16), table(16, 16)
    assert rotary(randn(0, 3, 5, 24), cos, sin, ints()).shape == (0, 3, 5, 24)
    assert rotary(randn(2, 0, 5, 24), cos, sin, ints(1, 2)).shape == (2, 0, 5, 24)
    for first in (0, 12):
        assert torch.equal(rotary(x, cos, sin, first), rotary(x, cos, sin, ints(first, first)))
    assert rotary(randn(0, 4, 2, 16), cos, sin, 3).shape == (0, 4, 2, 16)
    assert rotary(randn(2, 0, 2, 16), cos, sin, 99).shape == (2, 0, 2, 16)


# ---- appending, attention over a cache ---------------------------------------------------------------------


class Cache:
    """A cache with what a call appends to it: contiguous, by entries, or in pages that lie anywhere."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, dims: Any = (16, 16), batch: int = 3) -> None:
        entries, rows, self.places = places_in(kind, batch)
        self.k_cache, self.v_cache = (randn(entries, rows, 2, dim, dtype=dtype, seed=i) for i, dim in enumerate(dims))


SIDES = st.one_of(st.none(), st.integers(0, 9))


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 18)), min_size=1, max_size=5),
    packed=st.booleans(),
    seqlen_q=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    around=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    laid=st.sampled_from(("contiguous", "heads first", "wider", "one row for all")),
    rotated=st.sampled_from((None, "cache_seqlens", "rotary_seqlens", "an int")),
    alike=st.booleans(),
    padded=st.booleans(),
    appended=st.booleans(),
    interleaved=st.booleans(),
    bounded=st.booleans(),
    options=st.fixed_dictionaries(
        {"causal": st.sampled_from((False, True, "top-left"))},
        optional={
            "window": st.tuples(SIDES, SIDES), "softcap": st.just(3.0), "num_splits": st.integers(1, 4),
        },
    ),
)  # fmt: skip
def test_a_step_is_attention_over_old_and_new_keys(
    lengths, packed, seqlen_q, kind, dtype, around, laid, rotated, alike, padded, appended, interleaved,
    bounded, options,
):  # fmt: skip
    """Of sequences that are packed, rows around which are nobody's, or of a batch. ``alike``: all as long."""
    counts, before = zip(*lengths, strict=True)
    batch = len(lengths)
    counts, before = counts if packed else (4,) * batch, before[:1] * batch if alike else before
    cache, expected = (Cache(kind, dtype, (16, 8), batch) for _ in range(2))
    begins = [around[0] * packed + sum(counts[:b]) for b in range(batch + 1)]
    #: Of new keys, and of queries: the row, its sequence, and its number there.
    keys = [(begins[b] + i, b, i) for b in range(batch) for i in range(counts[b])]
    queries = keys if packed else [(b * seqlen_q + i, b, i) for b in range(batch) for i in range(seqlen_q)]

    def drawn(rows: int, heads: int, dim: int, seed: int) -> Tensor:
        if laid == "heads first":
            return randn(heads, rows, dim, dtype=dtype, seed=seed).transpose(0, 1)
        if laid == "one row for all":
            return randn(1, heads, dim, dtype=dtype, seed=seed).expand(rows, -1, -1)
        return randn(rows, heads, dim + 8 * (laid == "wider"), dtype=dtype, seed=seed)[..., :dim]

    new_rows = begins[-1] + around[1] * packed
    q = drawn(new_rows if packed else len(queries), 6, 16, 7)
    k, v = drawn(new_rows, 2, 16, 8), drawn(new_rows, 2, 8, 9)
    used = ints(*before)
    pads = used // 2 if padded else None
    first = used if pads is None else used - pads
    said: dict[str, Any] = {"leftpad_k": pads, **cache.places}
    if rotated and appended:
        cos, sin = table(40, 8)
        said |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        if rotated != "cache_seqlens":
            first = ints(*([7] * batch if rotated == "an int" else [30 - n for n in counts]))
            said["rotary_seqlens"] = 7 if rotated == "an int" else first
    packing: dict[str, Any] = {"cu_seqlens_q": ints(*begins)} if packed else {}
    bounds = {"max_seqlen_q": max(counts)} if bounded and packed else {}
    if bounded:
        bounds["max_seqlen_k"] = max(a + b * appended for a, b in zip(before, counts, strict=True))
    shaped = (x if packed else x.unflatten(0, (batch, -1)) for x in (q, k, v))
    given_q, *new = shaped
    output, lse = with_kv_cache(
        given_q, cache.k_cache, cache.v_cache, *(new if appended else ()), **said, **packing, **bounds,
        **options, cache_seqlens=before[0] if alike else used, return_lse=True,
    )  # fmt: skip
    if "rotary_cos" in said:
        bounds_of_window = options.get("window", ())
        # Or all queries stand at the first position.
        moves = options["causal"] is not False or any(side not in (None, -1) for side in bounds_of_window)

        def turned(x: Tensor, rows: list[tuple[int, int, int]], step: int) -> Tensor:
            index = [row for row, _, _ in rows]
            positions = ints(*(int(first[b]) + i * step for _, b, i in rows))
            found = x.clone()
            found[index] = rotary(x[index][:, None], cos, sin, positions, interleaved=interleaved)[:, 0]
            return found

        q, k = turned(q, queries, moves), turned(k, keys, 1)
    if appended:
        at = [cache.places.get(name) for name in ("cache_batch_idx", "page_table")]
        found = places(used, list(counts), expected.k_cache.shape[1], expected.k_cache.shape[0], *at)
        assert len(found) == len(keys)
        for row, b, i in keys:
            place = found[b, i]
            expected.k_cache[place], expected.v_cache[place] = k[row], v[row]
    assert torch.equal(cache.k_cache, expected.k_cache) and torch.equal(cache.v_cache, expected.v_cache)
    causal = {False: "none", True: "bottom-right"}.get(options.pop("causal"), "top-left")
    oracle_features.compare(
        output, lse, q if packed else q.unflatten(0, (batch, -1)), cache.k_cache, cache.v_cache,
        causal=causal, product_error=16.0, **options, **cache.places, **packing,
        seqused_k=used + ints(*counts) * appended, leftpad_k=pads,
    ).check()  # fmt: skip


def test_a_cache_that_says_no_length_is_full():
    cache, q = Cache("contiguous"), randn(3, 2, 6, 16)
    whole = with_kv_cache(q, cache.k_cache, cache.v_cache, causal=True, softcap=3.0)
    assert torch.equal(whole, cutlass_fmha.attention(q, cache.k_cache, cache.v_cache, causal=True, softcap=3.0))


# ---- what torch expects of an op ---------------------------------------------------------------------------


def test_opcheck_passes():
    cos, sin = table(30, 12)
    x = randn(3, 5, 2, 16)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    for laid, said in ((x, {}), (heads_first, {"interleaved": True})):
        torch.library.opcheck(torch.ops.cutlass_fmha.rotary.default, (laid, cos, sin, ints(0, 1, 2)), said)
    for kind in KINDS:
        cache = Cache(kind)
        tensors = (cache.k_cache, cache.v_cache, x, randn(3, 5, 2, 16), ints(0, 5, 19))
        torch.library.opcheck(append_kv_.default, tensors, cache.places)
        rotation = {"query": randn(3, 2, 6, 16), "rotary_cos": cos, "rotary_sin": sin}
        torch.library.opcheck(append_kv_.default, tensors, cache.places | rotation)
        packed = {"cu_seqlens_q": ints(0, 4, 4, 15), "query": randn(15, 6, 16)}
        tensors = (*tensors[:2], x.flatten(0, 1), randn(15, 2, 16), ints(0, 5, 9))
        torch.library.opcheck(append_kv_.default, tensors, cache.places | rotation | packed)


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_compiles_whole_and_writes_the_cache(packed: bool):
    cache, other, (cos, sin) = Cache("pages"), Cache("pages"), table(24, 16)
    q, key, value = randn(3, 2, 6, 16, seed=7), randn(3, 2, 2, 16, seed=8), randn(3, 2, 2, 16, seed=9)
    options = dict(cache.places)
    if packed:
        q, key, value = q.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        options |= {"cu_seqlens_q": ints(0, 1, 5, 6), "max_seqlen_q": 4, "max_seqlen_k": 21}

    def step(k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        output = with_kv_cache(
            q, k_cache, v_cache, key, value, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            causal=True, **options,
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output + k_cache.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(cache.k_cache, cache.v_cache, ints(0, 5, 19))
    torch.testing.assert_close(found, step(other.k_cache, other.v_cache, ints(0, 5, 19)))
    assert torch.equal(cache.k_cache, other.k_cache) and torch.equal(cache.v_cache, other.v_cache)


# ---- past the dispatcher -----------------------------------------------------------------------------------


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


class Turn(NamedTuple):
    """A decoding step, and what else it says."""

    tensors: tuple[Tensor, ...]
    said: dict[str, Any]

    def __call__(self, **more: Any) -> Any:
        return with_kv_cache(*self.tensors, **self.said, **more)

    def on_gpu(self) -> Turn:
        said = {name: x.as_subclass(LooksLikeCuda) if isinstance(x, Tensor) else x for name, x in self.said.items()}
        return Turn(tuple(x.as_subclass(LooksLikeCuda) for x in self.tensors), said)


def turn(seqlen_q: int = 1, appended: bool = True, kind: str = "contiguous", **said: Any) -> Turn:
    cache = Cache(kind, torch.float16, (64, 64))
    q, k, v = (randn(3, seqlen_q, heads, 64, dtype=torch.float16) for heads in (6, 2, 2))
    new = (k, v) if appended else ()
    return Turn((q, cache.k_cache, cache.v_cache, *new), {"cache_seqlens": ints(0, 5, 9), **cache.places, **said})


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
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_step_by_a_plan_launches_what_the_ops_do(name: str, launched: Launches, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as by_ops:
        by_ops.setattr(dispatcher, "simulated", lambda: True)
        expected = TURNS[name]()
    through_dispatcher, step = list(launched), TURNS[name].on_gpu()
    assert len(through_dispatcher) == 1 + (name != "as it is")
    for op in ("append_kv_", "attend"):
        monkeypatch.setattr(torch.ops.cutlass_fmha, op, None)
    for _ in range(2):
        launched.clear()
        found = step()
        rotated = {"q"} if "rotated" in name else set()
        for (row, said), (own_row, own) in zip(launched, through_dispatcher, strict=True):
            assert row == own_row and {x for x in said if said[x] != own[x]} <= rotated
        outputs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        assert all(x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype for x, y in outputs)
        for module, each in ((plan, "prepare"), (append_kv, "prepare"), (kv_cache, "_checked")):
            monkeypatch.setattr(module, each, None)  # all of it is known


def test_what_differs_is_another_plan(launched: Launches):
    """And what differs from call to call is in none."""
    step = TURNS["rotated"].on_gpu()
    q = step.tensors[0]
    for said, kept in (({}, 1), ({"scale": 2.0}, 1), ({"softcap": 1.0}, 2), ({"rotary_interleaved": True}, 3)):
        step(**said)
        assert len(plan._plans) == kept, said
    moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).as_subclass(LooksLikeCuda)
    Turn((moved, *step.tensors[1:]), step.said)()
    assert len(plan._plans) == 4
    with pytest.raises(TypeError, match="rotary_interleaved must be a bool, got int"):
        step(rotary_interleaved=1)
    with pytest.raises(TypeError, match="num_splits must be an int or None, got bool"):
        step(num_splits=True)


def test_numbers_of_a_step_are_checked_at_each_call(launched: Launches):
    tensors, said = TURNS["rotated"].on_gpu()
    for used, position in ((7, 3), (8, None)):
        Turn(tensors, {**said, "cache_seqlens": used, "rotary_seqlens": position})()
    Turn(tensors, said)()
    assert len(launched) == 6 and len(plan._plans) == 2  # of tensors, with and without positions
    for used, position, sentence in ((23, 3, "leave room for 2 new rows among the 24"), (7, 39, "has position 40")):
        with pytest.raises(ValueError, match=sentence):
            Turn(tensors, {**said, "cache_seqlens": used, "rotary_seqlens": position})()
    assert len(launched) == 6


def test_a_step_that_something_listens_to_goes_through_the_dispatcher(launched: Launches):
    def heard(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

    Mode = type("Mode", (TorchDispatchMode,), {"__torch_dispatch__": heard})
    FunctionMode = type("FunctionMode", (torch.overrides.TorchFunctionMode,), {"__torch_function__": heard})
    for listener in (Mode, FunctionMode):
        step, seen = TURNS["rotated"].on_gpu(), []
        with listener():
            output = step()
        assert launched == [] and torch.isfinite(output).all()
        assert [each for each in seen if "cutlass_fmha" in each] == [
            f"cutlass_fmha.{op}{'.default' if listener is Mode else ''}" for op in ("append_kv_", "attend")
        ]
    step = TURNS["rotated"].on_gpu()
    for listener in (torch.profiler.profile, forward_ad.dual_level):
        with listener():
            step()
        assert launched == []
    with torch.autocast("cpu", torch.float16):
        step()  # attention's part was done before: of the append alone the op is asked
    assert len(launched) == 1 and "softcap" in launched.pop()[1]
    frozen = Turn((step.tensors[0].detach().requires_grad_(), *step.tensors[1:]), step.said)
    with pytest.raises(NotImplementedError, match="no backward"):
        frozen()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for cutlass_fmha::append_kv_"):
        torch.vmap(lambda q: Turn((q, *step.tensors[1:]), step.said)())(step.tensors[0][None])
    assert launched == []
    step()
    assert len(launched) == 2


@pytest.mark.parametrize("said", [{}, {"mask": torch.ones(1, 24, dtype=torch.bool)}], ids=["planned", "one by one"])
def test_a_step_counts_its_writes_once(said: dict[str, Any], launched: Launches):
    """As autograd does it: whoever saved a cache for a backward is told."""
    for _ in range(2):
        step = turn(**said).on_gpu()
        versions = [x._version for x in step.tensors]
        step()
        assert [x._version for x in step.tensors] == [a + b for a, b in zip(versions, (0, 1, 1, 0, 0), strict=True)]
    cache = step.tensors[1]
    weight = torch.ones(64, dtype=torch.float16, requires_grad=True)
    product = (weight.as_subclass(LooksLikeCuda) * cache).sum()
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        Turn(tuple(x.clone() for x in step.tensors), step.said)()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_op_counts_its_writes_once(mode: Any, monkeypatch: pytest.MonkeyPatch):
    """In whichever way torch goes through it: autograd, or what is left of that in inference."""
    monkeypatch.setattr(append_kv, "write", lambda a: a.results())
    k_cache, v_cache, key = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4), torch.ones(1, 2, 2, 4)
    with mode():
        append_kv_(k_cache, v_cache, key, key, ints(3))
    assert (k_cache._version, v_cache._version, key._version) == (1, 1, 0)
