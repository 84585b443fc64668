"""tools/tune.py's arithmetic: the space of candidates, the search, the acceptance rule, the manifest."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from building import find_program
from tuning import manifest, search, space
from tuning.candidate import COLUMNS, DTYPES, Candidate
from tuning.leaderboard import Sighting
from tuning.manifest import Line, ManifestError
from tuning.space import Limits, Space
from tuning.targets import make_targets, parse_shape

from cutlass_fmha import _C, select

ROOT = Path(__file__).resolve().parents[1]
LINES = manifest.read()
LARGE = Candidate(64, 256, 64, 8, 1, 2, 1, True, True, "cp_async_16")
SPLIT = Candidate(128, 32, 32, 8, 4, 1, 1, True, False, "ldg_16")


# ---- candidates and the space ------------------------------------------------------------------------------


def test_a_candidate_survives_its_spelling():
    for line in LINES:
        assert Candidate.of_key(line.candidate.key) == line.candidate
    tags = {line.candidate.tag for line in LINES}
    assert len(tags) == len({line.candidate for line in LINES})
    assert all(tag.isidentifier() for tag in tags)


@pytest.mark.parametrize(
    "key", ["64 256 64", "64 256 64 8 1 2 1 True true cp_async_16", "64 0 64 8 1 2 1 true true x"]
)
def test_what_is_no_candidate_is_refused(key: str):
    with pytest.raises(ValueError, match="columns|must be"):
        Candidate.of_key(key)


def test_every_row_of_the_manifest_is_in_the_space():
    assert LINES
    for line, arch in ((each, arch) for each in LINES for arch in each.archs):
        assert space.objections(line.candidate, arch, Limits()) == [], (arch, line.candidate)
        assert line.candidate in Space(arch, line.candidate.head_dim)


def test_every_row_that_is_searched_for_can_be_drawn():
    """The domains hold the manifest's values, so that the search can find what is in it."""
    for arch, dim in {(arch, line.candidate.head_dim) for line in LINES for arch in line.archs}:
        drawn = set(Space(arch, dim).all)
        rows = manifest.candidates_of(LINES, arch, dim, DTYPES.values())
        assert {row for row in rows if row.copy != "element"} <= drawn


def test_shared_memory_is_computed_as_the_kernels_do():
    rows = [row for row in _C.templates() if row.family in select.PLAIN]
    assert rows, (
        "this build has no CUDA kernels to compare with: build with CUTLASS_FMHA_CUDA=ON, as make does"
    )
    for row in rows:
        candidate = Candidate(**{name: getattr(row, name) for name in COLUMNS})
        assert space.shared_bytes(candidate) == row.smem_bytes, row.name


def test_the_manifest_is_read_as_it_was_built():
    rows = [row for row in _C.templates() if row.family in select.PLAIN]
    assert rows, (
        "this build has no CUDA kernels to compare with: build with CUTLASS_FMHA_CUDA=ON, as make does"
    )
    for row in rows:
        candidate = Candidate(**{name: getattr(row, name) for name in COLUMNS})
        assert candidate in manifest.candidates_of(LINES, row.arch, row.head_dim, [row.dtype]), row.name


@pytest.mark.parametrize(
    ("candidate", "arch", "expected"),
    [
        (replace(LARGE, tile_m=240), 90, "no multiple of 16 rows"),
        (replace(LARGE, tile_n=72), 90, "tile_n one of 16"),
        (replace(LARGE, tile_m=512, warps=16, tile_n=48), 90, "rows of K at a time"),
        (
            replace(LARGE, stages=4, q_in_registers=False, tile_n=96),
            90,
            "bytes of shared memory, and a block has 101376",
        ),
        (replace(LARGE, min_blocks=2), 90, "2 blocks of"),
        (replace(LARGE, warps=16, ping_pong=True), 90, "turns are between pairs"),
        (replace(LARGE, tile_n=128), 90, "at least 304 registers, and 1 blocks leave 255"),
        (replace(LARGE, copy="ldg_16"), 90, "ldg_16 is for rows whose warps share the keys"),
        (replace(LARGE, copy="tma"), 89, "sm_89 has no tma"),
        (replace(LARGE, kv_warps=2), 90, "kv_warps 2 needs ldg_16 or tma"),
        (replace(SPLIT, ping_pong=True), 90, "take no turns"),
        (replace(SPLIT, stages=3), 90, "at most one block ahead"),
        (replace(SPLIT, kv_warps=8, tile_m=48), 90, "have at most 32"),
        (replace(SPLIT, kv_warps=3), 90, "no groups of 3"),
        (SPLIT, 90, "launches overlap from sm_90 on"),
        (replace(SPLIT, dependent_launch=True), 89, "launches overlap from sm_90 on"),
        (replace(LARGE, dependent_launch=True), 90, "where warps share the keys, and nowhere else"),
        (
            replace(LARGE, warps=4, tile_m=64, min_blocks=13, tile_n=16, stages=1),
            90,
            "13 blocks of 4 warps exceed 48",
        ),
    ],
)
def test_what_cannot_be_compiled_is_not_in_the_space(candidate: Candidate, arch: int, expected: str):
    assert expected in " / ".join(space.objections(candidate, arch, Limits()))
    assert candidate not in Space(arch, candidate.head_dim)


def test_more_shared_memory_only_adds_candidates():
    small, large = Space(90, 128), Space(90, 128, Limits.with_shared(227))
    assert set(small.all) < set(large.all)
    assert (
        max(map(space.shared_bytes, small.all))
        <= 99 * 1024
        < max(map(space.shared_bytes, large.all))
        <= 227 * 1024
    )


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_a_space_holds_what_its_own_rules_allow_and_each_candidate_once(dim: int):
    candidates = Space(89, dim).all
    assert len(set(candidates)) == len(candidates) > 50
    assert all(space.objections(candidate, 89, Limits()) == [] for candidate in candidates[::17])
    assert not any(candidate.copy in ("tma", "element") for candidate in candidates)


# ---- problem sets ------------------------------------------------------------------------------------------


def test_cases_of_a_head_dim_and_group_are_judged_together():
    targets = make_targets(["dense", "latency"], [], [64])
    assert [target.name for target in targets] == ["d64-latency", "d64-dense"]
    assert {case.head_dim for target in targets for case in target.cases} == {64}
    apart = make_targets(["latency"], [], [], apart=True)
    assert len(apart) == 6 and all(len(target.cases) == 1 for target in apart)


def test_a_shape_is_a_cases_name():
    case = parse_shape("b1_h32-8_q1_k8192_d128_fp16")
    assert (case.num_heads_kv, case.seqlen_q, case.seqlen_k, case.dtype) == (8, 1, 8192, "float16")
    assert case.name == "b1_h32-8_q1_k8192_d128_fp16"
    for target in make_targets(["dense", "latency", "decode"], []):
        for case in target.cases:
            assert replace(parse_shape(case.name), group=case.group).as_dict() == case.as_dict()


@pytest.mark.parametrize(
    "text", ["b1_h8_s512_d64", "b1_h8_s512_d64_fp32", "b0_h8_s512_d64_fp16", "b1_h8-3_s5_d64_fp16"]
)
def test_what_is_no_shape_is_refused(text: str):
    with pytest.raises(ValueError, match="is no shape|is no problem"):
        parse_shape(text)


def test_no_cases_are_an_error():
    with pytest.raises(ValueError, match="no case is left"):
        make_targets(["dense"], [], [48])
    with pytest.raises(ValueError, match="unknown preset"):
        make_targets(["dens"], [])


# ---- the search --------------------------------------------------------------------------------------------

SPACE = Space(90, 64)


def test_the_same_seed_proposes_the_same():
    best = [search.Scored(LARGE, 1.0)]
    for strategy in search.STRATEGIES:
        first, second, other = (
            search.propose(SPACE, {LARGE.key}, best, 12, strategy, seed) for seed in ("a", "a", "b")
        )
        assert first == second != other
        assert len(set(first)) == 12


@pytest.mark.parametrize("strategy", search.STRATEGIES)
def test_nothing_is_proposed_twice_until_all_has_been(strategy: str):
    tiny = Space(90, 256)
    known: set[str] = set()
    best: list[search.Scored] = []
    while len(known) < len(tiny.all):
        proposed = search.propose(tiny, known, best, 20, strategy, f"{len(known)}")
        assert proposed and not known & {c.key for c in proposed} and all(c in tiny for c in proposed)
        known |= {c.key for c in proposed}
        best += [search.Scored(c, random.Random(c.key).random()) for c in proposed]
    assert search.propose(tiny, known, best, 20, strategy, "last") == []


def test_evolution_stays_near_the_best_and_brings_new_blood():
    def distance(a: Candidate, b: Candidate) -> int:
        return sum(getattr(a, name) != getattr(b, name) for name in COLUMNS)

    best = [search.Scored(LARGE, 1.2), search.Scored(SPACE.all[0], 0.3)]
    children = search.propose(SPACE, {LARGE.key}, best, 40, "evolve", "x")
    near = [child for child in children if distance(child, LARGE) <= 4]
    assert 20 <= len(near) < 40
    drawn = search.propose(SPACE, {LARGE.key}, best, 40, "random", "x")
    assert sum(distance(child, LARGE) <= 4 for child in drawn) < 15


def test_evolution_finds_a_planted_optimum_sooner_than_chance():
    """A smooth landscape with its top at LARGE: how many are drawn before it, from the lowest point."""

    def gain(c: Candidate) -> float:
        steps = (
            abs(domain.index(getattr(c, name)) - domain.index(getattr(LARGE, name)))
            for name, domain in space.DOMAINS.items()
        )
        return math.exp(-0.1 * sum(steps) - 0.3 * (c.copy != LARGE.copy))

    def drawn_before(strategy: str, seed: int) -> int:
        start = min(SPACE.all, key=gain)
        known, best = {start.key}, [search.Scored(start, gain(start))]
        for round_number in itertools.count():
            new = search.propose(SPACE, known, best, 10, strategy, f"{seed} {round_number}")
            if LARGE in new:
                return len(known)
            known |= {c.key for c in new}
            best += [search.Scored(c, gain(c)) for c in new]
        raise AssertionError

    evolved, chance = (sum(drawn_before(s, seed) for seed in range(3)) / 3 for s in search.STRATEGIES)
    assert evolved < chance / 3, (evolved, chance)


# ---- the acceptance rule -----------------------------------------------------------------------------------


def times(*us: float) -> dict[str, float]:
    return {f"case{number}": value for number, value in enumerate(us)}


def rows(*us: float) -> dict[str, dict[str, float]]:
    return {f"case{number}": {"a": value, "b": 2 * value} for number, value in enumerate(us)}


@pytest.mark.parametrize(
    ("candidate", "gain"),
    [
        ((97.0, 97.0), True),  # 1.031x
        ((97.2, 97.2), False),  # 1.029x
        ((90.0, 100.9), True),  # one case 0.9 % slower
        ((90.0, 101.2), False),  # one case 1.2 % slower
        ((120.0, 120.0), False),
    ],
)
def test_a_gain_is_three_percent_with_no_case_one_percent_worse(candidate: tuple[float, ...], gain: bool):
    assert Sighting(times(*candidate), rows(100.0, 100.0)).is_gain == gain


def test_each_case_is_compared_with_the_fastest_row_for_it():
    incumbents = {"case0": {"a": 50.0, "b": 100.0}, "case1": {"a": 100.0, "b": 50.0}}
    sighting = Sighting(times(48.0, 48.0), incumbents)
    assert sighting.geomean == pytest.approx(50 / 48)
    assert sighting.is_gain and not Sighting(times(48.0, 48.0), incumbents, quick=True).is_gain


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_is_an_error(bad: float):
    with pytest.raises(ValueError, match="no positive number"):
        Sighting(times(bad), rows(100.0))
    for us, incumbents in ((times(1.0, 1.0), rows(100.0)), (times(1.0), {"case0": {}}), ({}, {})):
        with pytest.raises(ValueError, match="can't be compared"):
            Sighting(us, incumbents)


# ---- the manifest ------------------------------------------------------------------------------------------

BOTH = ("f16", "bf16")


def test_a_line_says_which_rows_it_takes_the_name_of():
    text = Line((89, 90), BOTH, LARGE).text()
    lines = manifest.parse(f"# comment\nset(ALL 89 90)\n{text.replace('89;90', '${ALL}')}\n")
    assert lines == [Line((89, 90), BOTH, LARGE)]
    deeper = replace(LARGE, stages=1)
    assert manifest.replaced(lines, 90, deeper) == [LARGE]
    assert manifest.replaced(lines, 120, deeper) == manifest.replaced(lines, 90, LARGE) == []
    assert manifest.replaced(lines, 90, replace(LARGE, tile_m=128)) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("include(other.cmake)", "line 1 is neither"),
        ('fmha_forward("${NONE}" "f16" 64 64 64 4 1 2 2 true false cp_async_16)', "NONE"),
        ('fmha_forward("90" "f8" 64 64 64 4 1 2 2 true false cp_async_16)', "no dtype 'f8'"),
        ('fmha_forward("90" "f16" 64 64 64 4 1 2 2 true false)', "10 columns"),
        ('fmha_forward("90"\n  "f16" 64)', "line 1 is neither"),
    ],
)
def test_a_manifest_that_is_not_understood_is_an_error(line: str, expected: str):
    with pytest.raises(ManifestError, match=expected.replace("{", r"\{")):
        manifest.parse(line)


def test_cmake_reads_a_scratch_manifest_as_it_was_meant(tmp_path: Path):
    """CMake's own idea of a scratch manifest's rows: names and files, without compiling any."""
    same_name = replace(LARGE, stages=1)
    lines = [(Line((90,), BOTH, c), f"_{c.tag}") for c in (LARGE, same_name)]
    (tmp_path / "scratch.cmake").write_text(manifest.scratch(lines))
    (tmp_path / "list.cmake").write_text(
        "cmake_minimum_required(VERSION 3.26)\n"
        "set(FMHA_SUPPORTED_ARCHITECTURES 89 90 120)\nset(FMHA_ARCHITECTURES 90)\n"
        f'set(CUTLASS_FMHA_MANIFEST "{tmp_path}/scratch.cmake")\n'
        f'include("{ROOT}/cmake/Instances.cmake")\nfmha_include_manifest()\n'
        + "".join(
            f'get_property(rows GLOBAL PROPERTY FMHA_ROWS_sm90_d64_{c.tag})\nmessage("${{rows}}")\n'
            for c in (LARGE, same_name)
        )
    )
    done = subprocess.run(
        [find_program("cmake"), "-P", str(tmp_path / "list.cmake")],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [f"fwd_sm90_{dtype}_d64_m256n64w8_{c.tag}" for c in (LARGE, same_name) for dtype in BOTH]
    assert done.stderr.replace(";", "\n").split() == names
