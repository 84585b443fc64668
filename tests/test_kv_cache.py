"""Rotary embedding, appending to caches and attention over them: CPU tensors, the ops, what is refused."""

from __future__ import annotations

import oracle_features
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_helpers import places
from tensors import ints, randn
from torch import Tensor

import cutlass_fmha
from cutlass_fmha.kv_cache import with_kv_cache
from cutlass_fmha.ops import append_kv, dispatcher
from cutlass_fmha.rotary import rotary

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
append_kv_ = torch.ops.cutlass_fmha.append_kv_


def angles(positions: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin as models have them."""
    turns = torch.outer(torch.arange(positions), 10000.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    return turns.cos().to(dtype), turns.sin().to(dtype)


def following(first: Tensor, seqlen: int) -> Tensor:
    """[batch, seqlen]: the positions of rows that follow the first one."""
    return first[:, None] + torch.arange(seqlen)


# ---- rotary ------------------------------------------------------------------------------------------------


def test_a_position_may_be_an_int():
    x, (cos, sin) = randn(2, 4, 2, 16), angles(16, 16)
    assert rotary(randn(0, 3, 5, 24), cos, sin, ints()).shape == (0, 3, 5, 24)
    assert rotary(randn(2, 0, 5, 24), cos, sin, ints(1, 2)).shape == (2, 0, 5, 24)
    for first in (0, 12):
        assert torch.equal(rotary(x, cos, sin, first), rotary(x, cos, sin, ints(first, first)))
    assert rotary(randn(0, 4, 2, 16), cos, sin, 3).shape == (0, 4, 2, 16)
    assert rotary(randn(2, 0, 2, 16), cos, sin, 99).shape == (2, 0, 2, 16)


# ---- appending ---------------------------------------------------------------------------------------------


class Cache:
    """A cache with what a call appends to it: contiguous, by entries, or in pages that lie anywhere."""

    def __init__(
        self, kind: str, dtype: torch.dtype = torch.float32, dim_v: int = 16, batch: int = 3
    ) -> None:
        self.kind, self.batch = kind, batch
        entries, rows = {"contiguous": (batch, 24), "entries": (7, 24), "pages": (3 * batch + 2, 16)}[kind]
        self.k_cache = randn(entries, rows, 2, 16, dtype=dtype, seed=1)
        self.v_cache = randn(entries, rows, 2, dim_v, dtype=dtype, seed=2)
        self.places: dict[str, Tensor] = {}
        order = torch.randperm(entries, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        if kind == "entries":
            self.places["cache_batch_idx"] = order[:batch]
        if kind == "pages":
            self.places["page_table"] = order[: 3 * batch].view(batch, 3)


KINDS = ("contiguous", "entries", "pages")


# ---- attention over a cache --------------------------------------------------------------------------------


SIDES = st.one_of(st.none(), st.integers(0, 9))


OPTIONS = st.fixed_dictionaries(
    {"causal": st.sampled_from((False, True, "top-left"))},
    optional={"window": st.tuples(SIDES, SIDES), "softcap": st.just(3.0), "num_splits": st.integers(1, 4)},
)


@settings(max_examples=100, deadline=None)
@given(
    used=st.one_of(st.lists(st.integers(0, 19), min_size=3, max_size=3), st.integers(0, 19)),
    kind=st.sampled_from(KINDS),
    seqlen_q=st.integers(1, 4),
    rotated=st.sampled_from((None, "cache_seqlens", "rotary_seqlens", "an int")),
    padded=st.booleans(),
    appended=st.booleans(),
    interleaved=st.booleans(),
    options=OPTIONS,
)
def test_a_step_is_attention_over_old_and_new_keys(
    used, kind, seqlen_q, rotated, padded, appended, interleaved, options
):
    cache, before, (cos, sin) = Cache(kind, dim_v=8), Cache(kind, dim_v=8), angles(40, 8)
    q, k, v = randn(3, seqlen_q, 6, 16, seed=7), randn(3, 4, 2, 16, seed=8), randn(3, 4, 2, 8, seed=9)
    lengths = ints(*([used] * 3 if isinstance(used, int) else used))
    pads = lengths // 2 if padded else None
    first = lengths if pads is None else lengths - pads
    said = {"leftpad_k": pads, "cache_seqlens": used if isinstance(used, int) else lengths, **cache.places}
    if rotated and appended:
        said |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        if rotated != "cache_seqlens":
            first = ints(7, 7, 7) if rotated == "an int" else ints(30, 0, 5)
            said["rotary_seqlens"] = 7 if rotated == "an int" else first
    new = (k, v) if appended else ()
    output, lse = with_kv_cache(q, cache.k_cache, cache.v_cache, *new, **said, **options, return_lse=True)
    if "rotary_cos" in said:
        bounded = any(side not in (None, -1) for side in options.get("window", ()))
        moves = options["causal"] is not False or bounded  # or all queries stand at the first position
        positions = following(first, seqlen_q) if moves else first[:, None].expand(3, seqlen_q)
        rows = q.flatten(0, 1)[:, None], k
        q, k = (
            rotary(x, cos, sin, at.flatten().int(), interleaved=interleaved)
            for x, at in zip(rows, (positions, first), strict=True)
        )
        q = q.view(3, seqlen_q, 6, 16)
    if appended:
        at = [cache.places.get(name) for name in ("cache_batch_idx", "page_table")]
        found = places(lengths, 4, before.k_cache.shape[1], before.k_cache.shape[0], *at)
        assert len(found) == 3 * 4
        for (b, i), place in found.items():
            before.k_cache[place], before.v_cache[place] = k[b, i], v[b, i]
    assert torch.equal(cache.k_cache, before.k_cache) and torch.equal(cache.v_cache, before.v_cache)
    causal = {False: "none", True: "bottom-right"}.get(options.pop("causal"), "top-left")
    oracle_features.compare(
        output, lse, q, cache.k_cache, cache.v_cache, causal=causal, **options, **cache.places,
        seqused_k=lengths + 4 * appended, leftpad_k=pads,
    ).check()  # fmt: skip


def test_a_cache_that_says_no_length_is_full():
    cache, q = Cache("contiguous"), randn(3, 2, 6, 16)
    whole = with_kv_cache(q, cache.k_cache, cache.v_cache, causal=True, softcap=3.0)
    assert torch.equal(
        whole, cutlass_fmha.attention(q, cache.k_cache, cache.v_cache, causal=True, softcap=3.0)
    )


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 18)), min_size=1, max_size=5),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    around=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    laid=st.sampled_from(("contiguous", "heads first", "wider", "one row for all")),
    rotated=st.sampled_from((None, "cache_seqlens", "rotary_seqlens")),
    padded=st.booleans(),
    appended=st.booleans(),
    bounded=st.booleans(),
    options=OPTIONS,
)
def test_a_packed_step_is_that_of_each_sequence_alone(
    lengths, kind, dtype, around, laid, rotated, padded, appended, bounded, options
):
    """Bit for bit, in the cache and in what is returned. Rows around the sequences are nobody's."""
    counts, before = zip(*lengths, strict=True)
    cache, alone = Cache(kind, dtype, 8, len(lengths)), Cache(kind, dtype, 8, len(lengths))
    begins = ints(around[0], *(around[0] + sum(counts[: b + 1]) for b in range(len(counts))))
    rows = sum(counts) + sum(around)

    def packed(heads: int, dim: int, seed: int) -> Tensor:
        if laid == "heads first":
            return randn(heads, rows, dim, dtype=dtype, seed=seed).transpose(0, 1)
        if laid == "one row for all":
            return randn(1, heads, dim, dtype=dtype, seed=seed).expand(rows, -1, -1)
        return randn(rows, heads, dim + 8 * (laid == "wider"), dtype=dtype, seed=seed)[..., :dim]

    q, k, v = packed(6, 16, 7), packed(2, 16, 8), packed(2, 8, 9)
    used = ints(*before)
    vectors = {"cache_seqlens": used}
    if padded:
        vectors["leftpad_k"] = ints(*(length // 2 for length in before))
    if rotated and appended:
        options |= dict(zip(("rotary_cos", "rotary_sin"), angles(40, 8), strict=True))
        if rotated == "rotary_seqlens":
            vectors["rotary_seqlens"] = ints(*(30 - n for n in counts))
    bounds = {"max_seqlen_q": max(counts)} if bounded else {}
    if bounded:
        bounds["max_seqlen_k"] = max(a + b * appended for b, a in lengths)
    new = (k, v) if appended else ()
    output, lse = with_kv_cache(
        q, cache.k_cache, cache.v_cache, *new, **vectors, **cache.places, cu_seqlens_q=begins, **bounds,
        **options, return_lse=True,
    )  # fmt: skip
    assert output.shape == (rows, 6, 8) and lse.shape == (6, rows)
    places = alone.places or {"cache_batch_idx": torch.arange(len(lengths), dtype=torch.int32)}
    for b in range(len(lengths)):
        own = slice(int(begins[b]), int(begins[b + 1]))
        one = {name: x[b : b + 1] for name, x in (vectors | places).items()}
        expected = with_kv_cache(
            q[None, own], alone.k_cache, alone.v_cache, *(x[None, own] for x in new), **one, **options,
            return_lse=True,
        )  # fmt: skip
        assert torch.equal(output[own], expected[0][0]) and torch.equal(lse[:, own], expected[1][0])
    assert torch.equal(cache.k_cache, alone.k_cache) and torch.equal(cache.v_cache, alone.v_cache)


# ---- what torch expects of an op ---------------------------------------------------------------------------


def test_opcheck_passes():
    cos, sin = angles(30, 12)
    x = randn(3, 5, 2, 16)
    torch.library.opcheck(torch.ops.cutlass_fmha.rotary.default, (x, cos, sin, ints(0, 1, 2)))
    torch.library.opcheck(
        torch.ops.cutlass_fmha.rotary.default,
        (x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, ints(0, 1, 2)),
        {"interleaved": True},
    )
    for kind in KINDS:
        cache = Cache(kind)
        tensors = (cache.k_cache, cache.v_cache, x, randn(3, 5, 2, 16), ints(0, 5, 19))
        torch.library.opcheck(append_kv_.default, tensors, cache.places)
        rotation = {"query": randn(3, 2, 6, 16), "rotary_cos": cos, "rotary_sin": sin}
        torch.library.opcheck(append_kv_.default, tensors, cache.places | rotation)
        packed = {"cu_seqlens_q": ints(0, 4, 4, 15), "query": randn(15, 6, 16)}
        tensors = (*tensors[:2], x.flatten(0, 1), randn(15, 2, 16), ints(0, 5, 9))
        torch.library.opcheck(append_kv_.default, tensors, cache.places | rotation | packed)


def test_who_saved_a_cache_is_told_that_it_changed():
    cache = Cache("contiguous")
    weight = torch.ones(1, requires_grad=True)
    product = cache.k_cache * weight
    append_kv_(cache.k_cache, cache.v_cache, randn(3, 5, 2, 16), randn(3, 5, 2, 16), ints(0, 1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_compiles_whole_and_writes_the_cache(packed: bool):
    cache, other, (cos, sin) = Cache("pages"), Cache("pages"), angles(24, 16)
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


def test_past_the_dispatcher_writes_are_counted_too(monkeypatch):
    """As autograd does it: whoever saved a cache for a backward is told."""
    monkeypatch.setattr(dispatcher, "can_skip_dispatcher", lambda *tensors: True)
    monkeypatch.setattr(dispatcher, "others_can_skip_dispatcher", lambda arguments: True)
    monkeypatch.setattr(append_kv, "_launch", append_kv.write)  # the CPU's, as there is no GPU
    for inference in (False, True):
        with torch.inference_mode(inference):
            k_cache, v_cache = (torch.zeros(1, 8, 2, 4) for _ in range(2))
            key = torch.ones(1, 2, 2, 4)
            lengths = torch.tensor([3], dtype=torch.int32)
            before = None if inference else (k_cache._version, v_cache._version)
            _, used = append_kv.append(append_kv.Append(k_cache, v_cache, key, key, lengths))
            assert used.tolist() == [5] and k_cache[0, 3:5].eq(1).all()
        # The write itself counts once.
        assert inference or (k_cache._version - before[0], v_cache._version - before[1]) == (2, 2)
