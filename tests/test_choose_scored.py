"""Selection among plain rows and those that take features: reasons, how they cut a problem, which one is taken."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_build import GPUS, L4, Row, make_build

import cutlass_fmha
from cutlass_fmha import cost
from cutlass_fmha.calibrate import verdict
from cutlass_fmha.calibrate.measurements import Sample
from cutlass_fmha.calibrate.timing import RowTime
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import blocks, choose, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.describe import describe
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.families import scored
from cutlass_fmha.dispatch.problem import EVEN, FEATURES, Problem, class_of, mean_length, typical
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.features import Features

RANGED = Row(9999, 89, "bfloat16", 128, 256, 64, 8, "cp_async_16", 98 * 1024, 1, 1, 1, False, True, False, True, True)
SCORE_MOD = replace(RANGED, index=9998, tile_n=48, ranged=False, score_mod=True)
MASKED = replace(RANGED, index=9997, tile_n=32, ranged=False, masked=True)
BUILD = make_build()
WITH_RANGED = Table((*make_build((89,)).rows, RANGED, SCORE_MOD, MASKED))  # type: ignore[arg-type]
PLAIN = Table(tuple(row for row in BUILD.rows if not row.takes_features))
PREFILL = Problem(2, 4096, 4096, 16, 16, 64, "float16")
DECODE = Problem(1, 1, 16384, 32, 8, 128, "float16")
PACKED = Problem(8, 2048, 2048, 16, 16, 128, "bfloat16", "bottom-right", features=("varlen",))
TILE, FEW_QUERY, OF_DECODING = (
    BUILD.by_name(f"fwd_sm89_f16_{tile}_scored") for tile in ("d64_m64n64w4", "d64_m16n16w4k4", "d128_m16n16w4k4")
)


pytestmark = pytest.mark.usefixtures("hermetic")


def reasons(problem: Problem, tile: str) -> str:
    return "; ".join(eligibility.reasons(BUILD.by_name(f"fwd_sm89_f16_{tile}"), problem, L4, BUILD))


# ---- reasons -----------------------------------------------------------------------------------------------


def test_a_plain_row_lacks_each_feature_and_a_scored_one_none():
    for feature, words in FEATURES.items():
        problem = replace(PREFILL, features=(feature,))
        assert reasons(problem, "d64_m64n64w4") == f"has no {words}: that takes a scored row"
        assert reasons(problem, "d64_m64n64w4_scored") == "" and words in str(problem)


def test_reasons_of_scored_rows():
    tile, blocks = "d192v128_m64n32w4_scored", "takes block masks of blocks that are multiples of"
    for changes in ({"head_dim": 192, "head_dim_v": 128}, {"head_dim": 40}, {"alignment": 2}):
        assert reasons(replace(PREFILL, **changes), tile) == ""
    beyond = "made for head dims up to 192, 128 of value, and the tensors have 192"
    assert reasons(replace(PREFILL, head_dim=192), tile) == beyond
    blocked = replace(PREFILL, features=("block_mask",), block_mask=(64, 96))
    assert reasons(blocked, tile) == ""
    assert reasons(replace(blocked, block_mask=(96, 80)), tile) == f"{blocks} 64 x 32, and these are 96 x 80"
    assert reasons(blocked, "d64_m16n16w4k4_scored") == f"{blocks} 16 x 64, and these are 64 x 96"


#: Of each family features that its rows take, beside a window, and others of which each is a reason.
TAKES = {
    RANGED: ("prefix sinks varlen lengths pages cache_batch_idx leftpad", "mask bias softcap alibi dropout"),
    SCORE_MOD: ("softcap alibi dropout", "mask bias"),
    MASKED: ("mask bias", "softcap alibi dropout"),
}


@pytest.mark.parametrize("row", TAKES, ids=lambda row: row.family)
def test_what_rows_between_plain_and_scored_ones_take(row: Row):
    def why(*features: str, **changes: Any) -> str:
        asked = replace(PACKED, features=("window", *features), **changes)
        return "; ".join(eligibility.reasons(row, asked, L4, WITH_RANGED))

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


def test_reasons_against_rows_of_one_kind():
    by_tma = replace(RANGED, arch=90, copy="tma")
    for row, gpu, changes, expected in (
        (MASKED, L4, {"features": ("mask", "bias")}, "takes a mask or a bias, not both"),
        (MASKED, L4, {"features": ("mask",), "score_runs": False}, "reads a mask, or a bias of q's dtype, by 4 keys"),
        (by_tma, PRESETS["h200"], {"features": ("pages", "leftpad")}, "copies whole runs of a page's rows, which left"),
    ):
        (reason,) = eligibility.reasons(row, replace(PACKED, **changes), gpu, BUILD)
        assert reason.startswith(expected)


def test_masks_and_biases_that_masked_rows_can_read():
    """All dimensions may be broadcast but the keys'; rows begin at multiples of four keys."""
    q, k = torch.empty(2, 24, 4, 64, dtype=torch.float16), torch.empty(2, 40, 4, 64, dtype=torch.float16)
    buffer = torch.empty(2 * 4 * 24 * 64 + 8, dtype=torch.float16)

    def runs(name: str, x: torch.Tensor, k: torch.Tensor = k, **more: object) -> bool:
        x = x > 0 if name == "mask" and x.dtype != torch.bool else x
        return describe((q, k, k), "none", Features(**{name: x}, **more)).problem.score_runs

    whole = buffer[:-8].view(2, 4, 24, 64)
    as_bool = torch.empty(buffer.shape, dtype=torch.bool)[:-8].view(2, 4, 24, 64)
    for name, x in (("bias", whole), ("mask", as_bool)):
        forty, one = x[..., :40], x[..., :1]
        assert runs(name, forty) and runs(name, x[..., 4:44]) and runs(name, forty[:1].expand(2, -1, -1, -1))
        assert runs(name, forty[:1, :1]) and runs(name, forty[:, :, :1]) and runs(name, forty[0, 0, 0])
        assert runs(name, forty.transpose(0, 1).contiguous().transpose(0, 1))
        of_41 = x.reshape(2, 4, -1)[..., : 24 * 41].view(2, 4, 24, 41)[..., :40]
        for odd in (x[..., 2:42], x[..., 1:41], one, one.expand(-1, -1, -1, 40), forty.mT.contiguous().mT, of_41):
            assert not runs(name, odd)
        assert not any(runs(name, x[..., :keys], k[:, :keys]) for keys in (1, 17, 38))
        used = {"seqused_k": torch.zeros(2, dtype=torch.int32), "max_seqlen_k": 40}
        assert runs(name, forty, **used) and not runs(name, forty, **used, batch_invariant=True)
    assert not runs("bias", whole[..., :40].float())


# ---- how a scored row cuts a problem ----------------------------------------------------------------------


@pytest.mark.parametrize("seqlen_q", [1, 2, 16, 17, 64, 100, 1000])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_heads_are_packed_where_that_leaves_fewer_tiles(seqlen_q: int, group: int):
    problem = replace(PREFILL, seqlen_q=seqlen_q, num_heads=2 * group, num_heads_kv=2)
    for row in (TILE, FEW_QUERY):
        pack = blocks.packed_heads(row, problem)
        packed, apart = -(-seqlen_q * group // row.tile_m), -(-seqlen_q // row.tile_m) * group
        assert pack == (group if group > 1 and packed <= 0.9 * apart else 1)
        assert blocks.packed_heads(row, replace(problem, block_mask=(64, 64))) == 1
    assert blocks.packed_heads(BUILD.by_name("fwd_sm89_f16_d64_m64n64w4"), problem) == 1


@pytest.mark.parametrize("gpu", GPUS)
def test_keys_are_split_where_that_fills_the_gpu(gpu: str):
    many = PRESETS[gpu]
    places = many.sm_count * blocks.resident_blocks(OF_DECODING, many)
    for batch in (1, 3, 8, 40, 1000):
        splits, launched = blocks.split_keys(OF_DECODING, replace(DECODE, batch=batch), many), batch * 8
        assert 1 <= splits <= blocks.MAX_SPLITS
        assert splits == 1 or launched < 2 * places
        assert 4 * launched > places or (splits > 1 and launched * splits > 0.7 * many.sm_count)
    assert blocks.split_keys(OF_DECODING, replace(DECODE, num_splits=11), many) == 11
    assert blocks.split_keys(OF_DECODING, replace(DECODE, seqlen_k=20), many) == 1


# head_dim: what tells how many blocks an H200's SM holds, as of the manifest's few-query rows.
ON_AN_H200 = {
    64: {"tile_n": 32, "smem_bytes": 68_300, "min_blocks": 2},
    128: {"tile_n": 16, "smem_bytes": 70_350, "min_blocks": 3},
    256: {"tile_n": 16, "smem_bytes": 74_140, "min_blocks": 1, "warps": 2, "kv_warps": 2},
}


@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "keys", "head_dim", "splits"),
    [  # the fastest of several, timed on an H200
        (16, 32, 32, 2048, 128, 2), (32, 32, 32, 2048, 128, 1), (1, 32, 32, 32768, 128, 4),
        (1, 32, 8, 32768, 128, 16), (64, 32, 8, 4096, 64, 1), (32, 16, 16, 8192, 64, 1),
        (1, 8, 1, 16384, 256, 64), (32, 16, 16, 1024, 256, 2),
    ],
)  # fmt: skip
def test_parts_are_those_that_were_the_fastest(batch, heads, heads_kv, keys, head_dim, splits):
    shape = {"arch": 90, "head_dim": head_dim, "value_dim": head_dim}
    row = replace(FEW_QUERY, **shape, **ON_AN_H200[head_dim])
    problem = Problem(batch, 1, keys, heads, heads_kv, head_dim, "float16")
    assert blocks.resident_blocks(row, PRESETS["h200"]) == (2 if head_dim == 64 else 3)
    assert blocks.split_keys(row, problem, PRESETS["h200"]) == splits


def test_parts_need_a_bounded_workspace():
    for seqlen_q in (512, 64 * 1024):
        problem = Problem(1, seqlen_q, 2**20, 128, 128, 64, "float16")
        parts = blocks.split_keys(TILE, problem, replace(L4, sm_count=100_000))
        assert 4 * parts * seqlen_q * 128 * 64 <= blocks.MAX_PARTIAL_BYTES or parts == 1


def test_a_second_launch_has_its_price():
    prices = cost.RowCost(5.0, 0, 0, 0, 0.1, 0.1, 0.1, 0.1)
    once, twice = (cost.count(OF_DECODING, replace(DECODE, num_splits=n), L4, prices) for n in (1, 4))
    assert once is not None and twice is not None
    assert (once.launches, twice.launches) == (1, 2)
    assert twice.megabytes > once.megabytes and twice.steps < once.steps / 3


def test_a_window_shortens_the_walk():
    windowed = replace(PREFILL, causal="bottom-right", window=(256, -1), features=("window",))
    whole, part = (
        sum(group.blocks * group.steps for group in blocks.groups(TILE, problem, L4))
        for problem in (replace(windowed, window=(-1, -1)), windowed)
    )
    assert part < whole / 5
    assert windowed.visible_keys(1000, 1063) == (744, 1064)
    assert replace(windowed, causal="none", window=(-1, 7)).visible_keys(10, 20) == (0, 28)
    assert replace(windowed, seqlen_k=100).visible_keys(0, 10) == (0, 0)


# ---- the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS)
def test_plain_problems_but_long_decoding_keep_their_plain_rows(gpu: str):
    """What scored rows cost has no say, wherever a plain row takes the problem and it is no decoding."""
    free_fit = store.Fit(cost.RowCost(0.01, 0, 0, 0, 0, 0, 0, 0), 0, 0, 9)
    free = {row.name: free_fit for row in BUILD.rows if row.takes_features}
    own = store.for_device(PRESETS[gpu])
    tempted = replace(own, rows={**own.rows, **free})
    for seqlen_q, seqlen_k, alignment in (
        (4096, 4096, 16),
        (65, 100, 16),
        (64, 511, 16),
        (65, 8192, 16),
        (300, 300, 2),
    ):
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


def test_head_dims_that_nothing_else_has_take_the_scored_row_of_the_least_head_dims():
    for head_dim, head_dim_v, dims in ((40, None, "d64"), (72, None, "d128"), (192, 128, "d192v128"), (200, 8, "d256")):
        problem = replace(PREFILL, head_dim=head_dim, head_dim_v=head_dim_v)
        assert f"_{dims}_" in choose.choose(problem, L4, table=BUILD).name


def test_timings_without_scored_rows_judge_the_others():
    able = [row for row in PLAIN.rows if not eligibility.reasons(row, DECODE, L4, PLAIN)]
    rows = {row.name: RowTime(10.0, 10.0, 5) for row in able}
    (pick,) = verdict.judge([Sample(DECODE, rows)], L4, BUILD)
    assert pick.right and not BUILD.by_name(pick.row).scored
    split = choose.choose(DECODE, L4, table=BUILD).name
    (pick,) = verdict.judge([Sample(DECODE, {**rows, split: RowTime(5.0, 5.0, 5)})], L4, BUILD)
    assert pick.row == split


# ---- packed documents --------------------------------------------------------------------------------------


def test_documents_are_for_ranged_rows_and_dense_calls_are_not():
    def family(*features: str, **changes: Any) -> str:
        asked = replace(PACKED, features=features, **changes)
        return choose.choose(asked, L4, table=WITH_RANGED, calibration=store.default(L4)).family

    assert (family("varlen"), family(), family("varlen", "softcap")) == ("ranged", "plain", "score_mod")
    for feature in ("mask", "bias"):
        assert family("varlen", feature) == "masked"
        assert family("varlen", feature, score_runs=False) == "scored"
        assert family("varlen", feature, batch=1, seqlen_q=1, seqlen_k=16384) == "few_query_scored"


def test_their_keys_are_not_split():
    few = replace(PACKED, batch=1, seqlen_q=300, num_heads=1, num_heads_kv=1, seqlen_k=32768)
    assert blocks.split_keys(RANGED, few, L4) == 1  # type: ignore[arg-type]
    assert blocks.split_keys(BUILD.by_name("fwd_sm89_bf16_d128_m64n32w4_scored"), few, L4) > 1


def packed(lengths: list[int]) -> Problem:
    """The problem of documents of these lengths."""
    mean, longest = mean_length(sum(lengths), len(lengths), max(lengths)), max(lengths)
    return replace(PACKED, batch=len(lengths), seqlen_q=longest, seqlen_k=longest, mean=(mean, mean))


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("tile_m", [128, 256])
@pytest.mark.parametrize(
    ("shortest", "longest", "count"), [(1024, 1024, 16), (200, 300, 64), (40, 2900, 24), (4000, 7000, 3)]
)
def test_packed_documents_count_as_long_as_they_are(shortest: int, longest: int, count: int, tile_m: int, causal: str):
    """Not as long as the longest, by which there would be up to twice as many steps."""
    row = replace(RANGED, tile_m=tile_m)
    lengths = [shortest + (longest - shortest) * number // (count - 1) for number in range(count)]
    problem = replace(packed(lengths), causal=causal)
    found = blocks.groups(row, problem, L4)
    expected = [group for each in lengths for group in blocks.groups(row, replace(packed([each]), causal=causal), L4)]
    for name in ("block", "steps", "warp_steps"):
        total, exact = (sum(g.blocks * getattr(g, name) for g in groups) for groups in (found, expected))
        assert total == pytest.approx(exact, rel=0.12)
    assert problem.elements_written == pytest.approx(sum(lengths) * 16 * 128, rel=0.12)
    assert problem.elements_read == pytest.approx(3 * sum(lengths) * 16 * 128, rel=0.12)
    of_class = typical(problem)
    assert typical(of_class) == of_class
    assert of_class.mean[0] == pytest.approx(mean_length(sum(lengths), count, longest), rel=0.25)
    assert of_class.seqlen_q == pytest.approx(longest, rel=0.5)


def test_shapes_tell_how_long_documents_are_on_average():
    def mean(rows_q: int, rows_k: int, **more: bool) -> tuple[int, int]:
        q, k = (torch.empty(rows, 2, 64, dtype=torch.float16) for rows in (rows_q, rows_k))
        cu = torch.empty(5, dtype=torch.int32)
        features = Features(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=100, max_seqlen_k=300, **more)
        return describe((q, k, k), "bottom-right", features).problem.mean

    assert mean(400, 1100) == EVEN  # about as long as the longest
    assert mean(200, 301) == (50, 76)
    assert mean(0, 1) == (0, 1)
    assert mean(0, 0) == EVEN
    assert mean(200, 300, batch_invariant=True) == EVEN


def test_batches_of_like_documents_are_of_few_classes():
    """Each batch has another mean and another longest: rows are not compared anew for most."""
    generator, classes = random.Random(1), set()
    for _ in range(1000):
        lengths = [generator.randint(20, 400) for _ in range(generator.randint(15, 17))]
        classes.add(class_of(packed(lengths)))
    assert len(classes) <= 7


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_takes_a_shape(monkeypatch):
    monkeypatch.setattr(tables, "this_build", lambda: BUILD)
    shape = {"shape": (2, 1, 32, 128), "seqlen_k": 8192, "num_heads_kv": 8, "device": "h200"}
    found = cutlass_fmha.explain(**shape, page_size=64, num_splits=3, window=(-1, 0), features=("sinks",))
    p = found.problem
    assert (p.page_size, p.num_splits, p.causal) == (64, 3, "bottom-right")
    assert p.features == ("sinks", "pages", "splits") and found.winner.endswith("_scored")
    found = cutlass_fmha.explain(**shape, head_dim_v=64, block_size=(64, 64))
    assert found.problem.value_dim == 64 and found.problem.block_mask == (64, 64)
    plain = {"shape": (2, 8192, 16, 128), "seqlen_k": 100, "num_heads_kv": 4, "dtype": torch.float16}
    found = cutlass_fmha.explain(**plain, device="rtx5090")
    assert found.problem == Problem(2, 8192, 100, 16, 4, 128, "float16")
    assert found.winner.startswith("fwd_sm120_f16_d128")
    for said, device in (({"device": "cpu"}, None), ({"arch": 89, "sm_count": 30}, 30), ({"device": L4}, 58)):
        found = cutlass_fmha.explain(shape=(1, 1, 1, 64), **said).device
        assert (found and found.sm_count) == device
