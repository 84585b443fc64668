"""Selection: which row, for which reasons, at what predicted cost, and how it is told."""

import heapq
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import resources
import torch
from fake_build import L4, Row, make_build
from hypothesis import example, given
from hypothesis import strategies as st

import cutlass_fmha
from cutlass_fmha import cost
from cutlass_fmha.cost import datasheet, store
from cutlass_fmha.dispatch import blocks, choose, device, eligibility
from cutlass_fmha.dispatch import explain as explanation
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS, Device
from cutlass_fmha.dispatch.problem import CAUSAL, Problem, mask_diagonal
from cutlass_fmha.errors import UnsupportedError

BUILD = make_build()
PROBLEM = Problem(2, 4096, 4096, 16, 16, 64, "float16")
NAMES = ("a100", "rtx3090", "orin", "h200", "rtx5090", "gb10")
A100, RTX3090, ORIN, H200, RTX5090, SPARK = (PRESETS[name] for name in NAMES)
TURING, B200 = Device("NVIDIA T4", (7, 5), 40, 64 * 1024), Device("NVIDIA B200", (10, 0), 148, 227 * 1024)
BIG_TILE, TILE = (BUILD.by_name(f"fwd_sm89_f16_d64_{tile}") for tile in ("m256n64w8", "m64n64w4"))
ELEMENT, OF_90, OF_120 = f"{TILE.name}_element", "fwd_sm90_f16_d64_m64n64w4", "fwd_sm120_f16_d64_m64n64w4"
ALL, NO_90 = (89, 90, 120), (89, 120)
LARGE = Row(0, 120, "bfloat16", 128, 256, 64, 8, "tma", 98 * 1024, stages=1, q_in_registers=False, ping_pong=True)
SMALL = replace(LARGE, index=1, tile_m=64, tile_n=32, warps=4, smem_bytes=48 * 1024, min_blocks=2, ping_pong=False)
LONG = Problem(2, 8192, 8192, 16, 16, 128, "bfloat16")  # 1024 tiles: six waves on 170 SMs, and 4 tiles
pytestmark = pytest.mark.usefixtures("hermetic")


def eligible(problem: Problem, gpu: Device, build: tables.Table = BUILD) -> list[str]:
    return [row.name for row in build.rows if not eligibility.reasons(row, problem, gpu, build)]


@pytest.mark.parametrize(
    ("archs", "compiled_for", "gpu", "arch"),
    [
        (ALL, None, L4, 89), (ALL, None, B200, 89), (ALL, None, A100, 89), (ALL, None, ORIN, 89),
        (ALL, {90: "90a"}, H200, 90), (ALL, None, RTX5090, 120), (ALL, None, SPARK, 120), (ALL, None, TURING, None),
        # A build that lacks a GPU's own rows, or has them in code that it can't execute: what nvcc 12.8
        # compiles for rows by TMA, sm_120a, doesn't run on 12.1. Both have the PTX of sm_89.
        ((89,), None, H200, 89), ((89,), None, RTX5090, 89), ((90, 120), {90: "90a"}, L4, None),
        (NO_90, {120: "120f"}, SPARK, 120), (NO_90, {120: "120"}, SPARK, 120), (NO_90, {120: "120a"}, SPARK, 89),
        (NO_90, {120: "120a"}, RTX5090, 120), (NO_90, {120: "90a"}, RTX5090, 89),
    ],
)  # fmt: skip
def test_a_device_takes_its_own_rows_or_the_ptx_of_sm_89(archs, compiled_for: Any, gpu: Device, arch: int | None):
    build = make_build(archs, compiled_for)
    assert device.rows_arch(gpu, build.architectures) == arch
    assert {name[4:9].rstrip("_") for name in eligible(PROBLEM, gpu, build)} == ({f"sm{arch}"} if arch else set())
    assert arch is None or choose.choose(PROBLEM, gpu, table=build).arch == arch
    if arch == 89 and 120 in (compiled_for or ()):
        target, number = build.architectures[120], ".".join(map(str, gpu.capability))
        reason = f"compiled for sm_{target}, which a device of capability {number} can't execute"
        assert eligibility.reasons(build.by_name(OF_120), PROBLEM, gpu, build) == [reason]


def test_code_of_one_gpu_runs_on_others():
    """A cubin on later GPUs of its generation; on an SoC's and on other generations PTX."""
    for compiled_for, gpu, code in (
        ("89", A100, None), ("86", A100, None), ("80", A100, "sm_80"), ("80,89", RTX3090, "sm_80"),
        ("80,86,89", RTX3090, "sm_86"), ("80,86,89", L4, "sm_89"), ("80", L4, "sm_80"),
        ("80,89", ORIN, "compute_80"), ("89", ORIN, None), ("80,89", H200, "compute_80"),
        ("89", B200, "compute_89"), ("120f", SPARK, "sm_120f"),
    ):  # fmt: skip
        assert device.can_execute(compiled_for, gpu.capability) == (code is not None)
        assert code is None or device.code_for(compiled_for, gpu.capability) == code


def test_a_build_without_code_for_a_device_says_how_to_get_some():
    for gpu, compiled_for, sentence in (
        (SPARK, {120: "120a"}, r"sm_120 \(sm_120's compiled for sm_120a\) only, none .*nvcc 12.9"),
        (A100, {89: "89"}, r"sm_89 \(sm_89's compiled for sm_89\) only, none .*ARCHITECTURES=80`$"),
        (A100, {89: "86,89"}, r"compiled for sm_86 and sm_89\) only, none .*ARCHITECTURES=80`$"),
        (RTX3090, {90: "90a"}, r"rows for sm_90 only, none of .*ARCHITECTURES=86`$"),
        (TURING, {89: "80"}, "is older than every kernel of cutlass_fmha: .* 8.0 or newer is needed"),
        (L4, {90: "90a", 120: "120f"}, "holds rows for sm_90, sm_120 only, none of which NVIDIA L4"),
        (L4, {}, r"no CUDA kernels \(CUTLASS_FMHA_CUDA=OFF\): install a wheel with CUDA"),
    ):
        with pytest.raises(UnsupportedError, match=sentence) as error:
            choose.choose(PROBLEM, gpu, table=make_build(tuple(compiled_for), compiled_for))
        assert "\n" not in str(error.value)


def test_an_architecture_can_be_forced(monkeypatch):
    monkeypatch.setenv(device.FORCE_ARCH, "89")
    assert all("sm89" in name for name in eligible(PROBLEM, H200))
    monkeypatch.setenv(device.FORCE_ARCH, "120")
    with pytest.raises(UnsupportedError, match="FORCE_ARCH=120 asks for sm_120 rows.*rows for sm_89 only"):
        choose.choose(PROBLEM, RTX5090, table=make_build((89,)))
    # A proxy build runs them on sm_90 and nowhere else.
    proxy = make_build((120,), {120: "90a"})
    assert eligible(PROBLEM, H200, proxy)
    for gpu, build, code in ((H200, BUILD, "120, which a device of capability 9.0"), (RTX5090, proxy, "90a, which")):
        found = eligibility.reasons(build.by_name(OF_120), PROBLEM, gpu, build)
        assert not eligible(PROBLEM, gpu, build) and f"compiled for sm_{code}" in "; ".join(found)
    monkeypatch.setenv(device.FORCE_ARCH, "80")
    with pytest.raises(ValueError, match="CUTLASS_FMHA_FORCE_ARCH must be one of 89, 90, 120, got '80'"):
        eligible(PROBLEM, L4)


def test_each_reason_is_a_sentence_of_its_own():
    def reasons(gpu: Device = L4, **changes: Any) -> str:
        return "; ".join(eligibility.reasons(TILE, replace(PROBLEM, **changes), gpu, BUILD))

    small = replace(L4, smem_per_block=16 * 1024)
    assert reasons() == ""
    assert reasons(dtype="bfloat16") == "computes float16, and the tensors are bfloat16"
    assert reasons(head_dim=80) == "made for head_dim 64, and the tensors have 80"
    assert reasons(alignment=2) == "needs pointers and strides aligned to 16 bytes, and these are aligned to 2"
    assert reasons(PRESETS["rtx5080"]) == "made for sm_89, and this device takes the sm_120 rows"
    assert reasons(TURING) == "made for sm_89, and this device takes no row of this build"
    assert reasons(small) == "needs 24576 bytes of shared memory per block, and this device has 16384"
    assert reasons(TURING, dtype="float32", head_dim=256, alignment=4).count("; ") == 3
    # A row can be forced, or says why not.
    assert choose.choose(PROBLEM, L4, ELEMENT, BUILD).name == ELEMENT
    with pytest.raises(UnsupportedError, match=r"row fwd_sm90_\S+ can't run .* on NVIDIA L4.* made for sm_9"):
        choose.choose(PROBLEM, L4, OF_90, BUILD)
    refused = explanation.explain_problem(PROBLEM, L4, OF_90, BUILD)
    assert refused.winner is None and "made for sm_90" in refused.note


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("gpu", PRESETS)
def test_few_queries_take_a_few_query_row_and_a_large_problem_never_does(gpu: str, head_dim: int, causal: str):
    """Also by the default costs: a GPU that nobody measured has idle SMs just the same."""
    few = Problem(1, 256, 256, 8, 8, head_dim, "float16", causal)
    if gpu in ("rtx4090", "h200", "rtx5090"):
        default = store.default(PRESETS[gpu])
        assert choose.choose(few, PRESETS[gpu], table=BUILD, calibration=default).kv_warps > 1
    for batch, heads, seqlen in ((4, 32, 4096), (2, 16, 8192), (1, 32, 16384)):
        large = replace(few, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_heads_kv=heads)
        chosen = choose.choose(large, PRESETS[gpu], table=BUILD)
        assert chosen.kv_warps == 1
        # Elsewhere the smaller tile may fill its last wave better; at head dim 32 it is as fast on an H200, too.
        assert chosen.tile_m == 256 or head_dim == 32 or (gpu != "h200" and batch < 4)


def test_resident_blocks_are_limited_by_shared_memory_warps_and_registers():
    huge = {"smem_bytes": 100 * 1024}
    for row, changes, number in (
        *((BIG_TILE, {}, 1), (BIG_TILE, {"min_blocks": 2}, 2), (TILE, {}, 3), (TILE, {"smem_bytes": 60 * 1024}, 1)),
        *((TILE, huge, 0), (TILE, {"warps": 32, "tile_m": 512, "min_blocks": 2}, 1)),
    ):
        assert blocks.resident_blocks(replace(row, **changes), L4) == number
    assert choose.predicted_us(replace(TILE, **huge), PROBLEM, L4) == float("inf")
    assert choose.predicted_us(TILE, replace(PROBLEM, batch=0), L4) == 0
    # Of registers about as many as ptxas gives the manifest's rows for sm_90.
    by_warps = {"tile_m": 16, "copy": "ldg_16"}
    for registers, changes in {
        109: {"head_dim": 32},
        133: {"head_dim": 64},
        151: {"head_dim": 128, "tile_n": 32},
        208: {"head_dim": 192, "tile_n": 32},
        255: {"head_dim": 128, "tile_m": 256, "warps": 8, "q_in_registers": False},
        181: {"head_dim": 64, "tile_n": 32, "kv_warps": 4, **by_warps},
        213: {"head_dim": 128, "tile_n": 16, "warps": 8, "kv_warps": 8, **by_warps},
    }.items():
        assert blocks.registers(replace(TILE, **changes)) == pytest.approx(registers, abs=12)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", ["m64n64w4", "m256n64w8", "m32n32w8k8"])
def test_blocks_of_a_launch_are_those_of_the_mask(name: str, causal: str):
    row = BUILD.by_name(f"fwd_sm89_f16_d64_{name}")
    rows, groups = row.tile_m * row.kv_warps // row.warps, row.warps // row.kv_warps
    for seqlen_q, keys in ((1, 1), (200, 70), (70, 200), (1000, 1000), (300, 0), (9000, 9000), (6400, 5)):
        problem = replace(PROBLEM, causal=causal, seqlen_q=seqlen_q, seqlen_k=keys)
        seen = [keys if problem.diagonal is None else i + problem.diagonal + 1 for i in range(seqlen_q)]
        key_tiles = [-(-max(0, min(keys, count)) // row.tile_n) for count in seen]
        expected = []  # of one sequence, last tile first
        for begin in range((seqlen_q - 1) // row.tile_m * row.tile_m, -1, -row.tile_m):
            tile = key_tiles[begin : begin + row.tile_m]
            warps = [max(tile[i : i + rows]) for i in range(0, len(tile), rows)]
            launched = (1 if max(tile) else blocks.EMPTY_BLOCK) * len(warps) / groups
            expected.append((-(-max(tile) // row.kv_warps), launched, sum(warps) / row.kv_warps / groups))
        found = blocks.groups(row, problem, L4)
        sequences = problem.batch * problem.num_heads
        assert sum(group.blocks for group in found) == len(expected) * sequences
        assert found[0].steps == pytest.approx(max(steps for steps, _, _ in expected), rel=0.05)
        # Neighbouring tiles may be played as one, and a block's warps see what the middle one sees.
        for name, exact in zip(("steps", "warp_block", "warp_steps"), zip(*expected, strict=True), strict=True):
            total = sum(getattr(group, name) * group.blocks for group in found) / sequences
            assert total == pytest.approx(sum(exact), rel=0.03, abs=0.6 * len(found))


def fill(free: list[float], durations: list[float]) -> float:
    """When the last block ends, of which each goes to the place that is free first. free: from when each is."""
    heapq.heapify(free)
    for us in durations:
        heapq.heapreplace(free, free[0] + us)
    return max(free)


def busiest(durations: list[float], sms: int, resident: int, even: bool) -> float:
    """Work of the SM that has the most, where the first blocks are dealt out in turns."""
    places = sms * resident
    if not even or len(durations) <= places:
        dealt = [sum(durations[sm:places:sms]) for sm in range(sms)]
        return fill(dealt, durations[places:])
    before = (len(durations) - 1) // places * places
    one_each, all_places = fill([0.0] * sms, durations[before:]), sum(durations[before : before + resident])
    return sum(durations[:before:sms]) + (one_each + all_places) / 2


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("shape", [(1, 8, 300), (1, 12, 500), (2, 12, 1024), (3, 16, 2000), (8, 16, 4096)])
def test_waiting_and_work_are_those_of_blocks_that_go_where_there_is_room(shape: tuple[int, ...], causal: str):
    batch, heads, seqlen = shape
    problem = Problem(batch, seqlen, seqlen, heads, heads, 64, "float16", causal)
    prices = cost.RowCost(0, 0, 0, 0, 2.0, 0.5, 1.0, 0.4, resident=3)
    counts = cost.count(TILE, problem, L4, prices)
    assert counts is not None
    launched = [group for group in blocks.groups(TILE, problem, L4) for _ in range(group.blocks)]
    waiting = fill([0.0] * 3 * L4.sm_count, [2.0 * group.block + 0.5 * group.steps for group in launched])
    durations = [group.warp_block + 0.4 * group.warp_steps for group in launched]
    work = busiest(durations, L4.sm_count, 3, even=causal == "none")
    assert prices.waiting(counts) == pytest.approx(waiting, rel=0.04)
    assert prices.work(counts) == pytest.approx(work, rel=0.04)
    assert prices.of(counts) == pytest.approx(math.hypot(waiting, work), rel=0.04)


@pytest.mark.parametrize("left", [0, 1, 57])
def test_a_launch_takes_no_less_than_the_memory_does(left: int):
    """And what a last wave takes besides, which is too small to keep the memory busy."""
    heads = 2 * 58 + left
    problem = Problem(1, 64, 6400, heads, heads, 64, "float16")
    prices = cost.RowCost(3.0, 2.0, 0, 0, 1.0, 0.5, 0, 0, memory=1.5)
    megabytes = heads * 2 * (64 + 6400) * 64 * 2 / 1e6
    last = max(0.0, 1.0 + 0.5 * 100 - 1.5 * megabytes * left / heads) if left else 0.0
    priced = cost.Priced(TILE, L4, prices)
    assert (counts := priced.counts(problem)) is not None
    assert priced.us(problem) == pytest.approx(5.0 + 1.5 * megabytes + last + 0.01 * prices.of(counts))
    assert priced.at_least(problem) == pytest.approx(5.0 + 1.5 * megabytes)
    assert prices.scaled(2.0).memory == prices.memory
    slow = replace(prices, step=50.0)
    assert cost.predict(TILE, problem, L4, slow) == cost.predict(TILE, problem, L4, replace(slow, memory=0.0))


def test_a_row_for_any_alignment_is_the_last_resort():
    """Its prediction may err, but with aligned operands it has never been the fastest."""
    cheap = cost.RowCost(0.1, 0, 0, 0, 0, 0, 0, 0)
    fitted = replace(store.default(L4), rows={ELEMENT: store.Fit(cheap, 0, 0, 9)})
    assert choose.choose(PROBLEM, L4, table=BUILD, calibration=fitted).name != ELEMENT
    unaligned = replace(PROBLEM, alignment=2)
    assert [name for name in eligible(unaligned, L4) if not name.endswith("_scored")] == [ELEMENT]
    assert {choose.choose(unaligned, L4, None, BUILD, costs).name for costs in (None, fitted)} == {ELEMENT}
    assert eligible(replace(PROBLEM, alignment=1), L4) == []


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 200), st.just(10**9) | st.integers(1, 1000))
@example(1024, 128, 170, 40)
def test_a_division_is_one_that_pays_and_has_memory(tiles, steps, places, most):
    if (tail := blocks._tail(tiles, steps, places, most)) is None:
        return
    last, others = tail.tiles, steps - tail.first - (tail.parts - 2) * tail.rest
    assert last == tiles % places and last * tail.parts <= most
    assert tail.first > 0 and 0 < others <= tail.rest
    parts = [tail.first] * last + ([tail.rest] * (tail.parts - 2) + [others]) * last
    ended = fill([0] * places, [length + blocks.BLOCK_STEPS for length in [steps] * (tiles - last) + parts])
    whole = -(-tiles // places) * (steps + blocks.BLOCK_STEPS)
    assert ended + blocks.COMBINE_STEPS <= blocks.WORTH_A_TAIL * whole


def test_the_cost_model_sees_a_tails_blocks_and_its_second_launch():
    assert blocks.tail_of(LARGE, LONG, RTX5090) == blocks.Tail(4, 16, 8, 8)
    found = blocks.groups(LARGE, LONG, RTX5090)
    assert [(group.blocks, group.steps) for group in found] == [(1020, 128), (4, 8), (60, 8)]
    price = datasheet.row_cost(LARGE, RTX5090)
    counts = cost.count(LARGE, LONG, RTX5090, price)
    assert counts is not None and counts.launches == 2 and counts.steps == 6 * 128 + 8
    undivided = cost.count(replace(LARGE, copy="cp_async_16"), LONG, RTX5090, price)
    assert undivided is not None and price.of(counts) < 0.9 * price.of(undivided)
    whole = cost.count(replace(LARGE, arch=89), Problem(1, 1024, 4096, 8, 8, 128, "bfloat16"), L4, price)
    assert whole is not None and whole.steps < 64  # where all tiles are divided, no block walks all keys
    for row in (replace(LARGE, copy="cp_async_16"), SMALL):  # of which two blocks share an SM
        assert blocks.tail_of(row, LONG, RTX5090) is None
    # Of 170 sequences no wave is cut short.
    for changes in ({"causal": "bottom-right"}, {"batch": 0}, {"seqlen_k": 0}, {"seqlen_k": 64}, {"batch": 170}):
        assert blocks.tail_of(LARGE, replace(LONG, **changes), RTX5090) is None


def test_a_dropped_diagonal_hides_nothing():
    for causal, seqlen_q, seqlen_k in itertools.product(CAUSAL, (0, 1, 2, 5, 9), (0, 1, 5, 8)):
        diagonal, mask = mask_diagonal(causal, seqlen_q, seqlen_k), torch.ones(seqlen_q, seqlen_k)
        expected = mask.tril({"none": 99, "top-left": 0, "bottom-right": seqlen_k - seqlen_q}[causal])
        assert torch.equal(mask if diagonal is None else mask.tril(diagonal), expected)
        if causal == "none" or (causal == "bottom-right" and seqlen_q == 1):
            assert diagonal is None  # decoding takes the unmasked path


def test_an_explanation_has_every_row_the_winner_first_and_a_line_for_each_kind_of_irrelevant_ones():
    found = explanation.explain_problem(PROBLEM, L4, table=BUILD)
    assert len(found.rows) == len(BUILD.rows)
    assert found.winner == choose.choose(PROBLEM, L4, table=BUILD).name == found.rows[0].row.name
    able = [row for row in found.rows if row.eligible]
    plain = [row.predicted_us for row in able if not row.row.takes_features]
    assert plain == sorted(plain) and len(plain) == 6 and len(able) == 12
    last = [row for row in able if not row.contender]
    assert found.rows[0].contender and [x.row.name for x in last if not x.row.takes_features] == [ELEMENT]
    assert str(found).count("eligible, as a last resort") == len(last) == 7
    text, whole = str(found), str(replace(found, all_rows=True))
    for row in found.rows:
        assert row.eligible or (row.predicted_us is None and row.reasons)
        assert not row.eligible or row.irrelevance is None
        assert row.row.name in whole and all(reason in whole for reason in row.reasons)
        assert (f" {row.row.name} " in text) == (row.irrelevance is None)
    for each in (text, whole):
        assert f"> {found.winner}" in each and each.count(">") == 1
        assert each.endswith(f"runs: {found.winner}, the cheapest eligible row by predicted cost")
    for line in (
        "9 rows for other head dims: 32 (4), 128 (5)",
        "21 rows for another dtype: bfloat16 (21)",
        "84 rows for another architecture: sm_90 (42), sm_120 (42)",
        "(all_rows=True, or --all, lists them)",
    ):
        assert text.count(f"\n  {line}\n") == 1
    of_none = str(explanation.explain_problem(PROBLEM, None, table=BUILD))
    assert "\n  126 rows for CUDA devices: sm_89 (42), sm_90 (42), sm_120 (42)\n" in of_none


def test_explain_takes_tensors_as_attention_does_or_a_shape(monkeypatch):
    monkeypatch.setattr(tables, "this_build", lambda: BUILD)
    q = torch.empty(2, 16, 300, 64, dtype=torch.float16)
    k = v = torch.empty(2, 4, 500, 64, dtype=torch.float16)
    found = cutlass_fmha.explain(q, k, v, causal=True, layout="bhsd", scale=0.1, return_lse=True, device="l4")
    assert found.problem == Problem(2, 300, 500, 16, 4, 64, "float16", "bottom-right", 16) and found.device == L4
    found = cutlass_fmha.explain(q, k, v[..., :32], layout="bhsd")
    assert found.device is None and found.problem.head_dim_v == 32  # as the tensors are
    said = {"window": (100, 0), "softcap": 5.0, "sinks": torch.zeros(16)}
    found = cutlass_fmha.explain(q, k, v, layout="bhsd", device="l4", **said)
    assert found.problem.features == tuple(said) and found.problem.window == (100, 0)
    assert found.problem.seqlen_q == 300 and found.winner.endswith("_scored")
    assert "has no sliding window, no softcap, no sinks: that takes a scored row" in str(found)
    odd = torch.empty(2, 300, 16, 65, dtype=torch.float16)[..., :64]
    assert cutlass_fmha.explain(odd, odd, odd, arch=89).winner.endswith("_element")
    shape = {"shape": (2, 1, 32, 128), "seqlen_k": 8192, "num_heads_kv": 8, "device": "h200"}
    found = cutlass_fmha.explain(**shape, page_size=64, num_splits=3, window=(-1, 0), features=("sinks",))
    p = found.problem
    assert (p.page_size, p.num_splits, p.causal) == (64, 3, "bottom-right")
    assert p.features == ("sinks", "pages", "splits") and found.winner.endswith("_scored")
    p = cutlass_fmha.explain(**shape, head_dim_v=64, block_size=(64, 64)).problem
    assert p.value_dim == 64 and p.block_mask == (64, 64)
    plain = {"shape": (2, 8192, 16, 128), "seqlen_k": 100, "num_heads_kv": 4, "dtype": torch.float16}
    found = cutlass_fmha.explain(**plain, device="rtx5090")
    assert found.problem == Problem(2, 8192, 100, 16, 4, 128, "float16")
    assert found.winner.startswith("fwd_sm120_f16_d128")
    for said, sms in (({"device": "cpu"}, None), ({"arch": 89, "sm_count": 30}, 30), ({"device": L4}, 58)):
        gpu = cutlass_fmha.explain(shape=(1, 1, 1, 64), **said).device
        assert (gpu and gpu.sm_count) == sms


def test_devices_have_names():
    for name, preset in {
        "L40S": "l40s", "RTX 4090": "rtx4090", "rtx-5090": "rtx5090", "RTX PRO 6000": "rtxpro6000", "sm_120": "rtx5090",
        "A100 40GB": "a10040gb", "sm_86": "rtx3090", "90": "h200",
    }.items():  # fmt: skip
        assert device.named(name) is PRESETS[preset]
    assert (device.named("sm_89:58").sm_count, device.named("sm_89:58").capability) == (58, (8, 9))


def test_every_row_runs_something_on_its_architecture(monkeypatch):
    """Of this build, and of the whole table, of which this build may be a subset."""
    build = replace(tables.this_build(), rows=resources.whole_table())
    assert {row.name for row in tables.this_build().rows} <= {row.name for row in build.rows}
    asked = {"score_mod": ("softcap",), "masked": ("mask",)}
    for row in build.rows:
        monkeypatch.setenv(device.FORCE_ARCH, str(row.arch))
        gpu = device.of_arch(int(build.architectures[row.arch].partition(",")[0].rstrip("af")))
        dims, features = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v}, asked.get(row.family, ())
        problem = Problem(1, 128, 128, 8, 8, **dims, dtype=row.dtype, alignment=row.alignment, features=features)
        assert eligibility.reasons(row, problem, gpu, build) == []
        assert 0 < choose.predicted_us(row, problem, gpu) < 1e4
