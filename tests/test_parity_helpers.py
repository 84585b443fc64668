"""What is beside attention against fp64: the CPU backend, and the kernels, on a GPU or in a simulator.

Outputs of launches through the binding lie in buffers of NaN, where a stray write is noticed.
"""

import itertools
import math
import os
import sys
from functools import partial
from typing import Any

import gpu
import oracle_features
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import GUARD, place, poison
from oracle_helpers import assert_merged, assert_rotated, bits, places
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.cascade import cascade_attention, merge_states
from cutlass_fmha.kv_cache import with_kv_cache
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.workspace import Workspace
from cutlass_fmha.norm import rms_norm
from cutlass_fmha.rotary import rotary

pytestmark = pytest.mark.filterwarnings("default")

DEVICE = torch.device("cpu")  # that of the backend under test
KERNELS = pytest.param("kernels", marks=pytest.mark.gpu)
INF = math.inf
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)
append_kv_ = torch.ops.cutlass_fmha.append_kv_

BY_DTYPE: list[Any] = [("cpu", dtype) for dtype in (*DTYPES, torch.float64)]
BY_DTYPE += [pytest.param("kernels", dtype, marks=pytest.mark.gpu) for dtype in DTYPES]
by_dtype = pytest.mark.parametrize(("backend", "dtype"), BY_DTYPE, indirect=["backend"], ids=str)
#: For problems of ops beside attention: the same ones each time, in a long run more.
drawn = settings(max_examples=int(os.environ.get("CUTLASS_FMHA_DRAWN", "50")), database=None, derandomize=True)
kernels_only = pytest.mark.parametrize("backend", [KERNELS], indirect=True)


@pytest.fixture(autouse=True, params=["cpu", KERNELS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes. In a simulator build the ops launch kernels on CPU tensors where they are asked to."""
    kernels = request.param == "kernels"
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", gpu.device() if kernels else torch.device("cpu"))
    monkeypatch.setenv("CUTLASS_FMHA_SIMULATE", str(int(kernels and gpu.simulated())))
    return request.param


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same elements amid NaN: as they are ("packed"), rows apart by 16 bytes ("padded"), or by elements ("odd"),
    two dimensions the other way round: heads and tokens ("bhsd"), or the first two ("swapped")."""
    dims = {"bhsd": (-2, -3), "swapped": (0, 1)}.get(how, (0, 0))
    if dims[0] != dims[1] and x.dim() > 2:
        return laid_out(x.transpose(*dims), "packed").transpose(*dims)
    before, after = {"padded": (16, 16), "odd": (1, 2)}.get(how, (0, 0))
    wide = (*x.shape[:-1], before + x.shape[-1] + after)
    room = poison(x.dtype, 16 + math.prod(wide), x.device)[0 if before else 16 :][: math.prod(wide)]
    return room.view(wide)[..., before : before + x.shape[-1]].copy_(x)


LAYOUTS = ("packed", "padded", "odd", "bhsd")


class Combine:
    """One launch of ``CombineParams``: parts of random LSEs, some of them empty, with NaN for an output."""

    def __init__(
        self, splits: int, shape: tuple[int, int, int, int], dtype: torch.dtype, *, empty: float = 0.2,
        row_pad: int = 0, offset: int = GUARD, packed: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.batch, self.seqlen_q, self.heads, dim = shape
        self.packed = packed
        generator = torch.Generator().manual_seed(seed)
        rows = self.batch * self.heads * self.seqlen_q
        lse = torch.rand(splits, rows, generator=generator) * 60 - 30
        lse[torch.rand(splits, rows, generator=generator) < empty] = -INF
        outputs = torch.randn(splits, rows, dim, generator=generator)
        outputs[lse == -INF] = torch.nan
        self.partial_o, self.partial_lse = outputs.to(DEVICE), lse.to(DEVICE)
        self.partial_low: Tensor | None = None
        self.out = gpu.Guarded.around(place(torch.empty(shape, dtype=dtype, device=DEVICE), "bshd", row_pad, offset))
        self.lse = gpu.Guarded.around(place(torch.empty(1, 1, rows, 1, device=DEVICE)).flatten())

    def run(self, return_lse: bool = True, **changes: int) -> None:
        p = _C.CombineParams()
        p.splits, p.lse_rows, p.head_dim_v = self.partial_o.shape
        p.partial_o, p.partial_lse = self.partial_o.data_ptr(), self.partial_lse.data_ptr()
        p.partial_low = 0 if self.partial_low is None else self.partial_low.data_ptr()
        p.o, p.lse = self.out.view.data_ptr(), self.lse.view.data_ptr() if return_lse else 0
        p.batch, p.seqlen_q, p.num_heads = self.batch, self.seqlen_q, self.heads
        p.o_stride = self.out.view.stride()[:3]
        p.lse_batch_stride = 0 if self.packed else self.heads * self.seqlen_q
        p.lse_head_stride = self.seqlen_q
        for name, number in changes.items():
            setattr(p, name, number)
        helpers.launch(helpers.helper("combine", p, self.out.view), p)

    def check(self, return_lse: bool = True) -> None:
        shape = (self.batch, self.heads, self.seqlen_q)
        parts = zip(self.partial_o, self.partial_lse, strict=True)
        states = [(o.view(*shape, -1).transpose(1, 2), lse.view(shape)) for o, lse in parts]
        assert_merged(self.out.view, self.lse.view.view(shape) if return_lse else None, states)
        assert self.out.intact() and self.lse.intact()


@kernels_only
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 8, 36, 64, 96, 128, 160, 250, 256])
@pytest.mark.parametrize("splits", [1, 2, 5, 16, 33, 64])
def test_combine(splits: int, dim: int, dtype: torch.dtype):
    for where in ({}, {"row_pad": 8}, {"row_pad": 1}, {"offset": GUARD + 1}, {"packed": True}):
        launch = Combine(splits, (1 if "packed" in where else 2, 3, 4, dim), dtype, **where, seed=dim)
        launch.run(return_lse=dim != 64)
        launch.check(return_lse=dim != 64)


@kernels_only
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_combine_of_few_parts_and_numbers_at_the_edge(dtype: torch.dtype):
    launch = Combine(9, (2, 3, 2, 64), dtype, empty=1.0)
    launch.run()
    assert (launch.out.view == 0).all() and (launch.lse.view == -INF).all()
    part = launch.partial_lse[5]  # one alone is passed on: rounded, and otherwise as it is
    part.copy_(torch.linspace(-300.0, 80.0, len(part)))
    launch.partial_o[5] = randn(*launch.partial_o.shape[1:])
    launch.run()
    only = launch.partial_o[5].view(2, 2, 3, 64).transpose(1, 2)
    assert torch.equal(launch.out.view, only.to(dtype)) and torch.equal(launch.lse.view, part)

    # Sums of two floats: log-sum-exps of 2^26, where neighbouring floats are 8 apart.
    launch, plain = (Combine(7, (2, 3, 2, 64), dtype) for _ in range(2))
    low = plain.partial_lse
    launch.partial_lse = torch.where(low == -INF, low, 2.0**26)
    launch.partial_low = low.masked_fill(low == -INF, torch.nan)
    launch.run()
    plain.run()
    tolerance = max(1e-3, torch.finfo(dtype).eps)
    torch.testing.assert_close(launch.out.view, plain.out.view, rtol=tolerance, atol=tolerance)
    assert (launch.lse.view[plain.lse.view > -INF] - 2.0**26).abs().max() <= 32

    launch = Combine(6, (1, 4, 1, 64), dtype, empty=0.0)
    launch.partial_lse[2, 0] = launch.partial_o[3, 1, 9] = torch.nan
    launch.partial_lse[4, 2] = INF
    launch.run()
    found = launch.out.view[0, :, 0]
    assert found[0].isnan().all() and launch.lse.view[0].isnan()
    assert found[1].isnan().sum() == 1 and found[1, 9].isnan()
    assert torch.equal(found[2], launch.partial_o[4, 2].to(dtype)) and launch.lse.view[2] == INF
    assert found[3].isfinite().all()
    with pytest.raises(ValueError, match="at most 2147483647 can be combined"):
        Combine(2, (1, 1, 1, 8), dtype).run(batch=2**12, seqlen_q=2**12, num_heads=2**8)


def states(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    return [(randn(*shape, dtype=dtype, seed=n), 8 * randn(*lse_shape, seed=n + 9)) for n in (0, 1)]


@by_dtype
@pytest.mark.parametrize("dim", [1, 12, 64, 100, 128, 256, 520])
def test_merge(dim: int, dtype: torch.dtype):
    for shape, n in itertools.product(((2, 5, 3, dim), (7, 4, dim)), range(4)):
        a, b = states(shape, dtype)
        a[1][..., ::3] = -INF
        b[1][..., ::2] = -INF
        to_a, to_b = laid_out(a[0], LAYOUTS[n]), laid_out(b[0], LAYOUTS[n - 1])
        operands = to_a, a[1].mT.contiguous().mT, to_b, b[1]
        output, lse = merge_states(*operands)
        assert output.dtype == dtype and output.is_contiguous() and lse.is_contiguous()
        assert_merged(output, lse, [a, b])
        there = laid_out(torch.full_like(output, torch.nan), LAYOUTS[n]), torch.full_like(lse, torch.nan)
        assert merge_states(*operands, out=there[0], lse=there[1])[0] is there[0]
        assert torch.equal(there[0], output) and torch.equal(there[1], lse)
        with pytest.raises(ValueError, match="lse must not share memory with lse_b"):
            merge_states(*operands, out=there[0], lse=operands[3])
        exchanged = merge_states(*operands[2:], *operands[:2])
        assert all(map(torch.equal, exchanged, (output, lse))), "the sides can be exchanged"
        row = a[0][:1, :1].expand(a[0].shape)
        of_row, of_copy = (merge_states(x, *operands[1:]) for x in (row, row.contiguous()))
        assert all(map(torch.equal, of_row, of_copy))


@by_dtype
@pytest.mark.parametrize("dim", [12, 64])
def test_merge_passes_bits_on(dim: int, dtype: torch.dtype):
    a, b = states((2, 5, 3, dim), dtype)
    a[0][0, 0, 0, :3] = torch.tensor([-0.0, INF, torch.nan])
    a[1][0, 0, 0] = -0.0
    empty = torch.full_like(b[0], torch.nan), torch.full_like(b[1], -INF)
    nothing = torch.zeros_like(b[0]), empty[1]
    for operands, expected in (((*a, *empty), a), ((*empty, *a), a), ((*empty, *empty), nothing)):
        assert all(map(torch.equal, map(bits, merge_states(*operands)), map(bits, expected)))
    infinite = a[0], torch.full_like(a[1], INF)
    output, lse = merge_states(*infinite, *b)
    assert torch.equal(output[1], a[0][1]) and (lse == INF).all()
    output, lse = merge_states(*infinite, b[0], infinite[1])
    torch.testing.assert_close(output[1], (a[0][1] + b[0][1]) / 2)
    assert (lse == INF).all()


def table(positions: int, dim: int, dtype: torch.dtype = torch.float32, odd: bool = False) -> tuple[Tensor, Tensor]:
    turns = torch.outer(torch.arange(positions), 100.0 ** -(torch.arange(dim // 2) / max(1, dim // 2)))
    found = [x.to(dtype).to(DEVICE) for x in (turns.cos(), turns.sin())]
    cos, sin = (laid_out(x, "odd") for x in found) if odd else found
    return cos, sin


def following(first: Tensor, seqlen: int) -> Tensor:
    return first.cpu()[:, None] + torch.arange(seqlen)


#: (head_dim, rotary_dim): whole rows, parts of them, pairs that no vector has whole, and odd sizes.
DIMS = ((64, 64), (128, 32), (96, 80), (64, 24), (64, 6), (40, 4), (50, 22), (256, 256), (320, 64))
#: Of packed rows.
ROWS = 13
#: Sequences of several rows, of one, of none; rows before, behind, and only those.
PACKED = ((0, 5, 5, 13), (2, 3, 3, 3, 8, 9), (0, 0, 0, 0), tuple(range(14)), (13, 13), (0, 13), (4,))
#: Of a batch, or of packed rows.
BEGINS = st.sampled_from((None, *PACKED))


def sequences(x: Tensor, begins: tuple[int, ...] | None) -> list[Tensor]:
    """The rows [1, n, heads, dim] of each, on the CPU."""
    whole = x.cpu()
    return [*whole[:, None]] if begins is None else [whole[None, a:b] for a, b in itertools.pairwise(begins)]


@by_dtype
@drawn
@given(st.sampled_from(DIMS), st.booleans(), st.sampled_from(LAYOUTS), BEGINS, st.booleans(), st.booleans())
def test_rotary(dtype: torch.dtype, dims, interleaved, layout, begins, own_table, odd):
    x = randn(*((3, 5) if begins is None else (ROWS,)), 4, dims[0], dtype=dtype)
    cos, sin = table(40, dims[1], dtype if own_table else torch.float32, odd)
    count = 3 if begins is None else len(begins) - 1
    first = int32(*(11 * b % 27 for b in range(count)))
    said = {"interleaved": interleaved} | ({} if begins is None else {"cu_seqlens": int32(*begins)})
    given = (laid_out(x, layout), cos, sin, first)
    out = rotary(*given, **said)
    there = laid_out(torch.full_like(x, torch.nan), layout)
    assert rotary(*given, **said, out=there) is there
    by_vectors = rotary(x, *given[1:], **said)  # where that lets them: elements rotate to the same bits
    for one, *others in zip(*(sequences(t, begins) for t in (out, there, by_vectors)), strict=True):
        assert all(torch.equal(bits(one), bits(other)) for other in others)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        rotary(*given, **said, out=given[0])
    for b, own in enumerate(zip(sequences(out, begins), sequences(x, begins), strict=True)):
        positions = following(first[b : b + 1], own[0].shape[1])
        assert_rotated(*own, cos.cpu(), sin.cpu(), positions, interleaved)


@kernels_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_position_without_an_angle_becomes_nan(dtype: torch.dtype):
    x, (cos, sin) = randn(2, 3, 4, 64, dtype=dtype), table(9, 32, dtype)
    out = rotary(x, cos, sin, int32(-1, 8))
    outside = torch.zeros(2, 3, 4, 64, dtype=torch.bool)
    outside[0, 0, :, :32] = outside[1, 1:, :, :32] = True
    assert torch.equal(out.isnan().cpu(), outside)
    assert torch.equal(out[..., 32:], x[..., 32:])


KINDS = ("contiguous", "entries", "pages")


def places_in(kind: str, batch: int) -> tuple[int, int, dict[str, Tensor]]:
    """Entries of a cache and rows of each, and what says where sequences lie there."""
    entries, rows = {"contiguous": (batch, 24), "entries": (batch + 4, 24), "pages": (3 * batch + 2, 16)}[kind]
    order = torch.randperm(entries, generator=torch.Generator().manual_seed(3)).to(torch.int32).to(DEVICE)
    if kind == "pages":
        wide = torch.full((batch, 5), 10**6, dtype=torch.int32, device=DEVICE)  # a table is part of a wider one
        wide[:, :3] = order[: 3 * batch].view(batch, 3)
        return entries, rows, {"page_table": wide[:, :3]}
    return entries, rows, {"cache_batch_idx": order[:batch]} if kind == "entries" else {}


class Append:
    """A cache inside of buffers of NaN, and one call that appends to it."""

    def __init__(self, kind: str, dtype: torch.dtype, head_dim=64, head_dim_v=64, layout="packed", begins=None) -> None:
        """begins: where the sequences of packed rows begin, of ROWS rows."""
        batch, heads = 3 if begins is None else len(begins) - 1, 2
        self.lengths = [5] * 3 if begins is None else [b - a for a, b in itertools.pairwise(begins)]
        self.begins = begins
        entries, rows, self.places = places_in(kind, batch)
        lies: dict[str, Any] = {"odd": {"row_pad": 3, "offset": GUARD + 1}, "bhsd": {"order": "bhsd", "row_pad": 8}}
        empty = (torch.empty(entries, rows, heads, dim, dtype=dtype, device=DEVICE) for dim in (head_dim, head_dim_v))
        self.caches = [gpu.Guarded.around(place(x, **lies.get(layout, {"row_pad": 8}))) for x in empty]
        shape = (batch, 5, heads) if begins is None else (ROWS, heads)
        self.key = laid_out(randn(*shape, head_dim, dtype=dtype, seed=4), layout)
        self.value = laid_out(randn(*shape, head_dim_v, dtype=dtype, seed=5), layout)
        self.rows, self.entries = rows, entries
        if begins is not None:
            self.places["cu_seqlens_q"] = int32(*begins)

    def at(self, b: int, i: int) -> Any:
        """Where the new row i of a sequence stands."""
        return (b, i) if self.begins is None else self.begins[b] + i

    @property
    def views(self) -> list[Tensor]:
        """The caches of keys and values."""
        return [cache.view for cache in self.caches]

    def run(self, cache_seqlens: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        return append_kv_(*self.views, self.key, self.value, cache_seqlens, **given, **self.places)

    def draw_lengths(self, numbers: list[int]) -> Tensor:
        """How long sequences are, as their entries have room for the new rows, too."""
        room = 25 - max(self.lengths, default=0)
        return int32(*(n % room for n in numbers[: len(self.lengths)]))

    def check_places(self, cache_seqlens: Tensor) -> dict[tuple[int, int], tuple[int, int]]:
        """Rows are written where they belong, and nowhere else."""
        given = {name: x.cpu() for name, x in self.places.items() if name != "cu_seqlens_q"}
        found = places(cache_seqlens.cpu(), self.lengths, self.rows, self.entries, **given)
        written = torch.zeros(self.entries, self.rows, dtype=torch.bool)
        for entry, row in found.values():
            written[entry, row] = True
        for cache in self.caches:
            assert cache.intact()
            is_new = ~cache.view.isnan().all(-1).all(-1)
            assert torch.equal(is_new.cpu(), written)
        for (b, i), (entry, row) in found.items():
            assert torch.equal(bits(self.caches[1].view[entry, row]), bits(self.value[self.at(b, i)]))
        return found

    def keys(self, cache_seqlens: Tensor) -> Tensor:
        """What stands in the cache for each new key that has a place."""
        found = torch.empty_like(self.key, memory_format=torch.contiguous_format).copy_(self.key)
        for (b, i), place_of_row in self.check_places(cache_seqlens).items():
            found[self.at(b, i)] = self.views[0][place_of_row]
        return found


#: How new rows of a cache are drawn, and more of what an append is asked for.
NEW_ROWS = {
    "kind": st.sampled_from(KINDS), "dims": st.sampled_from((*DIMS, (36, 24))),
    "head_dim_v": st.sampled_from((64, 32, 50, 24)), "layout": st.sampled_from(("packed", "odd", "bhsd")),
    "begins": BEGINS, "numbers": st.lists(st.integers(0, 100), min_size=ROWS, max_size=ROWS),
    "interleaved": st.booleans(),
}  # fmt: skip
STANDS = st.sampled_from((None, "cache_seqlens", "leftpad_k", "rotary_seqlens"))
APPENDS = {**NEW_ROWS, "stand": STANDS, "seqlen_q": st.sampled_from((1, 5, 9)), "advance": st.booleans()}


def check_append(
    kind, dims, head_dim_v, layout, begins, numbers, stand, seqlen_q, advance, interleaved, dtype: torch.dtype
) -> None:
    """Where keys stand that are rotated, is said by ``stand``; None: they are appended as they are."""
    append = Append(kind, dtype, dims[0], head_dim_v, layout, begins)
    lengths = append.draw_lengths(numbers)
    before, first, said = lengths.tolist(), lengths, {}
    if stand in ("leftpad_k", "rotary_seqlens"):
        said["leftpad_k"] = lengths // 2
        first = lengths - said["leftpad_k"]
    if stand == "rotary_seqlens":
        first = said["rotary_seqlens"] = lengths * 7 % 27
    if stand:
        shape = (3, seqlen_q) if begins is None else (ROWS,)
        query = laid_out(randn(*shape, 6, dims[0], dtype=dtype, seed=6), layout)
        cos, sin = table(40, dims[1], torch.float32 if layout == "packed" else dtype)
        said |= {"query": query, "advance_query": advance, "rotary_interleaved": interleaved}
        said |= {"rotary_cos": cos, "rotary_sin": sin}
    rotated, used = append.run(lengths, **said)
    assert used.tolist() == [a + b for a, b in zip(before, append.lengths, strict=True)]
    assert used.dtype == torch.int32 and lengths.tolist() == before
    written = append.keys(lengths)
    if not stand:
        assert rotated.shape == (0,) and torch.equal(bits(written), bits(append.key))
        return
    for found, x, step in ((written, append.key, 1), (rotated, query, advance)):
        for b, own in enumerate(zip(sequences(found, begins), sequences(x, begins), strict=True)):
            positions = first[b].cpu() + torch.arange(own[0].shape[1]) * step
            assert_rotated(*own, cos.cpu(), sin.cpu(), positions[None], interleaved)


@by_dtype
@drawn
@given(**APPENDS)
def test_append(dtype: torch.dtype, **p: Any):
    check_append(dtype=dtype, **p)


@kernels_only
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_place_are_dropped(kind: str):
    """Lengths, entries, pages and where rows begin are the caller's on a GPU; nothing is written outside."""
    capacity = 48 if kind == "pages" else 24
    beyond = (capacity - 3, capacity, 2), (-2, 2**31 - 1, -(2**31)), (capacity - 5, capacity + 1, 0)
    for numbers in (*beyond, (0, 14, 20)):
        append, lengths = Append(kind, torch.float16), int32(*numbers)
        for name, named in append.places.items() if numbers not in beyond else ():
            append.places[name] = bad = named.clone()
            bad.view(-1)[0], bad.view(-1)[-1] = -1, append.entries
        append.run(lengths)
        append.check_places(lengths)
    for begins in ((0, -5, 2**31 - 1, 13), (9, 4, 2, 0), (-(2**31), 2**31 - 1, 7, 3)):
        append = Append(kind, torch.float16, begins=(0, 5, 5, 13))
        append.places["cu_seqlens_q"] = int32(*begins)
        append.run(int32(0, 20, 2**31 - 1))
        assert all(cache.intact() for cache in append.caches)


@by_dtype
def test_nothing_new_still_rotates_queries(dtype: torch.dtype):
    append, lengths = Append("contiguous", dtype), int32(3, 6, 19)
    append.key, append.value = append.key[:, :0], append.value[:, :0]
    query, (cos, sin) = randn(3, 2, 6, 64, dtype=dtype), table(40, 64, dtype)
    rotated, used = append.run(lengths, query=query, rotary_cos=cos, rotary_sin=sin)
    assert used.tolist() == [3, 6, 19]
    assert_rotated(*(t.cpu() for t in (rotated, query, cos, sin)), following(lengths, 2), False)
    assert all(cache.view.isnan().all() and cache.intact() for cache in append.caches)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_over_a_cache(kind: str, dtype: torch.dtype):
    append, lengths, (cos, sin) = Append(kind, dtype), int32(3, 6, 19), table(40, 64, dtype)
    for cache in append.views:
        cache.copy_(randn(*cache.shape, dtype=dtype, seed=8))
    query = randn(3, 5, 4, 64, dtype=dtype, seed=6)
    said = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lengths, "causal": True, **append.places}
    output, lse = with_kv_cache(query, *append.views, append.key, append.value, num_splits=3, return_lse=True, **said)
    turned = rotary(query, cos, sin, lengths)
    written = {"seqused_k": lengths + 5, **append.places}
    oracle_features.compare(output, lse, turned, *append.views, causal="bottom-right", **written).check()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_cascade_over_a_shared_prefix(dtype: torch.dtype):
    q, (k_shared, v_shared) = randn(3, 5, 4, 64, dtype=dtype), randn(2, 40, 2, 64, dtype=dtype, seed=1)
    k, v = randn(2, 3, 12, 2, 64, dtype=dtype, seed=2)
    output, lse = cascade_attention(q, k_shared, v_shared, k, v, causal=True, return_lse=True)
    whole = [torch.cat((x.expand(3, 40, 2, 64), own), 1) for x, own in ((k_shared, k), (v_shared, v))]
    # Each part is rounded before they merge: as much again as attention alone may be off.
    errors = oracle_features.compare(output, lse, q, *whole, causal="bottom-right")
    assert errors.worst <= 2.0, errors

    own = cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
    found = cascade_attention(q, k_shared[:0], v_shared[:0], k, v, causal=True, return_lse=True)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, own, strict=True))


def gradients(call: Any, *shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    given = [randn(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    return torch.autograd.grad(call(*given).square().sum(), given)


def over_caches(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A step, and a cascade."""
    q, caches = randn(2, 3, 4, 64, dtype=dtype), randn(2, 2, 300, 2, 64, dtype=dtype, seed=1).unbind()
    (cos, sin), new = table(300, 64, dtype), randn(2, 2, 3, 2, 64, dtype=dtype, seed=2).unbind()
    said = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": int32(290, 17), "return_lse": True}
    found = with_kv_cache(q, *caches, *new, num_splits=3, **said)
    before = (x[0, :200] for x in caches)
    return *found, *caches, *cascade_attention(q, *before, *caches, causal=True, num_splits=2, return_lse=True)


IN_A_WORKSPACE = {
    "caches": over_caches,
    "attention's gradients": partial(
        gradients, lambda q: cutlass_fmha.attention(q, q, q, softcap=20.0, deterministic=True), (2, 70, 4, 64)),
    "rms_norm's": partial(gradients, rms_norm, (70, 64), (64,)),
    "qk_norm_rope's": partial(
        gradients, lambda x, w: torch.cat(cutlass_fmha.qk_norm_rope(x, x, None, w, w)), (2, 70, 4, 64), (64,)),
}  # fmt: skip


@kernels_only
@pytest.mark.parametrize("name", IN_A_WORKSPACE)
def test_a_workspace_of_nan_leaves_the_same_bits(name: str):
    expected = IN_A_WORKSPACE[name](dtype=torch.float16)
    workspace = Workspace.within(torch.full((1 << 24,), 255, dtype=torch.uint8, device=DEVICE))
    with workspace:
        found = IN_A_WORKSPACE[name](dtype=torch.float16)
    assert workspace.high_water > 0
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))


@kernels_only
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_offsets_beyond_31_bits(axis: int):
    shape = (2, 3, 4, 64)
    buffer = torch.empty(gpu.FAR + 4 * gpu.REGION, dtype=torch.float16, device=DEVICE)
    far = [gpu.far_view(buffer, index, shape, axis) for index in (0, 1)]
    a, b = states(shape, torch.float16)
    for view, state in zip(far, (a, b), strict=True):
        view.copy_(state[0])
    assert_merged(*merge_states(far[0], a[1], far[1], b[1]), [a, b])
    (cos, sin), first = table(9, 64, torch.float16), int32(0, 5)
    out = rotary(far[0], cos, sin, first)
    assert_rotated(*(t.cpu() for t in (out, a[0], cos, sin)), following(first, 3), False)
    append_kv_(far[0], far[1], b[0][:, :1].clone(), a[0][:, :1].clone(), int32(2, 0))
    for cache, (new, _) in zip(far, (b, a), strict=True):
        assert torch.equal(torch.stack((cache[0, 2], cache[1, 0])), new[:, 0])
