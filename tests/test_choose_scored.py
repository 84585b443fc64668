"""Selection among plain rows and those that take features, and of drawn problems; what is refused, and how."""

import itertools
import random
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import gpu
import pytest
import resources
import torch
from fake_build import GPUS, L4, Row, make_build
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cutlass_fmha import _C, cli, cost
from cutlass_fmha.arguments import refusal
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import blocks, choose, device, eligibility
from cutlass_fmha.dispatch import problem as of_problems
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.describe import describe
from cutlass_fmha.dispatch.device import PRESETS, Device
from cutlass_fmha.dispatch.families import masked, scored
from cutlass_fmha.dispatch.problem import CAUSAL, EVEN, FEATURES, MAX_KEY_SPAN, Problem
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features
from cutlass_fmha.launch.params import prepare_attention

RANGED = Row(9999, 89, "bfloat16", 128, 256, 64, 8, "cp_async_16", 98 * 1024, 1, 1, 1, False, True, False, True, True)
SCORE_MOD = replace(RANGED, index=9998, tile_n=48, ranged=False, score_mod=True)
MASKED = replace(RANGED, index=9997, tile_n=32, ranged=False, masked=True)
BUILD = make_build()
WITH_RANGED = tables.Table((*make_build((89,)).rows, RANGED, SCORE_MOD, MASKED))  # type: ignore[arg-type]
PLAIN = tables.Table(tuple(row for row in BUILD.rows if not row.takes_features))
PREFILL = Problem(2, 4096, 4096, 16, 16, 64, "float16")
DECODE = Problem(1, 1, 16384, 32, 8, 128, "float16")
PACKED = Problem(8, 2048, 2048, 16, 16, 128, "bfloat16", "bottom-right", features=("varlen",))
TILE, FEW_QUERY, OF_DECODING = (
    BUILD.by_name(f"fwd_sm89_f16_{tile}_scored") for tile in ("d64_m64n64w4", "d64_m16n16w4k4", "d128_m16n16w4k4")
)
pytestmark = pytest.mark.usefixtures("hermetic")


def reasons(row: Any, problem: Problem = PREFILL, gpu: Device = L4, **changes: Any) -> str:
    row = BUILD.by_name(f"fwd_sm89_f16_{row}") if isinstance(row, str) else row
    return "; ".join(eligibility.reasons(row, replace(problem, **changes), gpu, BUILD))


def test_what_plain_rows_lack_and_scored_ones_know():
    for feature, words in FEATURES.items():
        assert reasons("d64_m64n64w4", features=(feature,)) == f"has no {words}: that takes a scored row"
        assert reasons(TILE, features=(feature,)) == "" and words in str(replace(PREFILL, features=(feature,)))
    tile, blocks = "d192v128_m64n32w4_scored", "takes block masks of blocks that are multiples of"
    for changes in ({"head_dim": 192, "head_dim_v": 128}, {"head_dim": 40}, {"alignment": 2}):
        assert reasons(tile, **changes) == ""
    assert reasons(tile, head_dim=192) == "made for head dims up to 192, 128 of value, and the tensors have 192"
    assert reasons(tile, block_mask=(64, 96)) == ""
    assert reasons(tile, block_mask=(96, 80)) == f"{blocks} 64 x 32, and these are 96 x 80"
    assert reasons(FEW_QUERY, block_mask=(64, 96)) == f"{blocks} 16 x 64, and these are 64 x 96"
    windowed = {"features": ("pages", "window", "block_mask"), "block_mask": (64, 96), "window": (3, -1)}
    for causal in ("bottom-right", "none", "top-left"):
        assert choose.choose(replace(PREFILL, **windowed, causal=causal), L4, table=BUILD).takes_features


#: Of each family features that its rows take, beside a window, and others of which each is a reason.
TAKES = {
    RANGED: ("prefix sinks varlen lengths pages cache_batch_idx leftpad", "mask bias softcap alibi dropout"),
    SCORE_MOD: ("softcap alibi dropout", "mask bias"),
    MASKED: ("mask bias", "softcap alibi dropout"),
}


@pytest.mark.parametrize("row", TAKES, ids=lambda row: row.family)
def test_what_rows_between_plain_and_scored_ones_take(row: Row):
    def why(*features: str, **changes: Any) -> str:
        return reasons(row, PACKED, features=("window", *features), **changes)

    taken, others = (names.split() for names in TAKES[row])
    for feature in taken:
        assert why(feature) == ""
        for other in (*others, "block_mask", "splits"):
            assert why(feature, other) == f"has no {FEATURES[other]}: that takes a scored row"
    assert why() == "" if row is RANGED else why().endswith("without them, a ranged row is faster")
    odd = "takes head dims that are multiples of 8, and the tensors have 72, value 36"
    unaligned = "needs pointers and strides aligned to 16 bytes, and these are aligned to 8"
    assert why(taken[0], head_dim=72) == "" and why(taken[0], head_dim=72, head_dim_v=36) == odd
    assert why(taken[0], alignment=8) == unaligned
    assert why(taken[0], head_dim=136) == "made for head dims up to 128, and the tensors have 136"
    if row is MASKED:
        assert why("mask", "bias").startswith("takes a mask or a bias, not both")
        assert why("bias", score_runs=False).startswith("reads a bias of q's dtype by 4 keys: seqlen_k, the address")
        assert why("mask", score_runs=False).startswith("reads a mask by 4 keys")
        odd_rows = replace(PACKED, features=("mask",), score_runs=False, packable_mask=True)
        assert eligibility.reasons(row, odd_rows, L4, BUILD) == []
        as_bytes = replace(row, reads_mask_bits=False), odd_rows
        assert eligibility.reasons(*as_bytes, L4, BUILD)[0].startswith("reads a mask by 4 keys")
    if row is RANGED:
        by_tma, h200 = replace(row, arch=90, copy="tma"), PRESETS["h200"]
        (reason,) = eligibility.reasons(by_tma, replace(PACKED, features=("pages", "leftpad")), h200, BUILD)
        assert reason == "copies whole runs of a page's rows, which left padding doesn't leave"


def test_a_mask_is_packed_where_there_is_no_other_way_or_its_bits_are_read_often():
    large = replace(PACKED, features=("mask",), batch=4, seqlen_q=4096, seqlen_k=4096)
    bits = large.seqlen_q * large.seqlen_k // 32  # words of one head's
    small = replace(large, batch=1, num_heads=1, seqlen_q=1024)
    assert blocks.worth_packing_mask(large, MASKED, 16 * bits, 4)
    for changes, words, batch in (
        *(({"features": ("mask", x)}, bits, 4) for x in ("window", "lengths", "pages")),
        ({"mean": (400, 400)}, bits, 4), ({}, 17 * bits, 4), ({}, 16 * bits, 3), ({"seqlen_q": 63}, 63, 1),
    ):  # fmt: skip
        assert not blocks.worth_packing_mask(replace(large, **changes), MASKED, words, batch)
    for row, problem in ((replace(MASKED, reads_mask_bytes=False), small), (MASKED, replace(small, score_runs=False))):
        assert blocks.must_pack_mask(problem, row) and blocks.worth_packing_mask(problem, row, bits, 1)
        costs = store.default(L4)
        read, packed = masked.offers(MASKED, small, L4, costs), masked.offers(row, problem, L4, costs)
        more = packed.us(small) - read.us(small)
        assert 2 < more < 60 and more == pytest.approx(packed.at_least(small) - read.at_least(small))
        assert choose.predicted_us(row, problem, L4) == choose.price(row, problem, L4, store.for_device(L4))


def test_masks_that_are_worth_packing_and_room_of_theirs():
    """32 words for 16 queries and 64 keys; one of them where no key is there, and none where nothing is read."""
    rows = [row for row in _C.rows() if row.family == "masked" and row.reads_mask_bits]
    assert rows or not _C.build_info()["cuda"]
    one, whole, of_batch, padding = (
        (40, 129, *x) for x in ((40, 129), (2, 4, 40, 129), (2, 1, 40, 129), (2, 1, 1, 129))
    )
    cases = ((*one, 9), (*of_batch, 18), (*padding, 6), (*whole, None), (40, 129, 40, 1, None), (0, 7, 0, 7, 0))
    for row, (seqlen_q, seqlen_k, *shape, words) in itertools.product(rows, (*cases, (40, 0, 1, 1, None))):
        q, k = (torch.empty(2, n, 4, row.head_dim, dtype=gpu.torch_dtype(row)) for n in (seqlen_q, seqlen_k))
        call = describe((q, k, k), "none", Features(mask=torch.ones(shape, dtype=torch.bool)))
        if words is None:  # its bits would take as much as it does, or are read by one or two
            assert not call.problem.packable_mask
            assert "mask by 4 keys" in eligibility.reasons(row, call.problem, L4, BUILD)[-1]
            continue
        params, room = prepare_attention(row, call, L4)
        assert (params.packs_mask, room) == (words > 0, words * 32), (row.name, shape)
        same = describe((q, k, k), "none", Features(mask=torch.ones(shape, dtype=torch.bool), batch_invariant=True))
        assert not same.problem.packable_mask
    toeplitz = torch.ones(300, dtype=torch.bool).as_strided((40, 128), (1, 1))
    q, k = (torch.empty(2, n, 4, 64, dtype=torch.float16) for n in (40, 128))
    assert describe((q, k, k), "none", Features(mask=toeplitz)).problem.packable_mask is False


def test_masks_and_biases_that_masked_rows_can_read():
    """All dimensions may be broadcast but the keys'; rows begin at multiples of four keys."""
    q, k = torch.empty(2, 24, 4, 64, dtype=torch.float16), torch.empty(2, 40, 4, 64, dtype=torch.float16)
    buffer = torch.empty(2 * 4 * 24 * 64 + 8, dtype=torch.float16)

    def runs(name: str, x: torch.Tensor, k: torch.Tensor = k, **more: object) -> bool:
        x = x > 0 if name == "mask" and x.dtype != torch.bool else x
        return describe((q, k, k), "none", Features(**{name: x}, **more)).problem.score_runs

    as_bool = torch.empty(buffer.shape, dtype=torch.bool)
    for name, x in (("bias", buffer[:-8].view(2, 4, 24, 64)), ("mask", as_bool[:-8].view(2, 4, 24, 64))):
        forty, one = x[..., :40], x[..., :1]
        of_41 = x.reshape(2, 4, -1)[..., : 24 * 41].view(2, 4, 24, 41)[..., :40]
        broadcast = (forty[:1].expand(2, -1, -1, -1), forty[:1, :1], forty[:, :, :1], forty[0, 0, 0])
        for even in (forty, x[..., 4:44], *broadcast, forty.transpose(0, 1).contiguous().transpose(0, 1)):
            assert runs(name, even)
        for odd in (x[..., 2:42], x[..., 1:41], one, one.expand(-1, -1, -1, 40), forty.mT.contiguous().mT, of_41):
            assert not runs(name, odd)
        assert not any(runs(name, x[..., :keys], k[:, :keys]) for keys in (1, 17, 38))
        used = {"seqused_k": torch.zeros(2, dtype=torch.int32), "max_seqlen_k": 40}
        assert runs(name, forty, **used) and not runs(name, forty, **used, batch_invariant=True)
    assert runs("bias", buffer[:-8].view(2, 4, 24, 64)[..., :40].float(), **used, batch_invariant=True) is None


def test_heads_are_packed_where_that_leaves_fewer_tiles():
    for seqlen_q, group in itertools.product((1, 2, 16, 17, 64, 100, 1000), (1, 4, 7)):
        problem = replace(PREFILL, seqlen_q=seqlen_q, num_heads=2 * group, num_heads_kv=2)
        for row in (TILE, FEW_QUERY):
            packed, apart = -(-seqlen_q * group // row.tile_m), -(-seqlen_q // row.tile_m) * group
            assert blocks.packed_heads(row, problem) == (group if group > 1 and packed <= 0.9 * apart else 1)
            assert blocks.packed_heads(row, replace(problem, block_mask=(64, 64))) == 1
        assert blocks.packed_heads(BUILD.by_name("fwd_sm89_f16_d64_m64n64w4"), problem) == 1


def test_keys_are_split_where_that_fills_the_gpu():
    for many in map(PRESETS.__getitem__, GPUS):
        places = many.sm_count * blocks.resident_blocks(OF_DECODING, many)
        for batch in (1, 3, 8, 40, 1000):
            splits, launched = blocks.split_keys(OF_DECODING, replace(DECODE, batch=batch), many), batch * 8
            assert 1 <= splits <= blocks.MAX_SPLITS
            assert splits == 1 or launched < 2 * places
            assert 4 * launched > places or (splits > 1 and launched * splits > 0.7 * many.sm_count)
        assert blocks.split_keys(OF_DECODING, replace(DECODE, num_splits=11), many) == 11
        assert blocks.split_keys(OF_DECODING, replace(DECODE, seqlen_k=20), many) == 1


def test_parts_are_those_that_were_the_fastest_on_an_h200():
    rows = [row for row in resources.whole_table() if row.family == "few_query_scored" and row.arch == 90]
    for batch, heads, heads_kv, keys, head_dim, warps, splits in (
        *((16, 32, 32, 2048, 128, 4, 3), (32, 32, 32, 2048, 128, 4, 1), (1, 32, 32, 32768, 128, 4, 4)),
        *((1, 32, 8, 32768, 128, 4, 16), (64, 32, 8, 4096, 64, 4, 1), (32, 16, 16, 8192, 64, 4, 1)),
        *((1, 8, 1, 16384, 256, 2, 64), (8, 32, 8, 8192, 128, 4, 2)),
        *((16, 32, 32, 2048, 128, 2, 1), (64, 32, 8, 1000, 128, 2, 1), (32, 16, 16, 512, 64, 2, 1)),
        (8, 32, 8, 8192, 128, 2, 4),  # two warps alone can't take what an SM can
    ):
        found = (row for row in rows if (row.head_dim, row.head_dim_v, row.warps) == (head_dim, head_dim, warps))
        problem = Problem(batch, 1, keys, heads, heads_kv, head_dim, "float16")
        assert blocks.split_keys(next(found), problem, PRESETS["h200"]) == splits
    # Where memory is slower, two warps can take all that an SM is for.
    slow = next(row for row in resources.whole_table() if row.name == "fwd_sm89_f16_d128_m16n16w2k2_scored")
    assert blocks.split_keys(slow, Problem(7, 1, 8192, 32, 8, 128, "float16"), L4) == 1  # 56 blocks, 58 SMs
    # They need a bounded workspace, and a second launch.
    for seqlen_q in (512, 64 * 1024):
        problem = Problem(1, seqlen_q, 2**20, 128, 128, 64, "float16")
        parts = blocks.split_keys(TILE, problem, replace(L4, sm_count=100_000))
        assert 4 * parts * seqlen_q * 128 * 64 <= blocks.MAX_PARTIAL_BYTES or parts == 1
    prices = cost.RowCost(5.0, 0, 0, 0, 0.1, 0.1, 0.1, 0.1)
    once, twice = (cost.count(OF_DECODING, replace(DECODE, num_splits=n), L4, prices) for n in (1, 4))
    assert once and twice and (once.launches, twice.launches) == (1, 2)
    assert twice.megabytes > once.megabytes and twice.steps < once.steps / 3


def test_a_window_shortens_the_walk():
    windowed = replace(PREFILL, causal="bottom-right", window=(256, -1), features=("window",))
    found = [blocks.groups(TILE, problem, L4) for problem in (replace(windowed, window=(-1, -1)), windowed)]
    whole, part = (sum(group.blocks * group.steps for group in groups) for groups in found)
    assert part < whole / 5
    assert windowed.visible_keys(1000, 1063) == (744, 1064)
    assert replace(windowed, causal="none", window=(-1, 7)).visible_keys(10, 20) == (0, 28)
    assert replace(windowed, seqlen_k=100).visible_keys(0, 10) == (0, 0)


def test_under_a_diagonal_the_first_tile_is_the_short_one():
    of_kinds = {"none": [5, 5], "bottom-right": [5, 1], "top-left": [5, 1]}  # 300 keys by 64; 64 queries by 64
    for causal, steps in of_kinds.items():
        problem = replace(PACKED, batch=1, seqlen_q=300, seqlen_k=300, causal=causal)
        found = [round(g.steps) for g in blocks.groups(RANGED, problem, L4) for _ in range(g.blocks // 16)]
        assert found == steps
        p = _C.AttentionParams()
        p.batch = p.num_heads = p.num_heads_kv = p.splits = p.pack = 1
        p.window_left, p.window_right, p.bottom_right = -1, -1 if causal == "none" else 0, causal != "top-left"
        for queries in (257, 300, 511, 512, 1023):  # the kernels' own cut
            p.seqlen_q = p.seqlen_k = queries
            cut = blocks._cut_from_first(RANGED, replace(problem, seqlen_q=queries), 1)
            assert _C.host.rows_of_block(p, (0, 0, 0, 0), 256) == [0, 256 - cut]
    of_scored = blocks.groups(TILE, replace(problem, head_dim=64), L4)
    assert [group.steps for group in of_scored] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("gpu", GPUS)
def test_plain_problems_but_long_decoding_keep_their_plain_rows(gpu: str):
    """What scored rows cost has no say, wherever a plain row takes the problem and it is no decoding."""
    free_fit = store.Fit(cost.RowCost(0.01, 0, 0, 0, 0, 0, 0, 0), 0, 0, 9)
    free = {row.name: free_fit for row in BUILD.rows if row.takes_features}
    own = store.for_device(PRESETS[gpu])
    tempted = replace(own, rows={**own.rows, **free})
    sizes = ((4096, 4096, 16), (65, 100, 16), (64, 511, 16), (65, 8192, 16), (300, 300, 2))
    for seqlen_q, seqlen_k, alignment in sizes:
        problem = Problem(2, seqlen_q, seqlen_k, 8, 8, 64, "float16", alignment=alignment)
        assert not problem.is_decode
        chosen = choose.choose(problem, PRESETS[gpu], table=BUILD, calibration=tempted)
        assert chosen.name == choose.choose(problem, PRESETS[gpu], table=PLAIN).name
    # A shipped file has timings of some of these rows only.
    default, full = store.default(PRESETS[gpu]), Problem(64, 1, 512, 32, 32, 128, "float16")
    for problem in (DECODE, full):
        chosen = choose.choose(problem, PRESETS[gpu], table=BUILD, calibration=default)
        assert chosen.takes_features == (problem is DECODE)  # of few sequences, and long


def test_a_row_that_nobody_timed_has_to_be_clearly_better():
    default = store.default(L4)
    split, plain = (choose.choose(DECODE, L4, table=build, calibration=default) for build in (BUILD, PLAIN))
    best = cost.predict(split, DECODE, L4, default.cost(split, L4))
    for factor, taken in ((1.2, False), (1.3, True)):
        fitted = store.Fit(cost.RowCost(factor * best, 0, 0, 0, 0, 0, 0, 0), 0, 0, 9)
        known = replace(default, rows={row.name: fitted for row in PLAIN.rows})
        assert choose.choose(DECODE, L4, table=BUILD, calibration=known).scored is taken
    assert choose.price(split, DECODE, L4, default) == pytest.approx(scored.UNTIMED * best)
    assert choose.price(split, replace(DECODE, features=("sinks",)), L4, default) == pytest.approx(best)
    assert choose.price(plain, DECODE, L4, default) == choose.predicted_us(plain, DECODE, L4, default)


def test_documents_are_for_ranged_rows_and_odd_head_dims_for_scored_ones_of_the_least():
    for head_dim, head_dim_v, dims in ((40, None, "d64"), (72, None, "d128"), (192, 128, "d192v128"), (200, 8, "d256")):
        problem = replace(PREFILL, head_dim=head_dim, head_dim_v=head_dim_v)
        assert f"_{dims}_" in choose.choose(problem, L4, table=BUILD).name

    def family(*features: str, **changes: Any) -> str:
        asked = replace(PACKED, features=features, **changes)
        return choose.choose(asked, L4, table=WITH_RANGED, calibration=store.default(L4)).family

    assert (family("varlen"), family(), family("varlen", "softcap")) == ("ranged", "plain", "score_mod")
    for feature in ("mask", "bias"):
        assert family("varlen", feature) == "masked"
        assert family("varlen", feature, score_runs=False) == "scored"
        assert family("varlen", feature, batch=1, seqlen_q=1, seqlen_k=16384) == "few_query_scored"
    few = replace(PACKED, batch=1, seqlen_q=300, num_heads=1, num_heads_kv=1, seqlen_k=32768)
    assert blocks.split_keys(RANGED, few, L4) == 1  # their keys are not split
    assert blocks.split_keys(BUILD.by_name("fwd_sm89_bf16_d128_m64n32w4_scored"), few, L4) > 1


def packed(lengths: list[int]) -> Problem:
    """The problem of documents of these lengths."""
    mean, longest = of_problems.mean_length(sum(lengths), len(lengths), max(lengths)), max(lengths)
    return replace(PACKED, batch=len(lengths), seqlen_q=longest, seqlen_k=longest, mean=(mean, mean))


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("lengths", [(1024, 1024, 16), (200, 300, 64), (40, 2900, 24), (4000, 7000, 3)])
def test_packed_documents_count_as_long_as_they_are(lengths: Any, causal: str):
    """Not as long as the longest, by which there would be up to twice as many steps."""
    shortest, longest, count = lengths
    lengths = [shortest + (longest - shortest) * number // (count - 1) for number in range(count)]
    problem = replace(packed(lengths), causal=causal)
    for row in (RANGED, replace(RANGED, tile_m=128)):
        found = blocks.groups(row, problem, L4)
        apart = [group for each in lengths for group in blocks.groups(row, replace(packed([each]), causal=causal), L4)]
        for name in ("block", "steps", "warp_steps"):
            total, exact = (sum(g.blocks * getattr(g, name) for g in groups) for groups in (found, apart))
            assert total == pytest.approx(exact, rel=0.12)
    assert problem.elements_written == pytest.approx(sum(lengths) * 16 * 128, rel=0.12)
    assert problem.elements_read == pytest.approx(3 * sum(lengths) * 16 * 128, rel=0.12)
    of_class = of_problems.typical(problem)
    assert of_problems.typical(of_class) == of_class
    assert of_class.mean[0] == pytest.approx(of_problems.mean_length(sum(lengths), count, longest), rel=0.25)
    assert of_class.seqlen_q == pytest.approx(longest, rel=0.5)


def test_shapes_tell_how_long_documents_are_on_average():
    def mean(rows_q: int, rows_k: int, **more: bool) -> tuple[int, int]:
        q, k = (torch.empty(rows, 2, 64, dtype=torch.float16) for rows in (rows_q, rows_k))
        cu = torch.empty(5, dtype=torch.int32)
        features = Features(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=100, max_seqlen_k=300, **more)
        return describe((q, k, k), "bottom-right", features).problem.mean

    assert mean(400, 1100) == mean(0, 0) == mean(200, 300, batch_invariant=True) == EVEN  # as long as the longest
    assert (mean(200, 301), mean(0, 400)) == ((50, 76), (0, 100))
    # A bound far above all rows says no more than their number, but to a mask, which may be as large.
    q, cu = torch.empty(400, 2, 64, dtype=torch.float16), torch.tensor([0, 400], dtype=torch.int32)
    loose = Features(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=2**29, max_seqlen_k=2**29)
    masked = loose._replace(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    found = [describe((q, q, q), "none", features).problem for features in (loose, masked)]
    assert [(p.seqlen_q, p.seqlen_k) for p in found] == [(400, 400), (2**29, 2**29)]
    # Each batch of like documents has another mean and another longest: rows are not compared anew for most.
    generator, classes = random.Random(1), set()
    for _ in range(1000):
        lengths = [generator.randint(20, 400) for _ in range(generator.randint(15, 17))]
        classes.add(of_problems.class_of(packed(lengths)))
    assert len(classes) <= 7


#: Ours where it has kernels: rows of all families are what users see.
OURS = replace(tables.this_build(), rows=resources.whole_table())
BUILDS = [BUILD, *([OURS] if OURS.rows else [])]
MOST_LINES, MOST_BYTES, MOST_BYTES_OF_A_SENTENCE = 15, 2500, 600


@st.composite
def problems(draw: st.DrawFn, many: bool = False) -> Problem:
    """Windows, blocks, pages and lengths of documents are features; with ``many`` of them at once few rows run any."""
    dim = st.sampled_from((64, 80, 320, 640)) | st.integers(1, 2000) if many else st.sampled_from((40, 64, 128, 320))
    names = draw(st.lists(st.sampled_from(tuple(FEATURES)), max_size=len(FEATURES) if many else 2, unique=True))
    block = st.sampled_from((1, 16, 24, 64, 128))
    windows = st.sampled_from(((100, 0), (700, 2000), (100, -1), (-1, 7), (-1, 300)))
    long = st.sampled_from((1, 4096, 2**29))
    seqlen_q, seqlen_k = draw(long if many else st.integers(0, 9000)), draw(long if many else st.integers(0, 40000))
    averaged = "varlen" in names and min(seqlen_q, seqlen_k) >= of_problems.SHORT
    mean_q, mean_k = draw(st.sampled_from((EVEN, (1, 1), (0, 7)))) if averaged else EVEN  # of 3 and of 9
    heads, heads_kv = draw(st.sampled_from((8, 32))), draw(st.sampled_from((2, 8)))
    dtype, causal = draw(st.sampled_from(("float16", "bfloat16", "float32"))), draw(st.sampled_from(CAUSAL))
    sizes = (draw(st.sampled_from((1, 3, 16, 99999))), seqlen_q, seqlen_k, heads, heads_kv, draw(dim))
    return Problem(
        *(*sizes, dtype, causal),
        alignment=draw(st.sampled_from((1, 2, 4, 8, 16) if many else (2, 16))),
        head_dim_v=draw(st.none() | dim),
        features=tuple(names),
        mean=(seqlen_q * mean_q // 3, seqlen_k * mean_k // 9),
        window=draw(windows) if "window" in names else (-1, -1),
        block_mask=(draw(block), draw(block)) if "block_mask" in names else None,
        page_size=16 if "pages" in names else 0,
        key_span=draw(st.sampled_from((0, MAX_KEY_SPAN, MAX_KEY_SPAN + 1))),
    )


gpus = st.sampled_from(("l4", "h200", "rtx5090")).map(PRESETS.__getitem__)


@given(problems(), gpus)
@example(Problem(1, 2753, 225, 8, 2, 40, "float16", "bottom-right", 2), PRESETS["l4"])  # few tiles see a key
@example(Problem(1, 307, 1, 32, 2, 64, "float16", "bottom-right", 2), PRESETS["l4"])
@example(Problem(3, 65, 5807, 8, 8, 64, "float16", "bottom-right", 2, features=("bias",)), PRESETS["h200"])
@example(Problem(6, 1039, 1039, 4, 4, 128, "bfloat16", "top-left"), PRESETS["h200"])
@example(Problem(8, 3000, 3000, 8, 8, 64, "float16", features=("window",), window=(100, 0)), PRESETS["l4"])
def test_a_choice_is_of_rows_without_a_reason_that_of_its_class_of_lengths_and_costs_little(problem, gpu):
    build, known = tables.this_build(), store.for_device(gpu)
    eligible = eligibility.eligible_rows(problem, gpu, build)
    assert eligible == [row for row in build.rows if not eligibility.reasons(row, problem, gpu, build)]
    if not eligible:
        return
    for row in eligible:  # one whose bound is above another's price is never played through
        offers = eligibility.family(row).offers(row, problem, gpu, known)
        assert 0 <= offers.at_least(problem) <= offers.us(problem)
    chosen = choose.choose(problem, gpu)
    assert chosen in eligible
    of_class = of_problems.typical(problem)
    assert of_problems.typical(of_class) == of_class
    assert of_class.is_decode != problem.is_decode or choose.choose(of_class, gpu) is chosen
    if problem.mean == EVEN:
        assert problem.seqlen_k <= of_class.seqlen_k <= problem.seqlen_k * 17 / 16
    asked = choose.contenders(eligible, problem)
    prices = {row.name: choose.price(row, of_class, gpu, known) for row in asked}
    assert prices[chosen.name] == min(prices.values())


def test_a_length_never_seen_before_is_priced_only_where_its_class_is_new(monkeypatch):
    priced = mock.Mock(wraps=choose.cheapest)
    monkeypatch.setattr(choose, "cheapest", priced)
    for length in range(60001, 60001 + 4000):
        choose.choose(Problem(2, length, length, 16, 16, 128, "bfloat16", "bottom-right"), PRESETS["h200"])
    assert 1 <= priced.call_count <= 3


@settings(max_examples=300)
@given(problems(many=True), st.sampled_from(GPUS).map(PRESETS.__getitem__), st.sampled_from(BUILDS))
def test_a_refusal_is_short_counts_every_row_and_its_advice_works(problem, gpu, build):
    assume(not eligibility.eligible_rows(problem, gpu, build))
    with pytest.raises(UnsupportedError) as error:
        choose.choose(problem, gpu, table=build)
    first, *lines = (text := str(error.value)).split("\n")
    assert len(lines) < MOST_LINES and len(text.encode()) <= MOST_BYTES
    assert len(first) <= MOST_BYTES_OF_A_SENTENCE and str(problem) in first and str(gpu) in first
    # The nearest rows are of this architecture and dtype, their reasons the fewest there are.
    own = [row for row in build.rows if row.arch == device.own_arch(gpu) and row.dtype == problem.dtype]
    nearest = [x for line in lines if (x := re.fullmatch(r"  (\S+?)(?: and (\d+) more)?: (.*)", line))]
    count = {row.name: len(eligibility.reasons(row, problem, gpu, build)) for row in own or build.rows}
    assert nearest and {found[1] for found in nearest} <= count.keys()
    assert count[nearest[0][1]] == min(count.values())
    for found in nearest:
        assert found[3] == "; ".join(eligibility.reasons(build.by_name(found[1]), problem, gpu, build))
    # No row is left uncounted.
    told = sum(1 + int(found[2] or 0) for found in nearest)
    further = next((line for line in lines if line.startswith("further rows: ")), "")
    assert told + sum(map(int, re.findall(r"(\d+) (?:for|with)", further))) == len(build.rows)
    # What is advised is told, and works.
    ways_out = refusal.ways_out(problem, gpu, build)
    for way_out in ways_out:
        assert choose.choose(way_out.problem, gpu, table=build)
    advice = lines[0].removeprefix(refusal.WHAT_TO_CHANGE).split("; or ") if ways_out else []
    assert advice == [way_out.what for way_out in ways_out]
    if problem.alignment > 1:  # which no row takes
        assert ways_out


def test_advice(printed, monkeypatch):
    problem, align = Problem(1, 128, 128, 8, 8, 64, "bfloat16"), "align pointers and strides to 16 bytes"
    blocked = replace(problem, features=("block_mask",), block_mask=(96, 96))
    for asked, advice in (
        (replace(problem, head_dim=320, features=("softcap",)), "use head dims of at most 256"),
        (blocked, "a block mask of .* 64 x 64"),
        (replace(problem, dtype="float32"), "use float16; or use bfloat16"),
        (replace(problem, head_dim=300, dtype="float32"), "use head dims of at most 256 and use float16"),
        (replace(blocked, features=("sinks", "block_mask"), alignment=1), f"drop block mask and {align}; or use"),
        (replace(problem, alignment=1), align),
    ):
        with pytest.raises(UnsupportedError, match=f"\nwhat to change: .*{advice}"):
            choose.choose(asked, PRESETS["rtx4090"], table=BUILD)
    # The command that a refusal names lists every row.
    monkeypatch.setattr(tables, "this_build", lambda: BUILD)
    with pytest.raises(UnsupportedError, match=r"all_rows=True; or `python -m .* explain` with --all$"):
        choose.choose(replace(problem, head_dim=320, features=("softcap",)), PRESETS["l4"])
    asked = ("explain", "--shape", "1,128,8,320", "--features", "softcap", "--device", "l4", "--all")
    out = printed(cli.main, *asked, status=1).out
    assert all(f" {row.name} " in out for row in BUILD.rows)
