"""What an UnsupportedError says of problems that nothing runs: it is short, and its advice works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import resources
from fake_build import GPUS, make_build
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutlass_fmha import cli
from cutlass_fmha.arguments import refusal
from cutlass_fmha.dispatch import choose, device, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import CAUSAL, FEATURES, Problem
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.errors import UnsupportedError

#: Ours where it has kernels: rows of all families are what users see.
OURS = replace(tables.this_build(), rows=resources.whole_table())
BUILDS = [make_build(), *([OURS] if OURS.rows else [])]
MOST_LINES, MOST_BYTES, MOST_BYTES_OF_A_SENTENCE = 15, 2500, 600


pytestmark = pytest.mark.usefixtures("hermetic")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Problems with features, of which few rows run any."""
    dim = st.one_of(st.sampled_from((64, 80, 320, 640)), st.integers(1, 2000))
    features = tuple(name for name in FEATURES if draw(st.integers(0, 2)) == 0)
    block = st.sampled_from((1, 16, 24, 64, 128))
    return Problem(
        draw(st.sampled_from((1, 99999))),
        *draw(st.tuples(*[st.sampled_from((1, 4096, 2**29))] * 2)),
        num_heads=32,
        num_heads_kv=8,
        head_dim=draw(dim),
        dtype=draw(st.sampled_from(("float16", "bfloat16", "float32"))),
        causal=draw(st.sampled_from(CAUSAL)),
        alignment=draw(st.sampled_from((1, 2, 4, 8, 16))),
        head_dim_v=draw(st.none() | dim),
        features=features,
        window=draw(st.sampled_from(((100, 7), (100, -1), (-1, 7)))) if "window" in features else (-1, -1),
        block_mask=(draw(block), draw(block)) if "block_mask" in features else None,
        page_size=16 if "pages" in features else 0,
        key_span=draw(st.sampled_from((0, 2**31))),
    )


@pytest.mark.parametrize("gpu", GPUS)
@settings(max_examples=40)
@given(problem=problems(), build=st.sampled_from(BUILDS))
def test_a_refusal_is_short_counts_every_row_and_its_advice_works(gpu: str, problem: Problem, build: Table):
    gpu = PRESETS[gpu]
    assume(not eligibility.eligible_rows(problem, gpu, build))
    with pytest.raises(UnsupportedError) as error:
        choose.choose(problem, gpu, table=build)
    text = str(error.value)
    first, *lines = text.split("\n")
    assert len(lines) < MOST_LINES and len(text.encode()) <= MOST_BYTES
    assert len(first) <= MOST_BYTES_OF_A_SENTENCE and str(problem) in first and str(gpu) in first
    # The nearest rows are of this architecture and dtype, their reasons the fewest there are.
    own = [row for row in build.rows if row.arch == device.own_arch(gpu) and row.dtype == problem.dtype]
    near = own or build.rows
    shown = [re.fullmatch(r"  (\S+?)(?: and (\d+) more)?: (.*)", line) for line in lines]
    nearest = [found for found in shown if found]
    names = [found[1] for found in nearest]
    assert names and all(name in {row.name for row in near} for name in names)
    count = {row.name: len(eligibility.reasons(row, problem, gpu, build)) for row in near}
    assert count[names[0]] == min(count.values())
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


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"head_dim": 320, "features": ("softcap",)}, "use head dims of at most 256"),
        ({"head_dim": 64, "features": ("block_mask",), "block_mask": (96, 96)}, "a block mask of .* 64 x 64"),
        ({"head_dim": 64, "dtype": "float32"}, "use float16; or use bfloat16"),
        ({"head_dim": 300, "dtype": "float32"}, "use head dims of at most 256 and use float16"),
        (
            {"head_dim": 64, "features": ("sinks", "block_mask"), "block_mask": (96, 96), "alignment": 1},
            "drop block mask and align pointers and strides to 16 bytes; or use",
        ),
        ({"head_dim": 64, "alignment": 1}, "align pointers and strides to 16 bytes"),
    ],
)
def test_advice(changes: dict, advice: str):
    problem = Problem(1, 128, 128, 8, 8, **{"dtype": "bfloat16", **changes})
    with pytest.raises(UnsupportedError, match=f"\nwhat to change: .*{advice}"):
        choose.choose(problem, PRESETS["rtx4090"], table=BUILDS[0])


def test_the_command_that_a_refusal_names_lists_every_row(capsys, monkeypatch):
    build = BUILDS[0]
    monkeypatch.setattr(tables, "this_build", lambda: build)
    with pytest.raises(UnsupportedError, match=r"all_rows=True; or `python -m .* explain` with --all$"):
        choose.choose(Problem(1, 128, 128, 8, 8, 320, "bfloat16", features=("softcap",)), PRESETS["l4"])
    arguments = ["explain", "--shape", "1,128,8,320", "--features", "softcap", "--device", "l4", "--all"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert all(f" {row.name} " in out for row in build.rows)
