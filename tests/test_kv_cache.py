"""Rotary embedding, appending to caches and attention over them: CPU tensors, the ops, what is refused."""

from __future__ import annotations

from typing import Any

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

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, dim_v: int = 16, batch: int = 3) -> None:
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


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 18)), min_size=1, max_size=5),
    packed=st.booleans(),
    seqlen_q=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
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
    cache, expected = (Cache(kind, dtype, 8, batch) for _ in range(2))
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
        cos, sin = angles(40, 8)
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
    monkeypatch.setattr(append_kv, "_launch", lambda a, room: append_kv.write(a))  # there is no GPU
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
