"""The scored rows' arithmetic on the host: lengths, masks by ranges, which thread block walks which keys."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field

import oracle_features
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import ints, starts

from cutlass_fmha import _C


@dataclass
class Case:
    """One problem's lengths and ranges. ``vectors``: by field name, one number per sequence."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    left: int = -1
    right: int = -1
    bottom_right: bool = True
    splits: int = 1
    pack: int = 1
    heads_kv: int = 1
    vectors: dict[str, list[int]] = field(default_factory=dict)
    #: What the parameters point to.
    held: list[torch.Tensor] = field(default_factory=list)

    def params(self) -> _C.AttentionParams:
        """The launch's parameters, for as long as the case lives."""
        p = _C.AttentionParams()
        p.batch, p.seqlen_q, p.seqlen_k = self.batch, self.seqlen_q, self.seqlen_k
        p.num_heads, p.num_heads_kv = self.heads_kv * self.pack, self.heads_kv
        p.window_left, p.window_right, p.bottom_right = self.left, self.right, self.bottom_right
        p.splits, p.pack = self.splits, self.pack
        for name, numbers in self.vectors.items():
            self.held.append(ints(*numbers))
            setattr(p, name, self.held[-1].data_ptr())
        return p

    @functools.cached_property
    def seen(self) -> list[torch.Tensor]:
        """Of each sequence which of its keys each of its queries sees, [queries, keys], by the definition."""
        sizes = (("cu_seqlens_q", self.seqlen_q), ("cu_seqlens_k", self.seqlen_k))
        rows = ((self.vectors[cu][-1],) if cu in self.vectors else (self.batch, n) for cu, n in sizes)
        q, k = (torch.empty(*shape, 1, 1) for shape in rows)
        vectors = {name: torch.tensor(numbers) for name, numbers in self.vectors.items()}
        said = oracle_features.Features(window=(self.left, self.right), **vectors)
        causal = "none" if self.bottom_right else "top-left"
        return [s.visible(slice(None))[0] for s in oracle_features.sequences(q, k, k, 1.0, causal, said)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(1, 3))
    numbers = lambda most: st.lists(st.integers(0, most), min_size=batch, max_size=batch)  # noqa: E731
    q, k = draw(st.integers(1, 40)), draw(st.integers(0, 70))
    vectors: dict[str, list[int]] = {}
    if draw(st.booleans()):
        lengths = draw(numbers(40))
        q, vectors["cu_seqlens_q"] = max(lengths), starts(*lengths).tolist()
    if draw(st.booleans()):
        lengths = draw(numbers(70))
        k, vectors["cu_seqlens_k"] = max(lengths), starts(*lengths).tolist()
    for name, most in (("seqused_q", q), ("seqused_k", k), ("leftpad_k", k), ("prefix_lengths", k)):
        if draw(st.booleans()):
            vectors[name] = draw(numbers(most))
    window, bottom_right = st.one_of(st.just(-1), st.integers(0, 50)), draw(st.booleans())
    return Case(
        batch, q, k, draw(window), draw(window) if bottom_right else 0, bottom_right,
        splits=draw(st.integers(1, 4)), pack=draw(st.integers(1, 3)), heads_kv=draw(st.integers(1, 2)),
        vectors=vectors,
    )  # fmt: skip


@settings(max_examples=150)
@given(cases())
def test_a_query_sees_what_the_definition_says(case):
    p = case.params()
    for b, seen in enumerate(case.seen):
        place = _C.host.sequence(p, b)
        assert (place["queries"], place["keys"]) == seen.shape
        whole = torch.zeros(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        whole[: len(seen), : seen.shape[1]] = seen
        found = [[_C.host.sees(p, b, i, j) for j in range(case.seqlen_k)] for i in range(case.seqlen_q)]
        assert found == whole.tolist()


@settings(max_examples=150)
@given(cases(), st.sampled_from([1, 16, 32]), st.sampled_from([1, 16, 64]))
@example(Case(1, 40, 20, left=2, right=0, vectors={"prefix_lengths": [5]}), 16, 16)
@example(Case(1, 8, 64, left=0, right=50), 32, 1)
def test_a_key_is_seen_by_the_queries_that_see_it(case, tile_keys, tile_queries):
    p = case.params()
    for b, seen in enumerate(case.seen):
        for j in range(case.seqlen_k):
            seeing = seen[:, j : j + 1].any(1).nonzero().flatten().tolist()
            assert list(range(*_C.host.queries_of_key(p, b, j))) == seeing, (b, j)
        for begin in range(0, case.seqlen_k, tile_keys):
            first, count = _C.host.query_tiles(p, b, begin, begin + tile_keys, tile_queries)
            tiles = seen[:, begin : begin + tile_keys].any(1).nonzero().flatten() // tile_queries
            # Nothing visible is left out; the first and the last tile have some of it.
            expected = (int(tiles[0]), int(tiles[-1]) + 1) if len(tiles) else (0, 0)
            assert (first, first + count) == expected, (b, begin)


@settings(max_examples=150)
@given(cases(), st.sampled_from([16, 64]), st.sampled_from([16, 32, 64]), st.integers(1, 7), st.integers(1, 4))
@example(Case(1, 8, 64, left=2, right=0, vectors={"prefix_lengths": [5]}), 16, 16, 1, 1)
@example(Case(2, 40, 70, left=9, splits=3, pack=2, vectors={"leftpad_k": [0, 21]}), 64, 16, 1, 1)
def test_every_visible_key_is_walked_exactly_once(case, tile_m, step, mixed, long_tiles):
    p = case.params()
    walked = defaultdict(list)
    rows = set()
    tiles = -(-case.seqlen_q * case.pack // tile_m)
    for tile in _C.host.feature_tiles(p, tile_m, mixed, min(long_tiles, tiles)):
        row_begin, head, b, _ = tile
        packed = {row // case.pack for row in range(row_begin, row_begin + tile_m)}
        queries = [i for i in sorted(packed) if i < len(case.seen[b])]
        for begin, masked in _C.host.key_steps(p, tile, tile_m, step):
            assert begin % step == 0
            part = case.seen[b][queries, begin : begin + step]
            # What some query doesn't see needs a mask. That a window and a prefix meet isn't noticed.
            whole = not queries or (part.shape[1] == step and bool(part.all()))
            assert masked != whole or (masked and "prefix_lengths" in case.vectors)
            walked[b, head] += [(queries[i], begin + j) for i, j in part.nonzero().tolist()]
        rows.add((b, head, row_begin))
    for b, seen in enumerate(case.seen):
        for head in range(0, case.heads_kv * case.pack, case.pack):
            # Of heads that are packed, a query's rows may lie in two tiles.
            found = walked[b, head] if case.pack == 1 else set(walked[b, head])
            assert sorted(found) == list(map(tuple, seen.nonzero().tolist()))
    assert len(rows) == case.batch * case.heads_kv * tiles


@pytest.mark.parametrize("counts", [[2, 0, 1], [3, 1, 2]])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_block_lists_are_walked_from_the_last_entry_to_the_first(counts, splits):
    p = Case(1, 96, 256, splits=splits).params()
    indices = torch.tensor([[0, 2, 3], [1, 2, 3], [0, 1, 3]], dtype=torch.int32)
    number = ints(*counts)
    p.block_counts, p.block_indices = number.data_ptr(), indices.data_ptr()
    p.count_stride, p.block_stride = (0, 0, 1), (0, 0, 3, 1)
    p.block_m, p.block_n = 32, 64
    for row in range(3):
        parts = [[key for key, _ in _C.host.key_steps(p, (32 * row, 0, 0, n), 32, 32)] for n in range(splits)]
        whole = [key for part in reversed(parts) for key in part]
        expected = [64 * entry + half for entry in indices[row, : counts[row]].tolist() for half in (0, 32)]
        assert whole == expected[::-1]


def test_block_lists_lie_anywhere_and_name_what_is_not_there():
    p = Case(1, 32, 250).params()
    entries = ints(0, 1, 3, 1, 4, 1, 2**31 - 1, 1)
    number = ints(4)
    p.block_counts, p.block_indices = number.data_ptr(), entries.data_ptr()
    p.block_stride = (0, 0, 0, 2)
    p.block_m, p.block_n = 32, 64
    steps = [key for key, _ in _C.host.key_steps(p, (0, 0, 0, 0), 32, 32)]
    assert [key for key in steps if key < 250] == [224, 192, 32, 0]
    assert len(steps) == 8 and max(steps) < 2**30
    # A block of more keys than there are ends with them.
    p.block_n, p.block_stride = 2**29, (0, 0, 0, 1)
    assert [key for key, _ in _C.host.key_steps(p, (0, 0, 0, 0), 32, 32)][-8:] == list(range(224, -1, -32))


def test_pages_and_batch_entries_lead_to_the_rows():
    p = Case(2, 1, 96).params()
    p.k_stride = (1000, 10, 1)
    assert _C.host.key_row_offset(p, 1, 7) == 1070
    entries = ints(5, 3)
    p.batch_index_k = entries.data_ptr()
    assert _C.host.key_row_offset(p, 1, 7) == 3070
    p.batch_index_k = 0
    pages = torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32)
    padding = ints(0, 20)
    p.page_table, p.page_table_stride, p.page_size = pages.data_ptr(), 3, 32
    p.leftpad_k = padding.data_ptr()
    assert _C.host.key_row_offset(p, 0, 70) == 2000 + 60
    assert _C.host.key_row_offset(p, 1, 12) == 3000  # row 32: the second page
