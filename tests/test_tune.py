"""tools/tune.py: the space of candidates, the search, the gates, the acceptance rule, the leaderboard."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu as launches
import pytest
import torch
import tune
from building import ROOT, BuildError
from cubin import Kernel
from fake_build import L4, make_build
from fake_cuda import FakeGpu
from fake_kernels import FakeKernels, _at
from source_hash import source_hash
from tuning import judge, search, space
from tuning.build import Builder, Built, Wanted, judge_resources
from tuning.search import Leaderboard, Search, Sighting, Target
from tuning.space import DOMAINS, Candidate

from cutlass_fmha import _C
from cutlass_fmha.bench.cases import Case
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import Problem

LARGE = Candidate(64, 256, 64, 8, 1, 2, 1, True, True, "cp_async_16")
DECODE = Candidate(128, 32, 32, 8, 4, 1, 1, True, False, "ldg_16")
SMALL = Candidate(32, 64, 16, 4, 1, 1, 2, True, False, "cp_async_16")
INCUMBENT = Candidate(64, 64, 64, 4, 1, 2, 2, True, False, "cp_async_16")
ABOUT = {"gpu": "a GPU", "arch": 90, "mma_passes": 1, "shared_kib": 99, "source_hash": "s", "nvcc": "13.0.88"}
BOTH = ("bfloat16", "float16")


def rows() -> list[_C.Row]:
    found = [row for row in _C.rows() if row.family in tables.PLAIN]
    assert found, "this build has no CUDA kernels: build with CUTLASS_FMHA_CUDA=ON, as make does"
    return found


def test_every_row_can_be_drawn_and_takes_the_shared_memory_that_is_computed():
    """The domains hold the manifest's values, so that the search can find what is in it."""
    for row in rows():
        c = Candidate.of(row)
        assert space.shared_bytes(c) == row.smem_bytes, row.name
        assert space.fits(c, row.arch) and all(getattr(c, x) in domain for x, domain in DOMAINS.items())
        assert c.overlaps(row.arch) == row.dependent_launch
    tags = {Candidate.of(row).tag for row in rows()}
    assert len(tags) == len({Candidate.of(row) for row in rows()}) and all(map(str.isidentifier, tags))


@pytest.mark.parametrize(
    ("candidate", "changes"),
    [
        (DECODE, {"tile_m": 24}),  # 16 rows for a warp
        (DECODE, {"tile_n": 40}),
        (LARGE, {"warps": 16, "tile_n": 48, "ping_pong": False}),  # K in whole passes of the threads
        (LARGE, {"stages": 4, "q_in_registers": False, "tile_n": 96}),  # shared memory of a block
        (LARGE, {"warps": 4, "tile_m": 64, "min_blocks": 2, "stages": 3}),  # of an SM
        (LARGE, {"warps": 3, "tile_m": 48, "copy": "tma", "ping_pong": False}),  # pairs of warps
        (LARGE, {"warps": 16}),  # turns between pairs of 8 warps
        (LARGE, {"tile_n": 128}),  # registers
        (LARGE, {"copy": "ldg_16"}),
        (DECODE, {"copy": "cp_async_16"}),
        (LARGE, {"copy": "tma", "arch": 89}),
        (LARGE, {"copy": "tma", "tile_m": 512, "tile_n": 32, "warps": 16, "head_dim": 32, "ping_pong": False}),
        (LARGE, {"warps": 4, "tile_m": 64, "min_blocks": 13, "tile_n": 16, "stages": 1}),  # warps of an SM
        (DECODE, {"ping_pong": True}),
        (DECODE, {"stages": 3, "head_dim": 32}),
        (DECODE, {"kv_warps": 8, "tile_m": 48, "head_dim": 32}),  # at most 32 rows a warp
        (DECODE, {"kv_warps": 3}),
    ],
)
def test_what_cannot_be_compiled_is_not_in_the_space(candidate: Candidate, changes: dict[str, Any]):
    assert space.fits(candidate, 90)
    columns = {name: value for name, value in changes.items() if name != "arch"}
    assert not space.fits(replace(candidate, **columns), changes.get("arch", 90))


def sighting(us: tuple[float, ...], incumbents: tuple[tuple[float, ...], ...]) -> Sighting:
    """Case by case; the rows are "a", "b", ..."""
    of_rows = [dict(zip("abc", times, strict=False)) for times in incumbents]
    return Sighting(*({f"case{n}": x for n, x in enumerate(side)} for side in (us, of_rows)))


@pytest.mark.parametrize(
    ("us", "gain"),
    [
        ((97.0, 97.0), True),  # 1.031x
        ((97.2, 97.2), False),  # 1.029x
        ((90.0, 100.9), True),  # one case 0.9 % slower
        ((90.0, 101.2), False),  # one case 1.2 % slower
        ((120.0, 120.0), False),
    ],
)
def test_a_gain_is_three_percent_over_the_fastest_row_with_no_case_one_percent_worse(us: tuple[float, ...], gain: bool):
    assert sighting(us, ((100.0, 200.0), (300.0, 100.0))).is_gain == gain


def test_a_time_that_is_none_is_an_error():
    bad = [((x,), ((100.0,),)) for x in (math.nan, math.inf, 0.0, -1.0)]
    for us, incumbents in (*bad, ((1.0,), ((-1.0,),)), ((1.0, 1.0), ((100.0,),)), ((1.0,), ((),)), ((), ())):
        with pytest.raises(ValueError, match="can't be compared"):
            sighting(us, incumbents)


def test_what_the_machine_code_has_against_a_candidate():
    def kernel(candidate: Candidate, dtype: str = "f16", registers: int = 128, stl: int = 0) -> Kernel:
        mma = "HMMA.16816.F32" + ".BF16" * (dtype == "bf16")
        opcodes = Counter({mma: 64, "LDGSTS.E": 8, "STL": stl})
        return Kernel(f"fwd_sm89_{dtype}_d32_m64n32w4_{candidate.tag}", 89, registers, opcodes=opcodes)

    fine, spills, absent = (replace(SMALL, tile_n=n) for n in (32, 48, 80))
    crowded = replace(fine, min_blocks=5)
    kernels = [kernel(fine), kernel(fine, "bf16", registers=140), kernel(spills, stl=3), kernel(crowded)]
    built = Built(Path("x.so"))
    wanted = {fine: BOTH, spills: BOTH[1:], crowded: BOTH[1:], absent: BOTH[1:]}
    judge_resources([*kernels, kernel(SMALL, stl=9)], wanted, built)  # the last: a row of the manifest
    assert built.registers[fine] == 140 and built.dropped.keys() == {spills, crowded, absent}
    for candidate, words in (
        (spills, "f16 (sm_89): 3 loads and stores of local memory (spills)"),
        (crowded, "registers x 128 threads x 5 blocks exceed"),
        (absent, "the extension has no f16 kernel of it"),
    ):
        fate, reason = built.dropped[candidate]
        assert fate == "resources" and words in reason


def test_candidates_are_compiled_and_the_bad_one_is_dropped(tmp_path: Path):
    """The real path, nvcc and all: two candidates that no name tells apart, and one that can't compile."""
    twin, bad = replace(SMALL, min_blocks=1), replace(SMALL, tile_n=24)
    assert SMALL.name_columns == twin.name_columns
    built = Builder(tmp_path, 89, {}, jobs=1).build(dict.fromkeys((SMALL, twin, bad), ("float16",)), {})
    ((dropped, (fate, reason)),) = built.dropped.items()
    assert dropped == bad and fate == "compile" and "static assertion" in reason
    assert built.registers.keys() == {SMALL, twin}
    assert all(32 < count <= 255 for count in built.registers.values())
    # As the judge finds them, without an installed package.
    listing = (
        "import sys; sys.path.insert(0, sys.argv[2]); from building import load_extension\n"
        "from pathlib import Path; module = load_extension(Path(sys.argv[1])); from tuning import judge\n"
        "print(*(row.name for row in module.rows()), module.build_info()['source_hash'])"
    )
    command = [sys.executable, "-c", listing, str(built.extension), str(ROOT / "tools")]
    *names, found_hash = subprocess.check_output(command, text=True, cwd=tmp_path).split()
    assert sorted(names) == sorted(f"fwd_sm89_f16_d32_m64n16w4_{c.tag}" for c in (SMALL, twin))
    assert found_hash.endswith("+manifest"), "the parity gate must not take it for a build of src/"


class Defect(FakeKernels):
    """A fake kernel with one thing wrong. (tests/test_gate.py has what the oracle sees.)"""

    def __init__(self, what: str) -> None:
        super().__init__(make_build((90,)))
        self.what = what

    def __call__(self, row: int, params: Any, device: int, stream: int) -> None:
        p, dtype = params.copy(), getattr(torch, self.build.rows[row].dtype)
        if self.what == "diagonal" and p.window_right >= 0:
            p.window_right += 1
        super().__call__(row, p, device, stream)
        if self.what == "race" and p.batch * p.seqlen_q * p.num_heads > 0 and len(self.launches) % 3 == 0:
            out = _at(p.o, dtype, (1,), (1,))
            out.copy_(torch.nextafter(out, torch.full_like(out, 1.0)))


@pytest.mark.parametrize(
    ("what", "expected"),
    [("nothing", None), ("diagonal", "times the tolerance"), ("race", "3 launches do not agree to the bit")],
)
def test_the_gate_sees(what: str, expected: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launches._C, "run", Defect(what))
    row = make_build((90,)).rows[7]  # float16, head dim 64, a small tile
    listed = [p for p in judge.problems(row) if p.batch < 9]  # the fake takes long for large ones
    problems = [p for p in listed if p.batch * p.num_heads * p.seqlen_q * p.seqlen_k < 2**18]
    found = "\n".join(judge.failures(row, problems, torch.device("cpu"), stream=0))
    assert expected in found if expected else found == ""


def test_every_dtype_is_judged_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge, "problems", lambda row: [row.dtype] * (row.dtype == "bfloat16"))
    monkeypatch.setattr(judge, "failures", lambda row, problems, device: [f"wrong on {x}" for x in problems])
    monkeypatch.setattr(judge, "time_candidate", lambda job, *_: {"timed": job["tag"]})
    rows = {("x", dtype): SimpleNamespace(dtype=dtype) for dtype in BOTH}
    wrong = {"parity": "wrong on bfloat16"}
    for dtypes, found in ((["float16"], {"us": {"timed": "x"}}), (BOTH, wrong), (BOTH[::-1], wrong)):
        assert judge.judge({"tag": "x", "dtypes": dtypes}, rows, torch.device("cpu")) == found


SHORT, LONG = (Case("x", 1, 1, 1, n, n, 64, "float16", causal=n > 64) for n in (64, 128))


def test_a_candidate_is_timed_in_turns_with_every_row(monkeypatch: pytest.MonkeyPatch):
    """By the median of so many looks, on each case's problem."""
    table = make_build((89,))
    tags = {row.name: tag for row, tag in zip(table.rows, "xab", strict=False)}
    us = {"x": (90, 95), "a": (130, 100), "b": (100, 180)}  # on the long and on the short case
    heads = {"num_heads": 4, "num_heads_kv": 2, "head_dim": table.rows[0].head_dim}
    cases = [replace(case, **heads) for case in (LONG, SHORT)]
    problems = [Problem(1, n, n, *heads.values(), "float16", mask) for n, mask in ((128, "bottom-right"), (64, "none"))]
    gpu = FakeGpu(table, L4, lambda row, problem: us[tags[row.name]][problem.causal == "none"])
    gpu.install(monkeypatch)
    job = {"tag": "x", "incumbents": ["a", "b"], "cases": [asdict(case) for case in cases], "looks": 3}
    found = judge.time_candidate(job, {(tags[row.name], row.dtype): row for row in table.rows[:3]}, 0)
    assert found == {case.name: {tag: pytest.approx(us[tag][n]) for tag in us} for n, case in enumerate(cases)}
    assert {launch[:2] for launch in gpu.launches} >= {(name, p) for name in tags for p in problems}


JUDGE = """
import json, os, signal, sys
what = "{what}"
if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
if what == "hang": signal.pause()
if what == "bug": raise KeyError("tag")
job = json.load(open(sys.argv[1]))
us = {{case["group"]: dict.fromkeys([job["tag"], *job["incumbents"]], 100.0) for case in job["cases"]}}
results = {{"wrong": {{"parity": "wrong"}}, "cuda": {{"crash": "CUDA error"}}, "right": {{"us": us}}}}
json.dump(results[what], open(sys.argv[2], "w"))
"""
TARGET = Target("d64-x", (SHORT,), 90, 99, (INCUMBENT,))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("right", Sighting({"x": 100.0}, {"x": {INCUMBENT.key: 100.0}})),
        ("wrong", ("parity", "wrong")),
        ("segfault", ("crash", "ended by signal 11 (SIGSEGV)")),
        ("hang", ("crash", "no answer within 2 s")),
        ("cuda", ("crash", "CUDA error")),
        ("bug", None),
    ],
)
def test_a_candidate_is_blamed_for_its_process_and_not_for_the_tuner(what: str, expected: Any, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE.format(what=what))
    command = [sys.executable, str(tmp_path / "judge.py")]
    run = search.judge_in_a_process(tmp_path, command, 2.0 if what == "hang" else 1200.0)
    with nullcontext() if expected else pytest.raises(BuildError, match="the judge failed: KeyError: 'tag'"):
        assert run(tmp_path / "none.so", TARGET, LARGE, ("float16",), 1) == expected


@dataclass
class FakeBuilder:
    """``drops``: the fate and the reason of a candidate that must not run, or None."""

    drops: Callable[[Candidate, tuple[str, ...]], tuple[str, str] | None] = lambda c, dtypes: None
    built: list[tuple[Wanted, Wanted]] = field(default_factory=list)

    def build(self, wanted: Wanted, incumbents: Wanted) -> Built:
        self.built.append((dict(wanted), dict(incumbents)))
        dropped = {c: found for c, dtypes in wanted.items() if (found := self.drops(c, dtypes))}
        return Built(Path("x.so"), dropped, dict.fromkeys(wanted, 128))


@dataclass
class FakeJudge:
    """``us``: a candidate's time in its n-th timing run, or what the parity gate says; ``jobs``: what it was asked."""

    us: Callable[[Candidate, int], float | str] = lambda c, run: 100.0
    jobs: list[tuple[Candidate, tuple[str, ...], int]] = field(default_factory=list)

    def __call__(self, extension, target, candidate, dtypes, looks) -> Sighting | tuple[str, str]:
        found = self.us(candidate, sum(other == candidate for other, _, _ in self.jobs))
        self.jobs.append((candidate, dtypes, looks))
        if isinstance(found, str):
            return "parity", found
        return Sighting({SHORT.name: found}, {SHORT.name: {INCUMBENT.key: 100.0}})


@pytest.fixture
def board(tmp_path: Path) -> Leaderboard:
    return Leaderboard.resume(tmp_path / "board.json", dict(ABOUT), {"d64-x": [SHORT.name]})


def run(board: Leaderboard, gpu: Any, builder: FakeBuilder | None = None, rounds: int = 1, **more: Any) -> None:
    """So many rounds of drawing."""
    said = {"limit_s": rounds + 1, "clock": lambda: board.rounds, **more}
    Search(board, [TARGET], builder or FakeBuilder(), gpu, say=lambda line: None, **said).run()


def test_each_candidate_meets_the_fate_it_earns(board: Leaderboard):
    """A gain is accepted when two runs have seen it: in two processes and two builds, the second for all
    dtypes, and timed for longer."""
    compiles, spills, spills_in_bf16, wrong, once, gains = range(6)
    fates = ("compile", "resources", "resources", "parity", "unconfirmed", "accepted", "slower")
    reasons = {"compile": "no room for 16 rows", "resources": "7 spills", "parity": "3 times the tolerance"}

    def kind(c: Candidate) -> int:
        return int(c.tag[1:], 16) % 7

    def drops(c: Candidate, dtypes: tuple[str, ...]) -> tuple[str, str] | None:
        drop = kind(c) in (compiles, spills) or (kind(c) == spills_in_bf16 and "bfloat16" in dtypes)
        return (fates[kind(c)], reasons[fates[kind(c)]]) if drop else None

    us = {once: (90.0, 99.0), spills_in_bf16: (90.0,), gains: (90.0, 95.0), wrong: (reasons["parity"],)}
    gpu, builder = FakeJudge(lambda c, run: us.get(kind(c), (104.0,))[run]), FakeBuilder(drops)
    run(board, gpu, builder, per_round=90)
    assert {kind(entry.candidate) for entry in board.entries} == set(range(7))
    for entry in board.entries:
        c, of = entry.candidate, kind(entry.candidate)
        assert entry.fate == fates[of]
        assert reasons.get(entry.fate, "x the incumbent's speed (1.03x is asked for), worst case") in entry.reason
        runs = {compiles: 0, spills: 0, once: 2, gains: 2}.get(of, 1)
        assert [job for job in gpu.jobs if job[0] == c] == [(c, ("float16",), 1), (c, BOTH, 5)][:runs]
        built = [wanted[c] for wanted, _ in builder.built if c in wanted]
        assert built == [("float16",), BOTH][: 2 if of in (spills_in_bf16, once, gains) else 1]
    assert all(rows == {INCUMBENT: ("float16",)} for _, rows in builder.built)
    assert "x compile: no room for N rows" in "\n".join(map(str, board.render()))


def test_the_time_budget_ends_the_search_when_gains_are_confirmed(board: Leaderboard):
    gpu = FakeJudge(us=lambda c, run: 90.0)
    run(board, gpu, per_round=2, limit_s=100.0, clock=lambda: 8.0 * len(gpu.jobs))
    assert 100.0 <= 8.0 * len(gpu.jobs) <= 100.0 + 5 * 8.0
    assert {entry.fate for entry in board.entries} == {"accepted"}


def test_a_search_that_was_stopped_goes_on_without_redoing(board: Leaderboard):
    """Each time with the seventh result on its way: what was recorded is in the file, and judged once."""
    runs: Counter[object] = Counter()
    for _ in range(4):
        gpu = FakeJudge(us=lambda c, run: 90.0 if c.stages == 3 else 120.0)

        def stop(*job: Any, gpu: FakeJudge = gpu) -> Sighting | tuple[str, str]:
            if len(gpu.jobs) == 7:
                raise KeyboardInterrupt
            return gpu(*job)

        board = Leaderboard.resume(board.path, dict(ABOUT), board.targets)
        with pytest.raises(KeyboardInterrupt):
            run(board, stop, rounds=9, per_round=5)
        runs.update(gpu.jobs)
    before = board.path.read_text()
    board.about["gpu"] = object()
    with pytest.raises(TypeError):
        board.save()
    assert board.path.read_text() == before, "a write that fails leaves the file as it was"
    kept = Leaderboard.load(board.path)
    assert kept.entries == board.entries and sum(len(e.sightings) for e in kept.entries) == runs.total() == 28
    assert max(runs.values()) == 1
    assert {e.fate for e in kept.entries if e.candidate.stages == 3} <= {"promising", "accepted"}


def test_what_is_no_leaderboard_or_of_something_else_is_refused(board: Leaderboard):
    for text in (None, "", "[]", "{}", '{"kind": "cutlass_fmha tuning leaderboard 2"}'):
        if text is not None:
            board.path.write_text(text)
        with pytest.raises(ValueError, match=r"board.json can't be read as a leaderboard of this version"):
            Leaderboard.load(board.path)
    board.save()
    targets = {"d64-x": [SHORT.name]}
    asked = {name: ({**ABOUT, name: "other"}, targets) for name in ABOUT} | {"d64-x": (ABOUT, {"d64-x": []})}
    for name, other in asked.items():
        with pytest.raises(ValueError, match=f"is about {name} .* give another --leaderboard"):
            Leaderboard.resume(board.path, *other)
    assert Leaderboard.resume(board.path, ABOUT, targets).entries == []


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What tune.py prints."""

    def call(*arguments: object) -> str:
        assert tune.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return call


def test_the_report_and_the_lines_to_take_over(board: Leaderboard, told: Any, capsys: pytest.CaptureFixture[str]):
    board.about["source_hash"] = source_hash()
    run(board, FakeJudge(us=lambda c, run: 99.0), per_round=20)
    row = next(Candidate.of(row) for row in rows() if row.arch == 90 and row.head_dim == 64)
    best = search.Entry("d64-x", replace(row, stages=row.stages + 1), registers=128)
    for _ in range(2):
        best.see(Sighting({SHORT.name: 90.0}, {SHORT.name: {INCUMBENT.key: 100.0}}))
    board.entries.append(best)
    board.save()
    given = ("--leaderboard", board.path)
    text = told("--report", *given)
    assert "gpu a GPU, arch 90" in text and "21 candidates" in text and "and 9 slower ones" in text
    (first,) = [line for line in text.splitlines() if line.startswith("accepted ")]
    assert best.candidate.key in first and " 1.111x " in first
    assert told("--report", *given, "--json") == board.path.read_text()
    line = f'fmha_forward("90" "f16;bf16" {best.candidate.key})'
    reason, replaced, shown = told("--accept", *given).splitlines()
    assert reason.endswith(f"before: {INCUMBENT.key}") and replaced.endswith(f"on sm_90: {row.key}") and shown == line
    assert json.loads(told("--accept", *given, "--json")) == {"d64-x": [reason, replaced, shown]}
    board.about["source_hash"] = "0" * 64
    board.save()
    assert tune.main(["--accept", "--leaderboard", str(board.path)]) == 1
    assert "is about sources 000000000000, and src/ has" in capsys.readouterr().err


def test_the_candidates_of_a_dry_run_are_the_same_for_programs(told: Any):
    asked = ("--dry-run", "--arch", 90, "--head-dim", 64)
    ((name, lines),) = json.loads(told(*asked, "--json")).items()
    assert told(*asked).splitlines() == lines and lines[0].startswith(f"# {name}: ")
    assert [line.partition("(")[0] for line in lines[1:]] == ["fmha_forward"] * 8


@pytest.mark.parametrize(
    ("arguments", "gpus", "status", "sentence"),
    [
        ("--dry-run --arch 90 --preset dens", 1, 2, "unknown preset"),
        ("--preset dens", 0, 2, "unknown preset"),  # whether there is a GPU or not
        ("--dry-run --arch 90 --head-dim 48", 0, 2, "no case is left"),
        ("--dry-run --arch 89 --smem 200", 0, 2, "99 KiB of shared memory on sm_89"),
        ("--report --leaderboard nowhere.json", 0, 1, "can't be read"),
        ("--preset dense --head-dim 64", 0, 1, "a search needs a GPU"),
        ("--preset dense --head-dim 64", 1, 1, "is of other sources: make build"),  # whose rows are to be beaten
    ],
)
def test_a_request_that_cannot_be_followed_is_told(arguments, gpus, status, sentence, refused, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(tune.devices, "of_index", lambda index: PRESETS["h200"])
    monkeypatch.setattr(tune, "source_hash", lambda: "other")
    if status == 2:
        assert sentence in refused(tune.main, *arguments.split())
    else:
        assert tune.main(arguments.split()) == 1
        error = capsys.readouterr().err
        assert error.startswith("tune: ") and error.count("\n") == 1 and sentence in error
