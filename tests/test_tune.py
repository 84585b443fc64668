"""tools/tune.py: the space of candidates, the search, its gates, the leaderboard. tools/emulate.py: its builds, how
launches are padded, what is timed. Needs no GPU; nvcc and CMake as a build does."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import building
import cubin
import emulate
import gpu as launches
import mainloop
import pytest
import torch
import tune
from building import ROOT, BuildError
from cubin import Kernel
from fake_build import L4, make_build
from fake_cuda import FakeGpu
from fake_kernels import FakeKernels, _at
from tuning import judge, search
from tuning.search import Builder, Built, Candidate, Leaderboard, Search, Sighting, Target, Wanted

from cutlass_fmha import _C
from cutlass_fmha.bench.cases import Case
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.launch import gradients

LARGE = Candidate(64, 256, 64, 8, 1, 2, 1, True, True, "cp_async_16")
DECODE = Candidate(128, 32, 32, 8, 4, 1, 1, True, False, "ldg_16")
SMALL = Candidate(32, 64, 16, 4, 1, 1, 2, True, False, "cp_async_16")
INCUMBENT = Candidate(64, 64, 64, 4, 1, 2, 2, True, False, "cp_async_16")
ABOUT = {"gpu": "a GPU", "arch": 90, "mma_passes": 1, "shared_kib": 99, "source_hash": "s", "nvcc": "13.0.88"}
BOTH = ("bfloat16", "float16")
KIB = 1024
SHORT, LONG = (Case("x", 1, 1, 1, n, n, 64, "float16", causal=n > 64) for n in (64, 128))
TARGET = Target("d64-x", (SHORT,), 90, 99, (INCUMBENT,))


def test_every_row_can_be_drawn_and_takes_the_shared_memory_that_is_computed():
    """The domains hold the manifest's values, so that the search can find what is in it."""
    rows = [row for row in _C.rows() if row.family in tables.PLAIN]
    assert rows, "this build has no CUDA kernels: build with CUTLASS_FMHA_CUDA=ON, as make does"
    tags = {}
    for row in rows:
        c = Candidate.of(row)
        tags[c] = c.tag
        assert search.shared_bytes(c) == row.smem_bytes, row.name
        assert search.fits(c, row.arch) and all(getattr(c, x) in domain for x, domain in search.DOMAINS.items())
        assert c.overlaps(row.arch) == row.dependent_launch
    assert len(set(tags.values())) == len(tags) and all(map(str.isidentifier, tags.values()))


def test_what_cannot_be_compiled_is_not_in_the_space():
    by_tma = replace(LARGE, copy="tma")
    assert all(search.fits(c, 90) for c in (LARGE, DECODE, by_tma)) and not search.fits(by_tma, 89)
    for candidate, changes in (
        (DECODE, {"tile_m": 24}),  # 16 rows for a warp
        (DECODE, {"tile_n": 40}),
        (LARGE, {"warps": 16, "tile_n": 48, "ping_pong": False}),  # K in whole passes of the threads
        (LARGE, {"stages": 4, "q_in_registers": False, "tile_n": 96}),  # shared memory of a block
        (LARGE, {"warps": 4, "tile_m": 64, "min_blocks": 2, "stages": 3}),  # of an SM
        (by_tma, {"warps": 3, "tile_m": 48, "ping_pong": False}),  # pairs of warps
        (LARGE, {"warps": 16}),  # turns between pairs of 8 warps
        (LARGE, {"tile_n": 128}),  # registers
        (DECODE, {"kv_warps": 8, "tile_m": 48, "head_dim": 32}),  # at most 32 rows a warp
        (by_tma, {"tile_m": 512, "tile_n": 32, "warps": 16, "head_dim": 32, "ping_pong": False}),
        (LARGE, {"copy": "ldg_16"}), (DECODE, {"copy": "cp_async_16"}), (DECODE, {"ping_pong": True}),
        (DECODE, {"stages": 3, "head_dim": 32}), (DECODE, {"kv_warps": 3}),
    ):  # fmt: skip
        assert not search.fits(replace(candidate, **changes), 90), changes


def test_a_gain_is_three_percent_over_the_fastest_row_with_no_case_one_percent_worse():
    def sighting(us: tuple[float, ...], *incumbents: tuple[float, ...]) -> Sighting:
        of_rows = [dict(zip("abc", times, strict=False)) for times in incumbents]
        return Sighting(*({f"case{n}": x for n, x in enumerate(side)} for side in (us, of_rows)))

    slower, case_slower = ((97.2, 97.2), (120.0, 120.0)), ((90.0, 101.2),)  # 1.029x; one case 1.2 % slower
    for us in ((97.0, 97.0), (90.0, 100.9), *slower, *case_slower):
        assert sighting(us, (100.0, 200.0), (300.0, 100.0)).is_gain == (us not in slower + case_slower)
    bad = [((x,), (100.0,)) for x in (math.nan, math.inf, 0.0, -1.0)]
    for times in (*bad, ((1.0,), (-1.0,)), ((1.0, 1.0), (100.0,)), ((1.0,), ()), ((),)):
        with pytest.raises(ValueError, match="can't be compared"):
            sighting(*times)


def test_what_the_machine_code_has_against_a_candidate():
    def kernel(candidate: Candidate, dtype: str = "f16", stl: int = 0) -> Kernel:
        opcodes = Counter({"HMMA.16816.F32" + ".BF16" * (dtype == "bf16"): 64, "LDGSTS.E": 8, "STL": stl})
        return Kernel(f"fwd_sm89_{dtype}_d32_m64n32w4_{candidate.tag}", 89, 128, opcodes=opcodes)

    fine, spills, absent = (replace(SMALL, tile_n=n) for n in (32, 48, 80))
    crowded = replace(fine, min_blocks=5)
    kernels = [kernel(fine), kernel(fine, "bf16"), kernel(spills, stl=3), kernel(crowded), kernel(SMALL, stl=9)]
    built = Built(Path("x.so"))
    search.judge_resources(kernels, {fine: BOTH, **dict.fromkeys((spills, crowded, absent), BOTH[1:])}, built)
    told = {
        spills: "f16 (sm_89): 3 loads and stores of local memory (spills)",
        crowded: "registers x 128 threads x 5 blocks exceed",
        absent: "the extension has no f16 kernel of it",
    }
    assert built.dropped.keys() == told.keys()  # the last kernel is a row's of the manifest
    for candidate, (fate, reason) in built.dropped.items():
        assert fate == "resources" and told[candidate] in reason


def test_candidates_are_compiled_and_the_bad_one_is_dropped(tmp_path: Path):
    """The real path, nvcc and all: two candidates that no name tells apart, and one that can't compile."""
    twin, bad = replace(SMALL, min_blocks=1), replace(SMALL, tile_n=24)
    quick = {"CMAKE_CXX_FLAGS_RELEASE": "-O0"}  # of the host's code
    built = Builder(tmp_path, 89, quick).build(dict.fromkeys((SMALL, twin, bad), ("float16",)), {})
    ((dropped, (fate, reason)),) = built.dropped.items()
    assert dropped == bad and fate == "compile" and "static assertion" in reason
    assert b"+manifest" in built.extension.read_bytes(), "the parity gate must not take it for a build of src/"


@pytest.mark.parametrize("what", ["", "times the tolerance", "3 launches do not agree to the bit"])
def test_the_gate_sees(what: str, monkeypatch: pytest.MonkeyPatch):
    """A fake kernel with one thing wrong, its diagonal or a bit. (tests/test_gate.py has what the oracle sees.)"""
    kernels = FakeKernels(make_build((90,)))
    row = kernels.build.rows[7]  # float16, head dim 64, a small tile

    def run(index: int, params: Any, device: int, stream: int) -> None:
        p = params.copy()
        p.window_right += what.startswith("times") and p.window_right >= 0
        kernels(index, p, device, stream)
        if what.startswith("3") and p.batch * p.seqlen_q * p.num_heads > 0 and len(kernels.launches) % 3 == 0:
            out = _at(p.o, torch.float16, (1,), (1,))
            out.copy_(torch.nextafter(out, torch.full_like(out, 1.0)))

    monkeypatch.setattr(launches._C, "run", run)
    listed = [p for p in judge.problems(row) if p.batch < 9]  # the fake takes long for large ones
    problems = [p for p in listed if p.batch * p.num_heads * p.seqlen_q * p.seqlen_k < 2**18]
    found = "\n".join(judge.failures(row, problems, torch.device("cpu"), stream=0))
    assert what in found if what else found == ""


def test_every_dtype_is_judged_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge, "problems", lambda row: [row.dtype] * (row.dtype == "bfloat16"))
    monkeypatch.setattr(judge, "failures", lambda row, problems, device: [f"wrong on {x}" for x in problems])
    monkeypatch.setattr(judge, "time_candidate", lambda job, *_: {"timed": job["tag"]})
    rows = {("x", dtype): SimpleNamespace(dtype=dtype) for dtype in BOTH}
    wrong = {"parity": "wrong on bfloat16"}
    for dtypes, found in ((["float16"], {"us": {"timed": "x"}}), (BOTH, wrong), (BOTH[::-1], wrong)):
        assert judge.judge({"tag": "x", "dtypes": dtypes}, rows, torch.device("cpu")) == found


def test_a_candidate_is_timed_in_turns_with_every_row(monkeypatch: pytest.MonkeyPatch):
    table = make_build((89,))
    tags = {row.name: tag for row, tag in zip(table.rows, "xab", strict=False)}
    us = {"x": (90, 95), "a": (130, 100), "b": (100, 180)}  # on the long and on the short case
    heads = {"num_heads": 4, "num_heads_kv": 2, "head_dim": table.rows[0].head_dim}
    cases = [replace(case, **heads) for case in (LONG, SHORT)]
    problems = [Problem(1, n, n, *heads.values(), "float16", mask) for n, mask in ((128, "bottom-right"), (64, "none"))]
    gpu = FakeGpu(table, L4, lambda row, problem: us[tags[row.name]][problem.causal == "none"]).install(monkeypatch)
    job = {"tag": "x", "incumbents": ["a", "b"], "cases": [asdict(case) for case in cases], "looks": 3}
    found = judge.time_candidate(job, {(tags[row.name], row.dtype): row for row in table.rows[:3]}, 0)
    assert found == {case.name: {tag: pytest.approx(us[tag][n]) for tag in us} for n, case in enumerate(cases)}
    assert {launch[:2] for launch in gpu.launches} >= {(name, p) for name in tags for p in problems}


@pytest.mark.parametrize(("process", "expected"), [
    ("job = json.load(open(sys.argv[1])); times = dict.fromkeys([job['tag'], *job['incumbents']], 100.0); "
     "json.dump({'us': {case['group']: times for case in job['cases']}}, open(sys.argv[2], 'w'))",
     Sighting({"x": 100.0}, {"x": {INCUMBENT.key: 100.0}})),
    ("json.dump({'parity': 'wrong'}, open(sys.argv[2], 'w'))", ("parity", "wrong")),
    ("os.kill(os.getpid(), signal.SIGSEGV)", ("crash", "ended by signal 11 (SIGSEGV)")),
    ("signal.pause()", ("crash", "no answer within 2 s")), ("raise KeyError('tag')", None),
])  # fmt: skip
def test_a_candidate_is_blamed_for_its_process_and_not_for_the_tuner(process: str, expected: Any, tmp_path):
    command = [sys.executable, "-c", f"import json, os, signal, sys; {process}"]
    run = search.judge_in_a_process(tmp_path, command, 2.0 if "pause" in process else 1200.0)
    with nullcontext() if expected else pytest.raises(BuildError, match="the judge failed: KeyError: 'tag'"):
        assert run(tmp_path / "none.so", TARGET, LARGE, ("float16",), 1) == expected


@dataclass
class Fake:
    """``us``: a candidate's time in its n-th timing run, or what the parity gate says; ``drops``: the fate and the
    reason of one that must not run, or None; ``jobs`` and ``built``: what was asked."""

    us: Callable[[Candidate, int], float | str] = lambda c, run: 100.0
    drops: Callable[[Candidate, tuple[str, ...]], tuple[str, str] | None] = lambda c, dtypes: None
    jobs: list[tuple[Candidate, tuple[str, ...], int]] = field(default_factory=list)
    built: list[tuple[Wanted, Wanted]] = field(default_factory=list)

    def build(self, wanted: Wanted, incumbents: Wanted) -> Built:
        self.built.append((dict(wanted), dict(incumbents)))
        dropped = {c: found for c, dtypes in wanted.items() if (found := self.drops(c, dtypes))}
        return Built(Path("x.so"), dropped)

    def judge(self, extension, target, candidate, dtypes, looks) -> Sighting | tuple[str, str]:
        found = self.us(candidate, sum(other == candidate for other, _, _ in self.jobs))
        self.jobs.append((candidate, dtypes, looks))
        if isinstance(found, str):
            return "parity", found
        return Sighting({SHORT.name: found}, {SHORT.name: {INCUMBENT.key: 100.0}})

    def search(self, board: Leaderboard, rounds: int = 1, **more: Any) -> None:
        said = {"limit_s": rounds + 1, "clock": lambda: board.rounds, "say": lambda line: None, **more}
        Search(board, [TARGET], self, self.judge, **said).run()


@pytest.fixture
def board(tmp_path: Path) -> Leaderboard:
    return Leaderboard.resume(tmp_path / "board.json", dict(ABOUT), {"d64-x": [SHORT.name]})


def test_each_candidate_meets_the_fate_it_earns(board: Leaderboard):
    """A gain is accepted when two runs have seen it: of two builds, the second for all dtypes, and timed for longer."""
    compiles, spills, spills_in_bf16, wrong, once, gains = range(6)
    fates = ("compile", "resources", "resources", "parity", "unconfirmed", "accepted", "slower")
    reasons = {"compile": "no room for 16 rows", "resources": "7 spills", "parity": "3 times the tolerance"}

    def kind(c: Candidate) -> int:
        return int(c.tag[1:], 16) % 7

    def drops(c: Candidate, dtypes: tuple[str, ...]) -> tuple[str, str] | None:
        drop = kind(c) in (compiles, spills) or (kind(c) == spills_in_bf16 and "bfloat16" in dtypes)
        return (fates[kind(c)], reasons[fates[kind(c)]]) if drop else None

    us = {once: (90.0, 99.0), spills_in_bf16: (90.0,), gains: (90.0, 95.0), wrong: (reasons["parity"],)}
    gpu = Fake(lambda c, run: us.get(kind(c), (104.0,))[run], drops)
    gpu.search(board, per_round=90)
    assert {kind(entry.candidate) for entry in board.entries} == set(range(7))
    for entry in board.entries:
        c, of = entry.candidate, kind(entry.candidate)
        assert entry.fate == fates[of]
        assert reasons.get(entry.fate, "x the incumbent's speed (1.03x is asked for), worst case") in entry.reason
        runs = {compiles: 0, spills: 0, once: 2, gains: 2}.get(of, 1)
        assert [job for job in gpu.jobs if job[0] == c] == [(c, ("float16",), 1), (c, BOTH, 5)][:runs]
        built = [wanted[c] for wanted, _ in gpu.built if c in wanted]
        assert built == [("float16",), BOTH][: 2 if of in (spills_in_bf16, once, gains) else 1]
    assert all(rows == {INCUMBENT: ("float16",)} for _, rows in gpu.built)


def test_the_time_budget_ends_the_search_when_gains_are_confirmed(board: Leaderboard):
    gpu = Fake(us=lambda c, run: 90.0)
    gpu.search(board, per_round=2, limit_s=100.0, clock=lambda: 8.0 * len(gpu.jobs))
    assert 100.0 <= 8.0 * len(gpu.jobs) <= 100.0 + 5 * 8.0
    assert {entry.fate for entry in board.entries} == {"accepted"}


def test_a_search_that_was_stopped_goes_on_without_redoing(board: Leaderboard):
    """Each time with the seventh result on its way: what was recorded is in the file, and judged once."""
    runs: Counter[object] = Counter()

    def us(c: Candidate, run: int) -> float:
        if len(gpu.jobs) == 7:
            raise KeyboardInterrupt
        return 90.0 if c.stages == 3 else 120.0

    for _ in range(4):
        gpu, board = Fake(us), Leaderboard.resume(board.path, dict(ABOUT), board.targets)
        with pytest.raises(KeyboardInterrupt):
            gpu.search(board, rounds=9, per_round=5)
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
    for name in (*ABOUT, "d64-x"):
        other = (ABOUT, {"d64-x": []}) if name == "d64-x" else ({**ABOUT, name: "other"}, board.targets)
        with pytest.raises(ValueError, match=f"is about {name} .* give another --leaderboard"):
            Leaderboard.resume(board.path, *other)
    assert Leaderboard.resume(board.path, ABOUT, board.targets).entries == []


def test_the_report_and_a_dry_run_are_the_same_for_programs(board: Leaderboard, printed: Any):
    told = partial(printed, tune.main)
    Fake(us=lambda c, run: 99.0).search(board, per_round=20)
    best = search.Entry("d64-x", replace(INCUMBENT, stages=3))
    for _ in range(2):
        best.see(Sighting({SHORT.name: 90.0}, {SHORT.name: {INCUMBENT.key: 100.0}}))
    board.entries.append(best)
    board.save()
    text = told("--report", "--leaderboard", board.path).out
    assert "gpu a GPU, arch 90" in text and "21 candidates" in text and "; 12 of 21 that ran" in text
    (first,) = [line for line in text.splitlines() if line.startswith("accepted ")]
    assert best.candidate.key in first and " 1.111x " in first
    assert text.splitlines()[-1] == f'fmha_forward("90" "f16;bf16" {best.candidate.key})'
    assert told("--report", "--leaderboard", board.path, "--json").out == board.path.read_text()
    asked = ("--dry-run", "--arch", 90, "--head-dim", 64)
    ((name, lines),) = json.loads(told(*asked, "--json").out).items()
    assert told(*asked).out.splitlines() == lines and lines[0].startswith(f"# {name}: ")
    assert [line.partition("(")[0] for line in lines[1:]] == ["fmha_forward"] * 8


@pytest.mark.parametrize(("arguments", "gpus", "status", "sentence"), [
    ("--dry-run --arch 90 --preset dens", 1, 2, "unknown preset"),
    ("--preset dens", 0, 2, "unknown preset"),  # whether there is a GPU or not
    ("--dry-run --arch 90 --head-dim 48", 0, 2, "no case is left"),
    ("--dry-run --arch 89 --smem 200", 0, 2, "99 KiB of shared memory on sm_89"),
    ("--report --leaderboard nowhere.json", 0, 1, "can't be read"), ("--head-dim 64", 0, 1, "a search needs a GPU"),
    ("--head-dim 64", 1, 1, "is of other sources: make build"),  # whose rows are to be beaten
])  # fmt: skip
def test_a_request_that_cannot_be_followed_is_told(arguments, gpus, status, sentence, printed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(tune.devices, "of_index", lambda index: PRESETS["h200"])
    monkeypatch.setattr(tune, "source_hash", lambda: "other")
    out, error = printed(tune.main, *arguments.split(), status=status)
    assert sentence in error and (out == "" if status == 2 else error.startswith("tune: ") and error.count("\n") == 1)


@pytest.mark.parametrize(("asked", "passes", "told"), [
    *(("EMULATION ON", x, f'odd number from 1 on, and it is "{x}"') for x in ("0", "2", "-1", "03", "1.5", "")),
    ('EMULATION ""', "3", "MMA_PASSES=3 makes kernels slow on purpose and needs CUTLASS_FMHA_EMULATION=ON"),
    ('EMULATION ""', "1", {90}), ("SM120_PROXY 90", "1", {90, 120}),
    *(("EMULATION ON", passes, {89, 90, 120}) for passes in ("1", "15")),
])  # fmt: skip
def test_an_emulation_build_is_all_for_sm_90_and_its_passes_are_odd(
    asked: str, passes: str, told: set[int] | str, tmp_path: Path
):
    answer = building.script(
        tmp_path,
        f'set(CUTLASS_FMHA_{asked})\nset(CUTLASS_FMHA_MMA_PASSES "{passes}")',
        f'include("{ROOT}/cmake/Architectures.cmake")\nfmha_check_emulation()\nforeach(arch 89 90 120)',
        'fmha_code_flags(${arch} flags)\nmessage("${arch}: ${flags}")\nendforeach()',
        'message("${FMHA_EMULATION_DEFINITIONS}")',
    )
    if isinstance(told, str):
        assert answer.returncode and told in " ".join(answer.stderr.split())
    else:
        assert {int(arch) for arch in re.findall(r"^(\d+): .*sm_90", answer.stderr, re.MULTILINE)} == told
        assert answer.returncode == 0 and f"CUTLASS_FMHA_MMA_PASSES={passes}" in answer.stderr


PROGRAM = r"""
#include <cstdio>
#include "emulation.h"
int main() {
  for (int smem, warps; std::scanf("%d %d", &smem, &warps) == 2;) try {
    std::printf("%d\n", cutlass_fmha::emulated_smem_bytes(smem, warps));
  } catch (std::invalid_argument const& error) {
    std::puts(error.what());
  }
}
"""


def blocks_per_sm(smem: int, warps: int, smem_per_sm: int, warps_per_sm: int, most: int) -> int:
    allocated = -(-(smem + KIB) // 128) * 128
    return min(smem_per_sm // allocated, warps_per_sm // warps, most)


def test_padding_is_right_for_every_block_that_fits_and_others_are_errors(tmp_path: Path):
    """An sm_90 holds as many as the GPU that it stands in for: by shared memory, by warps, and by number."""
    (tmp_path / "padding.cpp").write_text(PROGRAM)
    flags = ("-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'src'}", "-o", "padding", "padding.cpp")
    subprocess.run([os.environ.get("CXX") or "c++", *flags], cwd=tmp_path, check=True)
    asked = [(smem, warps) for warps in (1, 2, 4, 8, 9, 12, 16, 48) for smem in range(0, 99 * KIB + 1, 1008)]
    asked += [(49 * KIB, 4), (49 * KIB + 1, 4), (99 * KIB, 8)]  # half of an SM, a byte more, the largest
    emulated = {one: blocks_per_sm(*one, 100 * KIB, 48, 24) for one in asked}
    assert [emulated[one] for one in (*asked[-3:], (0, 16), (0, 1))] == [2, 1, 1, 3, 24]
    lines = "".join(f"{smem} {warps}\n" for smem, warps in (*emulated, (100 * KIB, 8), (0, 49)))
    *answers, too_large, too_many = subprocess.check_output(tmp_path / "padding", input=lines, text=True).splitlines()
    assert too_large == "a block of 8 warps with 102400 bytes of shared memory fits no SM of sm_89 or sm_120"
    assert "a block of 49 warps" in too_many
    for ((smem, warps), expected), padded in zip(emulated.items(), map(int, answers), strict=True):
        assert smem <= padded <= 227 * KIB
        assert blocks_per_sm(padded, warps, 228 * KIB, 64, 32) == expected, (smem, warps, padded)


KERNEL = """
#include "forward/kernel.cuh"
using namespace cutlass_fmha;
constexpr ForwardConfig config{{.arch = 90, .dtype = DType::bfloat16, .head_dim = 64, .tile_m = 64,
    .tile_n = 64, .warps = 4, .min_blocks = 2}, {.stages = 1, .q_in_registers = true, .ping_pong = false,
    .copy = Copy::cp_async_16}};
extern "C" __global__ void __launch_bounds__(config.threads(), config.min_blocks)
    row(__grid_constant__ ForwardParams const params) { forward<config>(params); }
"""


def test_extra_passes_multiply_the_mma_of_a_main_loop_and_leave_the_rest_alone(tmp_path: Path):
    probe = [sys.executable, str(ROOT / "build_backend" / "probe.py"), "cutlass"]
    include = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    assert include, "CUTLASS was not found: pip install --no-deps -r requirements/cutlass.txt"
    (tmp_path / "row.cu").write_text(KERNEL)
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90,code=sm_90", "-cubin"]
    flags += [f"-I{ROOT / 'src'}", f"-I{include}", tmp_path / "row.cu", "-o"]
    for passes in (1, 3):
        cubin.run_tool("nvcc", f"-DCUTLASS_FMHA_MMA_PASSES={passes}", *flags, tmp_path / f"{passes}.cubin")
    (once,), (thrice,) = (cubin.read_kernels(tmp_path / f"{passes}.cubin") for passes in (1, 3))
    before, after = (mainloop.main_loop(kernel).counts for kernel in (once, thrice))
    assert before["mma"] > 0 and after["mma"] == 3 * before["mma"]
    others = [sum(c.values()) - c["mma"] - c["nop"] for c in (before, after)]
    assert abs(others[1] - others[0]) <= 0.05 * others[0], (before, after)
    assert thrice.count("LDL", "STL") == 0
    # The operands come from constant memory, so that ptxas knows nothing of them.
    for kernel in (once, thrice):
        assert ("[0x3]" in " ".join(i.operands for i in kernel.code if i.base == "LDC")) == (kernel is thrice)
    # Every accumulator that the loop writes, it reads: no repeated mma starts from zero or drops its result.
    extra = [[x.strip() for x in i.operands.split(",")] for i in thrice.code if i.base == "HMMA"]
    assert sum(operands[0] == operands[3] for operands in extra) > 0.6 * len(extra)


def test_every_case_has_rows_and_they_are_built_or_it_is_named():
    asked = list(emulate.cases())
    known = {*emulate.ROWS, "scored", "few_query_scored", "wide_scored"}
    assert {name for names, _ in asked for name in names} == known
    built = emulate.rows_of(tuple(emulate.ROWS))
    for names, case in asked:
        few = names[0] == "few_query"
        if not few and names[0] != "wide" and case.group != "packed":
            assert case.batch * case.num_heads * case.seqlen_q // 256 % 132 == 0
        for arch in (89, 120):
            of_arch = [row for row in (*_C.rows(), *_C.backward_rows()) if row.arch == arch]
            rows = emulate.rows_for(names[:2] if few else names, case, of_arch)
            wanted = [row for row in rows if not re.search("_element|_ds$|^bwd_.*_scored", row)]
            assert wanted and all(re.search(built, row) for row in wanted), (case.name, arch)
            assert any(re.search(emulate.ROWS[names[0]], row) for row in wanted), (case.name, arch)
    with pytest.raises(SystemExit, match="no row of sm_89 of 2 cases: a, c"):
        emulate.require({"a": (), "b": ("row",), "c": ()}, "row of sm_89")
    emulate.require({"b": ("row",)}, "row of sm_89")
    # A family alone builds its rows and plain ones, those of FlashAttention-2, too, where there are.
    command = [building.find_program("cmake"), "-D", f"CUTLASS_FMHA_MANIFEST={ROOT}/tools/tuning/beside.cmake"]
    command += ["-P", str(ROOT / "cmake" / "list_rows.cmake")]
    names = [line.split()[0] for line in subprocess.check_output(command, text=True).splitlines()]
    built = {x: [name for name in names if re.search(emulate.rows_of([x]), name)] for x in emulate.ROWS}
    for family, arch in itertools.product(built, (89, 120)):
        of_arch = [name for name in built[family] if f"_sm{arch}_" in name]
        assert any(re.search(emulate.ROWS[family], name) for name in of_arch)
        assert any(f"fwd_sm{arch}_bf16_d128_m256" in name for name in of_arch)
    of_sm_89 = [x for x in built["backward"] if x.startswith("bwd_sm89")]
    # At head dim 64 it is a row.
    assert [x for x in of_sm_89 if "_fa2" in x] == ["bwd_sm89_bf16_d128_m64n64w4_fa2"] and len(of_sm_89) == 3 + 1


def test_gradients_are_timed_by_the_row_that_is_named():
    """What the benchmark calls takes each row's name to the launch, and a row of no backward is refused."""
    of_backward = [case for names, case in emulate.cases() if names == ("backward",)]
    for gpu, case in itertools.product(("l4", "rtxpro6000"), of_backward):
        device = PRESETS[gpu]
        of_arch = [row for row in _C.backward_rows() if row.arch == emulate.ARCHITECTURES[device.capability]]
        assert case.flop == 5 * 2 * case.num_heads * case.visible_pairs * case.head_dim
        shape = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
        q, k, v, out, dout = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(5))
        lse = torch.empty(case.batch, case.num_heads, case.seqlen_q, device="meta")
        about = (lse, None, 0.1, "bottom-right" if case.causal else "none", {}, (True, True, True, False, False))
        launch = partial(gradients.launch, dout, (q, k, v), out, *about, device=device)
        rows = emulate.rows_for(("backward",), case, of_arch)
        assert len(rows) >= 2
        for row in rows:
            launch(row=row)
        with pytest.raises(ValueError, match="is not a row"):
            launch(row="fwd")


def entry(case: str, row: str, share: float, **more: Any) -> dict[str, Any]:
    figures = {"us": 1 / share, "tflops": 200 * share, "share": share, "error_ratio": 0.5}
    return {"family": "plain", "case": case, "row": row, "plain": None, **figures, **more}


def test_families_that_are_asked_for_are_told_beside_plain_rows(printed: Any, monkeypatch):
    refused = {"family": "ranged", "case": "packed", "row": "other", "plain": "dense", "reason": "it is odd"}
    entries = [entry("dense", "slow", 0.5), entry("dense", "fast", 0.9)]
    entries += [refused, entry("packed", "ranged", 0.88, family="ranged", plain="dense", error_ratio=float("nan"))]
    found = {"passes": 3, "arch": 89, "machine": {"gpu": "an H200"}, "entries": entries, "stack": {"slow": 64}}
    measure = mock.Mock(side_effect=[found, BuildError("no row of sm_89 of 4 cases")])
    monkeypatch.setattr(emulate, "measure_families", measure)
    told = printed(emulate.main, "l4", "--families").out
    assert "A MODEL, made of an H200" in told and "divided by 3 passes" in told
    lines = [line.split() for line in told.splitlines()[-4:]]
    assert [line[1] for line in lines] == ["fast", "slow", "ranged", "other"]
    assert lines[1][-4:] == ["64", "B", "of", "stack"]
    assert lines[2][-4:] == ["88.0", "%", "-2.0", "WRONG"] and lines[3][-3:] == ["it", "is", "odd"]
    told = printed(emulate.main, "rtx4090", "--families", "backward", "wide", status=1).err
    assert told == "emulate: no row of sm_89 of 4 cases\n"
    of_search = printed(emulate.main, "l4", "--report", "--leaderboard", "nowhere", status=1).err
    assert of_search.startswith("emulate: nowhere can't be read") and of_search.count("\n") == 1
    asked = [(*call.args[:2], call.args[3]) for call in measure.call_args_list]
    assert asked == [(89, 3, tuple(emulate.ROWS)), (89, 5, ["backward", "wide"])]
