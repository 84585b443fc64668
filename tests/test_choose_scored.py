"""Selection among plain and scored rows: reasons, how a scored row cuts a problem, which one is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_build import GPUS, L4, make_build

import cutlass_fmha
from cutlass_fmha import cost
from cutlass_fmha.calibrate import verdict
from cutlass_fmha.calibrate.measurements import Sample
from cutlass_fmha.calibrate.timing import RowTime
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import blocks, choose, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.families import scored
from cutlass_fmha.dispatch.problem import FEATURES, Problem
from cutlass_fmha.dispatch.table import Table

BUILD = make_build()
PLAIN = Table(tuple(row for row in BUILD.rows if not row.takes_features))
PREFILL = Problem(2, 4096, 4096, 16, 16, 64, "float16")
DECODE = Problem(1, 1, 16384, 32, 8, 128, "float16")
TILE, FEW_QUERY = (BUILD.by_name(f"fwd_sm89_f16_d64_{tile}_scored") for tile in ("m64n64w4", "m16n16w4k4"))


pytestmark = pytest.mark.usefixtures("hermetic")


def reasons(problem: Problem, name: str) -> list[str]:
    return eligibility.reasons(BUILD.by_name(name), problem, L4, BUILD)


# ---- reasons -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plain_row_lacks_each_feature_and_a_scored_one_none(feature: str):
    problem = replace(PREFILL, features=(feature,))
    why = [f"has no {FEATURES[feature]}: that takes a scored row"]
    assert reasons(problem, "fwd_sm89_f16_d64_m64n64w4") == why
    assert reasons(problem, "fwd_sm89_f16_d64_m64n64w4_scored") == []
    assert FEATURES[feature] in str(problem)


def test_reasons_of_scored_rows():
    name = "fwd_sm89_f16_d192v128_m64n32w4_scored"
    assert reasons(replace(PREFILL, head_dim=192, head_dim_v=128), name) == []
    assert reasons(replace(PREFILL, head_dim=40), name) == []
    assert reasons(replace(PREFILL, head_dim=192), name) == [
        "made for head dims up to 192, 128 of value, and the tensors have 192"
    ]
    assert reasons(replace(PREFILL, alignment=2), name) == []
    blocked = replace(PREFILL, features=("block_mask",), block_mask=(64, 96))
    assert reasons(blocked, name) == []
    assert reasons(replace(blocked, block_mask=(96, 80)), name) == [
        "takes block masks of blocks that are multiples of 64 x 32, and these are 96 x 80"
    ]
    split = reasons(blocked, "fwd_sm89_f16_d64_m16n16w4k4_scored")
    assert split == ["takes block masks of blocks that are multiples of 16 x 64, and these are 64 x 96"]


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
    row = next(row for row in BUILD.rows if row.name.endswith("f16_d128_m16n16w4k4_scored"))
    places = many.sm_count * blocks.resident_blocks(row, many)
    for batch in (1, 3, 8, 40, 1000):
        problem = replace(DECODE, batch=batch)
        splits = blocks.split_keys(row, problem, many)
        launched = batch * 8
        assert 1 <= splits <= blocks.MAX_SPLITS
        if launched >= 2 * places:
            assert splits == 1
        elif 4 * launched <= places:
            assert splits > 1 and launched * splits > 0.7 * many.sm_count
    assert blocks.split_keys(row, replace(DECODE, num_splits=11), many) == 11
    assert blocks.split_keys(row, replace(DECODE, seqlen_k=20), many) == 1


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
    problem = Problem(1, 512, 2**20, 128, 128, 64, "float16")
    limited = replace(problem, seqlen_q=64 * 1024)
    for each in (problem, limited):
        parts = blocks.split_keys(TILE, each, replace(L4, sm_count=100_000))
        assert 4 * parts * each.seqlen_q * each.num_heads * 64 <= blocks.MAX_PARTIAL_BYTES or parts == 1


def test_a_second_launch_has_its_price():
    row = next(row for row in BUILD.rows if row.name.endswith("sm89_f16_d128_m16n16w4k4_scored"))
    prices = cost.RowCost(5.0, 0, 0, 0, 0.1, 0.1, 0.1, 0.1)
    once = cost.count(row, replace(DECODE, num_splits=1), L4, prices)
    twice = cost.count(row, replace(DECODE, num_splits=4), L4, prices)
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
def test_plain_problems_keep_their_plain_rows(gpu: str):
    """What scored rows cost has no say, wherever a plain row takes the problem and it is no decoding."""
    free_fit = store.Fit(cost.RowCost(0.01, 0, 0, 0, 0, 0, 0, 0), 0, 0, 9)
    free = {row.name: free_fit for row in BUILD.rows if row.takes_features}
    tempted = replace(store.for_device(PRESETS[gpu]), rows={**store.for_device(PRESETS[gpu]).rows, **free})
    lengths = ((4096, 4096, 16), (65, 100, 16), (64, 511, 16), (65, 8192, 16), (300, 300, 2))
    for seqlen_q, seqlen_k, alignment in lengths:
        problem = Problem(2, seqlen_q, seqlen_k, 8, 8, 64, "float16", alignment=alignment)
        assert not problem.is_decode
        chosen = choose.choose(problem, PRESETS[gpu], table=BUILD, calibration=tempted)
        assert chosen.name == choose.choose(problem, PRESETS[gpu], table=PLAIN).name


@pytest.mark.parametrize("gpu", GPUS)
def test_long_decoding_takes_a_scored_row_and_short_does_not(gpu: str):
    default = store.default(PRESETS[gpu])  # a shipped file has timings of some of these rows only
    assert choose.choose(DECODE, PRESETS[gpu], table=BUILD, calibration=default).takes_features
    full = Problem(64, 1, 512, 32, 32, 128, "float16")
    assert not choose.choose(full, PRESETS[gpu], table=BUILD, calibration=default).takes_features


def test_a_row_that_nobody_timed_has_to_be_clearly_better():
    default = store.default(L4)
    split, plain = (choose.choose(DECODE, L4, table=build, calibration=default) for build in (BUILD, PLAIN))
    best = cost.predict(split, DECODE, L4, default.cost(split, L4))

    def known(us: float, *rows) -> store.Calibration:
        fits = {row.name: store.Fit(cost.RowCost(us, 0, 0, 0, 0, 0, 0, 0), 0, 0, 9) for row in rows}
        return replace(default, rows=fits)

    for factor, taken in ((1.2, False), (1.3, True)):
        given = known(factor * best, *(row for row in PLAIN.rows))
        assert choose.choose(DECODE, L4, table=BUILD, calibration=given).scored is taken
    assert choose.price(split, DECODE, L4, default) == pytest.approx(scored.UNTIMED * best)
    assert choose.price(split, replace(DECODE, features=("sinks",)), L4, default) == pytest.approx(best)
    assert choose.price(plain, DECODE, L4, default) == choose.predicted_us(plain, DECODE, L4, default)


def test_head_dims_that_nothing_else_has_take_the_scored_row_of_the_least_head_dims():
    cases = ((40, None, "d64"), (72, None, "d128"), (192, 128, "d192v128"), (200, 8, "d256"))
    for head_dim, head_dim_v, dims in cases:
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


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_takes_a_shape(monkeypatch):
    monkeypatch.setattr(tables, "this_build", lambda: BUILD)
    shape = {"shape": (2, 1, 32, 128), "seqlen_k": 8192, "num_heads_kv": 8, "device": "h200"}
    found = cutlass_fmha.explain(**shape, page_size=64, num_splits=3, window=(-1, 0), features=("sinks",))
    assert found.problem.features == ("sinks", "pages", "splits")
    p = found.problem
    assert (p.page_size, p.num_splits, p.causal) == (64, 3, "bottom-right")
    assert found.winner.endswith("_scored")
    found = cutlass_fmha.explain(**shape, head_dim_v=64, block_size=(64, 64))
    assert found.problem.value_dim == 64 and found.problem.block_mask == (64, 64)
    plain = {"shape": (2, 8192, 16, 128), "seqlen_k": 100, "num_heads_kv": 4, "device": "rtx5090"}
    found = cutlass_fmha.explain(**plain, dtype=torch.float16)
    assert found.problem == Problem(2, 8192, 100, 16, 4, 128, "float16")
    assert found.winner.startswith("fwd_sm120_f16_d128")
    assert cutlass_fmha.explain(shape=(1, 1, 1, 64), device="cpu").device is None
    assert cutlass_fmha.explain(shape=(1, 1, 1, 64), arch=89, sm_count=58).device.sm_count == 58
    assert cutlass_fmha.explain(shape=(1, 1, 1, 64), device=L4).device is L4
