"""The kernels' own softmax, mask, scheduler and shared-memory arithmetic, run on the host."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cutlass_fmha import _C

NEAREST = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative rounding error of a probability

lengths = st.integers(0, 300)
diagonals = st.none() | st.integers(-320, 320)


def visible_count(row: int, seqlen_k: int, diagonal: int | None) -> int:
    return sum(diagonal is None or key <= row + diagonal for key in range(seqlen_k))


def check(
    scores: list[float], values: list[list[float]], scale: float, row: int, diagonal: int | None, dtype: str,
    of_lse: dict[str, float], **tolerance: float,
) -> None:  # fmt: skip
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
    st.lists(st.floats(-60, 60, width=32), max_size=100),
    st.sampled_from([1.0, 0.125, -0.5, 0.0, 1e-30, 7.0]),
    st.integers(0, 120),
    diagonals,
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from(["drawn", "rising", "falling"]),
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
@pytest.mark.parametrize(("scores", "diagonal"), WALKS)
def test_the_reference_follows_the_maximum(scores, diagonal, dtype):
    values = [[float(key % 5), 1.0, -float(key % 2), float(key == 0)] for key in range(len(scores))]
    check(scores, values, 1.0, 15, diagonal, dtype, {"rel": 1e-6}, rtol=2 * NEAREST[dtype], atol=2 * NEAREST[dtype])


def test_nan_scores_give_nan_and_do_not_pass_the_trial():
    scores = [math.nan] + [0.0] * 63
    out, _ = _C.host.online_softmax(scores, [[1.0] * 4] * 64, 1.0, 0, None, "bfloat16")
    assert all(math.isnan(x) for x in out)


@given(st.integers(0, 300), lengths, diagonals)
def test_visible_keys_counts_the_keys_under_the_diagonal(row, seqlen_k, diagonal):
    assert _C.host.visible_keys(row, seqlen_k, diagonal) == visible_count(row, seqlen_k, diagonal)


@given(st.integers(0, 10), *[st.sampled_from([16, 32, 64])] * 2, lengths, lengths, diagonals)
def test_key_blocks_are_exactly_those_with_a_visible_key(tile, rows, tile_n, seqlen_q, seqlen_k, diagonal):
    begin, end = tile * rows, (tile + 1) * rows
    walked, full = _C.host.key_blocks(begin, end, tile_n, seqlen_q, seqlen_k, diagonal)
    counts = [visible_count(row, seqlen_k, diagonal) for row in range(begin, min(end, seqlen_q))]
    assert walked == math.ceil(max(counts, default=0) / tile_n)
    if counts:
        assert full == min(counts) // tile_n
        assert full <= walked


orders = st.tuples(st.integers(1, 400), st.integers(1, 12))
tile_rows = st.sampled_from([64, 128, 256])


@given(st.integers(0, 4), st.integers(1, 70), lengths, st.booleans(), tile_rows, orders)
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


MB = 2**20


@pytest.mark.parametrize(
    ("sms", "l2_bytes", "warps", "heads", "group", "head_bytes", "expected"),
    [
        (40, 50 * MB, 8, 128, 1, MB, (22, 9)),  # half of it holds 25 heads: 128 in 6 alike shares
        (40, 50 * MB, 8, 20, 1, MB, (20, 16)),  # all fit: every tile counts as a long one
        (40, 50 * MB, 8, 32, 1, 4 * MB, (8, 9)),  # four tiles of 10 heads run at once: 32 in 4 shares
        (40, 50 * MB, 4, 32, 1, 4 * MB, (16, 9)),  # two such blocks an SM
        (40, 50 * MB, 8, 64, 8, 16 * MB, (8, 9)),  # heads that share keys stay together
        (40, 50 * MB, 8, 64, 16, 64 * MB, (16, 9)),  # not one fits
        (4, 0, 8, 64, 1, MB, (1, 9)),  # nothing known of the cache
        (40, 50 * MB, 8, 64, 1, 0, (64, 16)),  # no key at all
    ],
)
def test_heads_are_mixed_as_share_keys_in_l2(sms, l2_bytes, warps, heads, group, head_bytes, expected):
    order = _C.host.tile_order(sms, l2_bytes, warps, heads, group, head_bytes, 16, 7)
    assert tuple(order) == expected


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


@pytest.mark.parametrize(("n", "divisor"), [(-1, 3), (3, 0)])
def test_a_division_that_the_kernels_never_make_is_refused(n, divisor):
    with pytest.raises(ValueError, match="n must be at least 0 and divisor at least 1"):
        _C.host.quotient(n, divisor)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_ldmatrix_addresses_agree_with_the_swizzled_layout_and_meet_in_no_bank(head_dim):
    offsets = [_C.host.smem_offsets(head_dim, row, column) for row in range(64) for column in range(head_dim)]
    assert all(by_layout == by_arithmetic for by_layout, by_arithmetic in offsets)
    assert sorted(by_layout for by_layout, _ in offsets) == list(range(0, 2 * 64 * head_dim, 2))
    # No two of the eight rows of 16 bytes of an 8 x 8 matrix share banks.
    banks = torch.tensor(offsets)[:, 0].view(8, 8, head_dim // 8, 8)[..., 0] // 16 % 8
    assert (banks.sort(1).values == torch.arange(8)[:, None]).all()
