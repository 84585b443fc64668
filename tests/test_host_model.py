"""The kernels' own arithmetic, run on the host: softmax, masks, lengths, which block walks which keys, addresses."""

import functools
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import oracle_features
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import ints, starts

from cutlass_fmha import _C

NEAREST = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative rounding error of a probability

lengths = st.integers(0, 300)
diagonals = st.none() | st.integers(-320, 320)


def visible_count(row: int, seqlen_k: int, diagonal: int | None) -> int:
    return sum(diagonal is None or key <= row + diagonal for key in range(seqlen_k))


def check(scores, values, scale, row, diagonal, dtype, of_lse: dict[str, float], **tolerance: float) -> None:
    """The output and the LSE of a query's row against fp64."""
    out, lse = _C.host.online_softmax(scores, values, scale, row, diagonal, dtype)
    if (visible := visible_count(row, len(scores), diagonal)) == 0:
        assert out == [0.0] * 4 and lse == -math.inf
        return
    s, v = (torch.tensor(x[:visible], dtype=torch.float64) for x in (scores, values))
    torch.testing.assert_close(torch.tensor(out, dtype=torch.float64), (s * scale).softmax(0) @ v, **tolerance)
    assert lse == pytest.approx((s * scale).logsumexp(0).item(), **of_lse)


@settings(max_examples=200)
@given(
    *(st.lists(st.floats(-60, 60, width=32), max_size=100), st.sampled_from([1.0, 0.125, -0.5, 0.0, 1e-30, 7.0])),
    *(st.integers(0, 120), diagonals, st.sampled_from([*NEAREST]), st.sampled_from(["drawn", "rising", "falling"])),
)
def test_online_softmax_is_the_softmax(scores, scale, row, diagonal, dtype, order):
    # Sorted scores make the running maximum grow with every block (or never), which the trial has to notice.
    if order != "drawn":
        scores = sorted(scores, reverse=order == "rising")
    values = [[1.0, float(key % 3), float(key % 7) - 3.0, -float(key % 2)] for key in range(len(scores))]
    of_lse = {"abs": 1e-4 + 1e-6 * 60 * abs(scale)}
    check(scores, values, scale, row, diagonal, dtype, of_lse, rtol=0, atol=4 * NEAREST[dtype] + 1e-5)


#: Scores of row 15 and its diagonal, walked in blocks of 16 keys from the last to the first.
WALKS = [
    # A later block raises the reference, before a probability overflows.
    *(([jump * math.log(2)] + [0.0] * 31, None) for jump in (14.0, 16.0, 21.0, 200.0, 4000.0)),
    # Nothing of the first block is visible: the maximum is found later.
    ([-500.0] * 16 + [3.0] * 16, 0),
    # More than one fma resolves: ties share the weight, everything else is infinitely far away.
    *(([2.0**n * (key * 7 % 13 - 6) for key in range(100)], None) for n in (13, 14, 15, 20, 24, 28, 60, 100)),
]


@pytest.mark.parametrize("dtype", NEAREST)
def test_the_reference_follows_the_maximum(dtype):
    for scores, diagonal in WALKS:
        values = [[float(key % 5), 1.0, -float(key % 2), float(key == 0)] for key in range(len(scores))]
        check(scores, values, 1.0, 15, diagonal, dtype, {"rel": 1e-6}, rtol=2 * NEAREST[dtype], atol=2 * NEAREST[dtype])
    # NaN does not pass the trial.
    out, _ = _C.host.online_softmax([math.nan] + [0.0] * 63, [[1.0] * 4] * 64, 1.0, 0, None, dtype)
    assert all(math.isnan(x) for x in out)


@given(st.integers(0, 10), *[st.sampled_from([16, 32, 64])] * 2, lengths, lengths, diagonals)
def test_key_blocks_are_exactly_those_with_a_visible_key(tile, rows, tile_n, seqlen_q, seqlen_k, diagonal):
    begin, end = tile * rows, (tile + 1) * rows
    walked, full = _C.host.key_blocks(begin, end, tile_n, seqlen_q, seqlen_k, diagonal)
    counts = [visible_count(row, seqlen_k, diagonal) for row in range(begin, min(end, seqlen_q))]
    assert [_C.host.visible_keys(begin + n, seqlen_k, diagonal) for n in range(len(counts))] == counts
    assert walked == math.ceil(max(counts, default=0) / tile_n)
    assert not counts or full == min(counts) // tile_n <= walked


@given(
    *(st.integers(0, 4), st.integers(1, 70), lengths, st.booleans(), st.sampled_from([64, 128, 256])),
    st.tuples(st.integers(1, 400), st.integers(1, 12)),
)
def test_the_schedule_covers_every_tile_once_and_in_order(batch, heads, seqlen_q, masked, tile_m, order):
    m_blocks = math.ceil(seqlen_q / tile_m)
    # As a launch would have it: at most as many heads and tiles as there are.
    mixed, long_tiles = min(order[0], max(1, batch * heads)), min(order[1], max(1, m_blocks))
    tiles = _C.host.work_tiles(batch, heads, seqlen_q, masked, tile_m, mixed, long_tiles)
    assert sorted(tiles) == sorted([b, h, m] for b in range(batch) for h in range(heads) for m in range(m_blocks))
    if not masked:
        numbers = [b * heads + h for b, h, _ in tiles]
        assert numbers == sorted(numbers)
        return
    long, short = tiles[: batch * heads * long_tiles], tiles[batch * heads * long_tiles :]
    for begin in range(0, batch * heads, mixed):  # a share of heads after the other, its longest tiles first
        share = long[begin * long_tiles : (begin + mixed) * long_tiles]
        assert all(begin <= b * heads + h < begin + mixed for b, h, _ in share)
        ranks = [m_blocks - 1 - m for _, _, m in share]
        assert ranks == sorted(ranks) and all(rank < long_tiles for rank in ranks)
    assert [m for _, _, m in short] == sorted((m for _, _, m in short), reverse=True)


def test_heads_are_mixed_as_share_keys_in_l2():
    mb = 2**20
    for sms, l2_bytes, warps, heads, group, head_bytes, *expected in (
        (40, 50 * mb, 8, 128, 1, mb, 22, 9),  # half of it holds 25 heads: 128 in 6 alike shares
        (40, 50 * mb, 8, 20, 1, mb, 20, 16),  # all fit: every tile counts as a long one
        (40, 50 * mb, 8, 32, 1, 4 * mb, 8, 9),  # four tiles of 10 heads run at once: 32 in 4 shares
        (40, 50 * mb, 4, 32, 1, 4 * mb, 16, 9),  # two such blocks an SM
        (40, 50 * mb, 8, 64, 8, 16 * mb, 8, 9),  # heads that share keys stay together
        (40, 50 * mb, 8, 64, 16, 64 * mb, 16, 9),  # not one fits
        (4, 0, 8, 64, 1, mb, 1, 9),  # nothing known of the cache
        (40, 50 * mb, 8, 64, 1, 0, 64, 16),  # no key at all
    ):
        assert list(_C.host.tile_order(sms, l2_bytes, warps, heads, group, head_bytes, 16, 7)) == expected


@given(st.integers(-400, 400), st.integers(1, 300), st.sampled_from([16, 64, 256]), st.integers(1, 12))
@example(0, 4096, 256, 16)
def test_short_tiles_see_at_most_half_as_much_as_the_last(diagonal, seqlen_k, tile_m, tiles):
    keys = [max(0, min(seqlen_k, (n + 1) * tile_m + diagonal)) for n in range(tiles)]
    expected = sum(seen <= keys[-1] // 2 for seen in keys[:-1])
    assert _C.host.short_tiles(diagonal, seqlen_k, tile_m, tiles) == expected


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), st.sampled_from([None, -1, 0, 1]))
@example(2**31 - 1, 1, None)
@example(2**31 - 1, 2**31 - 1, None)
@example(2**31 - 2, 2**31 - 1, None)
@example(0, 1, None)
def test_multiplication_divides_exactly(n, divisor, next_to_a_multiple):
    if next_to_a_multiple is not None:
        n = min(2**31 - 1, max(0, n // divisor * divisor + next_to_a_multiple))
    assert _C.host.quotient(n, divisor) == n // divisor
    for never_asked in ((-1, 3), (3, 0)):
        with pytest.raises(ValueError, match="n must be at least 0 and divisor at least 1"):
            _C.host.quotient(*never_asked)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_ldmatrix_addresses_agree_with_the_swizzled_layout_and_meet_in_no_bank(head_dim):
    offsets = [_C.host.smem_offsets(head_dim, row, column) for row in range(64) for column in range(head_dim)]
    by_layout, by_arithmetic = torch.tensor(offsets).T
    assert torch.equal(by_layout, by_arithmetic)
    assert torch.equal(by_layout.sort().values, torch.arange(0, 2 * 64 * head_dim, 2))
    # No two of the eight rows of 16 bytes of an 8 x 8 matrix share banks.
    banks = by_layout.view(8, 8, head_dim // 8, 8)[..., 0] // 16 % 8
    assert (banks.sort(1).values == torch.arange(8)[:, None]).all()


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

    def params(self, **fields: object) -> _C.AttentionParams:
        """The launch's parameters, for as long as the case lives, with these besides."""
        p = _C.AttentionParams()
        p.batch, p.seqlen_q, p.seqlen_k = self.batch, self.seqlen_q, self.seqlen_k
        p.num_heads, p.num_heads_kv = self.heads_kv * self.pack, self.heads_kv
        p.window_left, p.window_right, p.bottom_right = self.left, self.right, self.bottom_right
        p.splits, p.pack = self.splits, self.pack
        for name, numbers in self.vectors.items():
            self.held.append(ints(*numbers))
            setattr(p, name, self.held[-1].data_ptr())
        for name, value in fields.items():
            setattr(p, name, value)
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
    vectors: dict[str, list[int]] = {}

    def numbers(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))

    def longest(cu: str, least: int, most: int) -> int:
        if draw(st.booleans()):
            return draw(st.integers(least, most))
        lengths = numbers(most)
        vectors[cu] = starts(*lengths).tolist()
        return max(lengths)

    q, k = longest("cu_seqlens_q", 1, 40), longest("cu_seqlens_k", 0, 70)
    for name, most in (("seqused_q", q), ("seqused_k", k), ("leftpad_k", k), ("prefix_lengths", k)):
        if draw(st.booleans()):
            vectors[name] = numbers(most)
    window, bottom_right = st.one_of(st.just(-1), st.integers(0, 50)), draw(st.booleans())
    return Case(
        batch, q, k, draw(window), draw(window) if bottom_right else 0, bottom_right,
        splits=draw(st.integers(1, 4)), pack=draw(st.integers(1, 3)), heads_kv=draw(st.integers(1, 2)), vectors=vectors,
    )  # fmt: skip


@settings(max_examples=150)
@given(cases(), st.sampled_from([1, 16, 32]), st.sampled_from([1, 16, 64]))
@example(Case(1, 40, 20, left=2, right=0, vectors={"prefix_lengths": [5]}), 16, 16)
@example(Case(1, 8, 64, left=0, right=50), 32, 1)
def test_queries_see_keys_as_the_definition_says(case, tile_keys, tile_queries):
    p = case.params()
    for b, seen in enumerate(case.seen):
        place = _C.host.sequence(p, b)
        assert (place["queries"], place["keys"]) == seen.shape
        whole = torch.zeros(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        whole[: len(seen), : seen.shape[1]] = seen
        found = [[_C.host.sees(p, b, i, j) for j in range(case.seqlen_k)] for i in range(case.seqlen_q)]
        assert found == whole.tolist()
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
@given(
    cases(), st.sampled_from([16, 64]), st.sampled_from([16, 32, 64]), st.integers(1, 7), st.integers(1, 4),
    st.booleans(),
)  # fmt: skip
@example(Case(1, 8, 64, left=2, right=0, vectors={"prefix_lengths": [5]}), 16, 16, 1, 1, False)
@example(Case(2, 40, 70, left=9, splits=3, pack=2, vectors={"leftpad_k": [0, 21]}), 64, 16, 1, 1, False)
@example(Case(2, 70, 70, right=0, vectors={"cu_seqlens_q": [0, 3, 70]}), 64, 16, 1, 1, True)
def test_every_visible_key_is_walked_exactly_once(case, tile_m, step, mixed, long_tiles, cuts_first):
    p = case.params()
    walked = defaultdict(list)
    rows, computed = set(), defaultdict(list)
    tiles = -(-case.seqlen_q * case.pack // tile_m)
    for tile in _C.host.feature_tiles(p, tile_m, mixed, min(long_tiles, tiles)):
        row_begin, head, b, _ = tile
        of_block = _C.host.rows_of_block(p, tile, tile_m) if cuts_first else (row_begin, row_begin + tile_m)
        packed = {row // case.pack for row in range(*of_block)}
        computed[b, head] += range(*of_block)
        queries = [i for i in sorted(packed) if i < len(case.seen[b])]
        for begin, masked in _C.host.key_steps(p, tile, tile_m, step, cuts_first):
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
            if cuts_first:
                packed = range(_C.host.sequence(p, b)["rows_q"] * case.pack)
                assert Counter(computed[b, head]) == dict.fromkeys(packed, case.splits)
    assert len(rows) == case.batch * case.heads_kv * tiles


def test_under_a_diagonal_the_first_tile_is_cut_short():
    """The last queries see the most keys: one of them alone would walk as many as a whole tile."""
    case = Case(2, 300, 300, right=0, vectors={"cu_seqlens_q": [0, 300, 365], "cu_seqlens_k": [0, 300, 365]})
    p = case.params()
    of_each = [[range(*_C.host.rows_of_block(p, (row, 0, b, 0), 128)) for row in (0, 128, 256)] for b in (0, 1)]
    assert of_each == [[range(64), range(64, 192), range(192, 300)], [range(65), range(0), range(0)]]
    p.window_right = -1
    assert _C.host.rows_of_block(p, (256, 0, 0, 0), 128) == [256, 300]


def test_block_lists_are_walked_from_the_last_entry_to_the_first():
    indices, strides = [0, 2, 3, 1, 2, 3, 0, 1, 3], {"count_stride": (0, 0, 1), "block_stride": (0, 0, 3, 1)}
    for counts, splits, row in itertools.product(([2, 0, 1], [3, 1, 2]), (1, 2, 5), range(3)):
        case = Case(1, 96, 256, splits=splits, vectors={"block_counts": counts, "block_indices": indices})
        p = case.params(block_m=32, block_n=64, **strides)
        parts = [[key for key, _ in _C.host.key_steps(p, (32 * row, 0, 0, n), 32, 32)] for n in range(splits)]
        expected = [64 * entry + half for entry in indices[3 * row :][: counts[row]] for half in (0, 32)]
        assert [key for part in reversed(parts) for key in part] == expected[::-1]
    # They lie anywhere and name what is not there.
    case = Case(1, 32, 250, vectors={"block_counts": [4], "block_indices": [0, 1, 3, 1, 4, 1, 2**31 - 1, 1]})
    p = case.params(block_m=32, block_n=64, block_stride=(0, 0, 0, 2))
    steps = [key for key, _ in _C.host.key_steps(p, (0, 0, 0, 0), 32, 32)]
    assert [key for key in steps if key < 250] == [224, 192, 32, 0]
    assert len(steps) == 8 and max(steps) < 2**30
    # A block of more keys than there are ends with them.
    p.block_n, p.block_stride = 2**29, (0, 0, 0, 1)
    assert [key for key, _ in _C.host.key_steps(p, (0, 0, 0, 0), 32, 32)][-8:] == list(range(224, -1, -32))
    # None is walked where no query of the tile sees a key: there may be no page of it.
    case = Case(1, 96, 32, 3, bottom_right=False, vectors={"block_counts": [1, 1], "block_indices": [0] * 4})
    p = case.params(block_m=64, block_n=64, **strides)
    assert [len(_C.host.key_steps(p, (row, 0, 0, 0), 32, 32)) for row in (0, 32, 64)] == [1, 1, 0]


def test_pages_and_batch_entries_lead_to_the_rows():
    p = Case(2, 1, 96).params(k_stride=(1000, 10, 1))
    assert _C.host.key_row_offset(p, 1, 7) == 1070
    entries, pages, padding = ints(5, 3), ints(4, 0, 2, 1, 3, 5), ints(0, 20)
    p.batch_index_k = entries.data_ptr()
    assert _C.host.key_row_offset(p, 1, 7) == 3070
    p.batch_index_k, p.leftpad_k = 0, padding.data_ptr()
    p.page_table, p.page_table_stride, p.page_size = pages.data_ptr(), 3, 32
    assert _C.host.key_row_offset(p, 0, 70) == 2000 + 60
    assert _C.host.key_row_offset(p, 1, 12) == 3000  # row 32: the second page
    p = (case := Case(2, 4, 7, vectors={"cu_seqlens_q": [0, 9, 12], "cu_seqlens_k": [1, 20, 24]})).params()
    found = [_C.host.sequence(p, b)[x] for b in range(case.batch) for x in ("rows_q", "queries", "keys", "offset")]
    assert found == [4, 4, 7, 3, 3, 3, 4, 1]  # of a document that is longer than the launch was told, the first rows
