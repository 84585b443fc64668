"""Selection among drawn problems: what is looked up, what a class of lengths has in common, what is refused and how."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest
import resources
from fake_build import GPUS, make_build
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cutlass_fmha import cli
from cutlass_fmha.arguments import refusal
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import choose, device, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import CAUSAL, EVEN, FEATURES, MAX_KEY_SPAN, Problem, typical
from cutlass_fmha.errors import UnsupportedError

#: Ours where it has kernels: rows of all families are what users see.
OURS = replace(tables.this_build(), rows=resources.whole_table())
BUILDS = [make_build(), *([OURS] if OURS.rows else [])]
MOST_LINES, MOST_BYTES, MOST_BYTES_OF_A_SENTENCE = 15, 2500, 600
pytestmark = pytest.mark.usefixtures("hermetic")


@st.composite
def problems(draw: st.DrawFn, many: bool = False) -> Problem:
    """Windows, blocks, pages and lengths of documents are features; with ``many`` of them at once few rows run any."""
    dim = st.sampled_from((64, 80, 320, 640)) | st.integers(1, 2000) if many else st.sampled_from((40, 64, 128, 320))
    names = draw(st.lists(st.sampled_from(tuple(FEATURES)), max_size=len(FEATURES) if many else 2, unique=True))
    block = st.sampled_from((1, 16, 24, 64, 128))
    windows = st.sampled_from(((100, 0), (700, 2000), (100, -1), (-1, 7), (-1, 300)))
    long = st.sampled_from((1, 4096, 2**29))
    seqlen_q, seqlen_k = draw(long if many else st.integers(0, 9000)), draw(long if many else st.integers(0, 40000))
    mean_q, mean_k = draw(st.sampled_from((EVEN, (1, 1), (0, 7)))) if "varlen" in names else EVEN  # of 3 and of 9
    return Problem(
        draw(st.sampled_from((1, 3, 16, 99999))),
        seqlen_q,
        seqlen_k,
        num_heads=draw(st.sampled_from((8, 32))),
        num_heads_kv=draw(st.sampled_from((2, 8))),
        head_dim=draw(dim),
        dtype=draw(st.sampled_from(("float16", "bfloat16", "float32"))),
        causal=draw(st.sampled_from(CAUSAL)),
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
def test_a_choice_is_of_rows_without_a_reason_that_of_its_class_of_lengths_and_costs_little(problem, gpu):
    build, known = tables.this_build(), store.for_device(gpu)
    eligible = eligibility.eligible_rows(problem, gpu, build)
    assert eligible == [row for row in build.rows if not eligibility.reasons(row, problem, gpu, build)]
    if not eligible:
        return
    chosen = choose.choose(problem, gpu)
    assert chosen in eligible
    of_class = typical(problem)
    assert typical(of_class) == of_class
    assert of_class.is_decode != problem.is_decode or choose.choose(of_class, gpu) is chosen
    if problem.mean == EVEN:
        assert problem.seqlen_k <= of_class.seqlen_k <= problem.seqlen_k * 17 / 16
    asked = choose.contenders(eligible, problem)
    prices = {row.name: choose.price(row, of_class, gpu, known) for row in asked}
    assert prices[chosen.name] == min(prices.values())


@given(problems(), gpus)
@example(Problem(1, 2753, 225, 8, 2, 40, "float16", "bottom-right", 2), PRESETS["l4"])  # few tiles see a key
@example(Problem(1, 307, 1, 32, 2, 64, "float16", "bottom-right", 2), PRESETS["l4"])
@example(Problem(3, 65, 5807, 8, 8, 64, "float16", "bottom-right", 2, features=("bias",)), PRESETS["h200"])
@example(Problem(6, 1039, 1039, 4, 4, 128, "bfloat16", "top-left"), PRESETS["h200"])
@example(Problem(8, 3000, 3000, 8, 8, 64, "float16", features=("window",), window=(100, 0)), PRESETS["l4"])
def test_a_launch_costs_no_less_than_its_bounds(problem, gpu):
    """Rows whose bound is above another's price are never played through."""
    build, known = tables.this_build(), store.for_device(gpu)
    for row in eligibility.eligible_rows(problem, gpu, build):
        offers = eligibility.family(row).offers(row, problem, gpu, known)
        assert 0 <= offers.at_least(problem) <= offers.us(problem)


def test_a_length_never_seen_before_is_priced_only_where_its_class_is_new(monkeypatch):
    priced = mock.Mock(wraps=choose.cheapest)
    monkeypatch.setattr(choose, "cheapest", priced)
    for length in range(60001, 60001 + 4000):
        choose.choose(Problem(2, length, length, 16, 16, 128, "bfloat16", "bottom-right"), PRESETS["h200"])
    assert 1 <= priced.call_count <= 3


# ---- refusals --------------------------------------------------------------------------------------------


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


def test_advice():
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
            choose.choose(asked, PRESETS["rtx4090"], table=BUILDS[0])


def test_the_command_that_a_refusal_names_lists_every_row(capsys, monkeypatch):
    monkeypatch.setattr(tables, "this_build", lambda: BUILDS[0])
    with pytest.raises(UnsupportedError, match=r"all_rows=True; or `python -m .* explain` with --all$"):
        choose.choose(Problem(1, 128, 128, 8, 8, 320, "bfloat16", features=("softcap",)), PRESETS["l4"])
    assert cli.main(["explain", "--shape", "1,128,8,320", "--features", "softcap", "--device", "l4", "--all"]) == 1
    out = capsys.readouterr().out
    assert all(f" {row.name} " in out for row in BUILDS[0].rows)
