"""A tuner's search from draw to acceptance, on a made-up compiler and GPU: gates, resuming, reports."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fake_tuning
import pytest
import torch
import tune
from fake_tuning import ABOUT, INCUMBENT, FakeBuilder, FakeGpu, session
from tuning import manifest, report
from tuning.candidate import Candidate
from tuning.evaluate import Job
from tuning.leaderboard import FINAL, Entry, Leaderboard, LeaderboardError, kernel_hash
from tuning.session import Plan
from tuning.targets import make_targets

BOTH = ("bfloat16", "float16")


@pytest.fixture
def board(tmp_path: Path) -> Leaderboard:
    return Leaderboard(tmp_path / "board.json", dict(ABOUT))


def entry_of(board: Leaderboard, candidate: Candidate) -> Entry:
    return board.entries["d64-dense", candidate.key]


# ---- the gates, in order -----------------------------------------------------------------------------------


def test_each_candidate_meets_the_fate_it_earns(board: Leaderboard):
    builder = FakeBuilder(
        refuses=lambda c: "static assertion failed" if c.tile_m == 32 else None,
        spills=lambda c, dtypes: "12 loads and stores of local memory" if c.tile_m == 64 else None,
    )
    gpu = FakeGpu(
        us=lambda c, run: 95.0 if c.tile_m == 256 else 104.0,
        wrong=lambda c: "q5 k7: 3 times the tolerance" if c.tile_m == 128 else None,
    )
    session(board, builder, gpu, Plan("random", per_round=50, limit=400)).run()
    expected = {32: "compile", 64: "resources", 128: "parity", 256: "accepted"}
    assert {e.fate for e in board.entries.values()} >= set(expected.values())
    for entry in board.entries.values():
        assert entry.fate == expected.get(entry.candidate.tile_m, "slower"), entry
    reasons = {e.fate: e.reason for e in board.entries.values()}
    assert reasons["compile"] == "static assertion failed"
    assert reasons["resources"] == "12 loads and stores of local memory"
    assert reasons["parity"] == "q5 k7: 3 times the tolerance"
    ran = {candidate for _, candidate, _ in gpu.runs}
    assert not any(candidate.tile_m in (32, 64) for candidate in ran), "what was dropped must not run"


def test_a_gain_is_accepted_when_two_runs_have_seen_it(board: Leaderboard):
    """Two processes and two builds, the second for all dtypes and with the whole parity gate."""
    gpu = FakeGpu(us=lambda c, run: 90.0)
    builder = FakeBuilder()
    session(board, builder, gpu, Plan("random", per_round=2, limit=2)).run()
    assert board.counts() == {"accepted": 2}
    for _, candidate, _ in gpu.runs:
        assert [confirm for _, c, confirm in gpu.runs if c == candidate] == [False, True]
        built = [wanted[candidate] for wanted, _ in builder.built if candidate in wanted]
        assert built == [("bfloat16",), BOTH]
        assert len(entry_of(board, candidate).sightings) == 2
    assert all(rows == {INCUMBENT: ("bfloat16",)} for _, rows in builder.built)


def test_a_gain_that_is_not_seen_again_is_not_accepted(board: Leaderboard):
    gpu = FakeGpu(us=lambda c, run: (90.0, 99.0)[run])
    session(board, FakeBuilder(), gpu, Plan("random", per_round=3, limit=3)).run()
    assert board.counts() == {"unconfirmed": 3}
    assert "1.010x the incumbent's speed (1.03x is asked for)" in next(iter(board.entries.values())).reason


def test_what_only_spills_in_the_other_dtype_is_not_accepted(board: Leaderboard):
    builder = FakeBuilder(spills=lambda c, dtypes: "f16: a stack" if "float16" in dtypes else None)
    session(board, builder, FakeGpu(us=lambda c, run: 90.0), Plan("random", per_round=2, limit=2)).run()
    assert board.counts() == {"resources": 2}


def test_what_only_spills_on_its_own_architecture_is_not_accepted(board: Leaderboard):
    """Where the GPU at hand stands in for another one, the accepted lines are compiled for that one, too."""
    own = FakeBuilder(spills=lambda c, dtypes: "sm_89: 7 spills" if c.stages > 1 else None)
    gpu = FakeGpu(us=lambda c, run: 90.0)
    session(board, FakeBuilder(), gpu, Plan("random", per_round=20, limit=20), own).run()
    assert set(board.counts()) == {"resources", "accepted"}
    assert all((e.fate == "resources") == (e.candidate.stages > 1) for e in board.entries.values())
    assert all(rows == {} for _, rows in own.built)


def test_a_candidate_that_serves_two_problem_sets_is_compiled_once(board: Leaderboard):
    shapes = ["b1_h1_s64_d256_fp16", "b1_h1_s64_d256_bf16"]
    targets = make_targets([], shapes, apart=True)
    builder = FakeBuilder()
    plan = Plan("random", per_round=40, limit=80)
    session(board, builder, FakeGpu(us=lambda c, run: 110.0), plan, targets=targets).run()
    assert sum(len(board.of(shape)) for shape in shapes) == 80
    dtypes = list(builder.built[0][0].values())
    assert dtypes.count(BOTH) > 5 and dtypes.count(("float16",)) > 5
    assert sum(map(len, dtypes)) == 2 * 40


def test_evolution_learns_from_what_ran(board: Leaderboard):
    """Children of the fastest: where three stages are faster, later rounds draw more of those."""
    gpu = FakeGpu(us=lambda c, run: 101.0 if c.stages == 3 else 140.0)
    session(board, FakeBuilder(), gpu, Plan("evolve", seed=1, per_round=20, limit=160)).run()
    entries = list(board.entries.values())
    early, late = (sum(e.candidate.stages == 3 for e in part) for part in (entries[:20], entries[-20:]))
    assert late > 2 * early


def test_the_time_budget_ends_the_search_and_leaves_time_to_confirm(board: Leaderboard):
    now = [0.0]
    builder, gpu = FakeBuilder(), FakeGpu(us=lambda c, run: 90.0)
    said: list[str] = []
    search = session(board, builder, gpu, Plan("random", per_round=2, limit_s=100.0), say=said.append)
    search.clock = lambda: now[0]

    def slow(job: Job) -> None:
        now[0] += 8.0

    gpu.after = slow
    search.run()
    assert 60.0 <= now[0] <= 100.0
    assert set(board.counts()) == {"accepted"}
    assert board.seconds == now[0]
    assert said[0] == "0:00 of 1:40 | 2 drawn | round 1: building 2 candidates"


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_killed_search_goes_on_without_redoing(tmp_path: Path):
    path = tmp_path / "board.json"
    runs: Counter[str] = Counter()
    for kills in (1, 2, 3):
        command = [sys.executable, fake_tuning.__file__, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(40):
                line = process.stdout.readline()
                assert line, "the search ended by itself"
                runs[line.strip()] += 1
            process.kill()
            runs.update(line.strip() for line in process.stdout)  # what it told before it died
        board = Leaderboard.load(path)  # whole, whenever the process was killed
        recorded = {entry.key: len(entry.sightings) for entry in board.entries.values() if entry.sightings}
        assert all(count <= recorded[key] for key, count in runs.items())
        # At each kill, one result may have been recorded and not yet told.
        assert runs.total() <= sum(recorded.values()) <= runs.total() + kills
    assert max(recorded.values()) == 2, "a gain is seen twice, and nothing a third time"
    fates = {key: entry.fate for (_, key), entry in board.entries.items() if entry.fate in FINAL}
    assert set(fates.values()) == {"accepted", "slower"}
    assert all((fate == "accepted") == (Candidate.of_key(key).stages == 3) for key, fate in fates.items())
    (tmp_path / "board.json.new").write_text("half of")
    assert Leaderboard.resume(path, ABOUT).entries == board.entries


@pytest.fixture
def interrupts_raise() -> Iterator[None]:
    """Also where this process was started with interrupts ignored, as a shell starts what it puts behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_raise")
def test_an_interrupt_keeps_what_is_known(board: Leaderboard):
    gpu = FakeGpu(us=lambda c, run: 120.0)

    def interrupt(job: Job) -> None:
        if len(gpu.runs) == 5:
            signal.raise_signal(signal.SIGINT)

    gpu.after = interrupt
    search = session(board, FakeBuilder(), gpu, Plan("random", per_round=4))
    search.clock = lambda: 7.0 * len(gpu.runs)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    kept = Leaderboard.load(board.path)
    assert kept.counts() == {"drawn": 3, "slower": 5}
    assert kept.seconds == 35.0
    drawn = {e.key for e in kept.of("d64-dense", "drawn")}
    again = FakeGpu(us=lambda c, run: 120.0)
    session(kept, FakeBuilder(), again, Plan("random", per_round=4, limit=len(drawn))).run()
    assert {candidate.key for _, candidate, _ in again.runs} == drawn, (
        "what was drawn comes first, nothing twice"
    )


@pytest.mark.parametrize("name", ["gpu", "arch", "mma_passes", "shared_kib", "kernel_hash", "nvcc"])
def test_a_leaderboard_of_something_else_is_not_gone_on_with(board: Leaderboard, name: str):
    board.save()
    assert Leaderboard.resume(board.path, ABOUT).entries == {}
    with pytest.raises(LeaderboardError, match=f"is about {name} .* give another --leaderboard"):
        Leaderboard.resume(board.path, {**ABOUT, name: "other"})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "cutlass_fmha tuning leaderboard", "schema": 99}']
)
def test_what_is_no_leaderboard_is_refused(tmp_path: Path, text: str):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(LeaderboardError, match=r"odd.json is no leaderboard"):
        Leaderboard.load(tmp_path / "odd.json")
    with pytest.raises(LeaderboardError, match="can't be read"):
        Leaderboard.load(tmp_path / "none.json")


def test_a_leaderboard_survives_its_file(board: Leaderboard):
    session(board, FakeBuilder(), FakeGpu(us=lambda c, run: 90.0), Plan("random", per_round=3, limit=3)).run()
    loaded = Leaderboard.load(board.path)
    assert loaded.entries == board.entries
    assert (loaded.targets, loaded.incumbents, loaded.rounds) == (
        board.targets,
        board.incumbents,
        board.rounds,
    )


def test_gains_over_rows_that_have_changed_are_seen_anew(board: Leaderboard):
    plan = Plan("random", per_round=3, limit=3)
    session(board, FakeBuilder(), FakeGpu(us=lambda c, run: 90.0), plan).run()
    cases = board.targets["d64-dense"]
    board.set_target("d64-dense", cases, ["another row"])
    assert board.counts() == {"drawn": 3}
    with pytest.raises(LeaderboardError, match="times of other cases"):
        board.set_target("d64-dense", cases[:1], ["another row"])


def test_the_hash_is_of_the_kernels_and_not_of_the_manifest(tmp_path: Path):
    (tmp_path / "forward").mkdir()
    (tmp_path / "forward" / "kernel.cuh").write_text("a")
    (tmp_path / "templates.cmake").write_text("b")
    first = kernel_hash(tmp_path)
    (tmp_path / "templates.cmake").write_text("c")
    assert kernel_hash(tmp_path) == first
    (tmp_path / "forward" / "kernel.cuh").write_text("c")
    assert kernel_hash(tmp_path) != first


# ---- commands ----------------------------------------------------------------------------------------------


def run_tune(*arguments: object) -> int:
    return tune.main([str(argument) for argument in arguments])


def test_dropped_candidates_are_reported_with_their_reasons(board: Leaderboard):
    builder = FakeBuilder(refuses=lambda c: f"no room for {c.tile_m} rows")
    session(board, builder, FakeGpu(), Plan("random", per_round=10, limit=10)).run()
    assert "10 x compile: no room for N rows" in report.render(board)
    assert "no room for 64 rows" in report.render(board, everything=True)


def test_the_report_and_the_lines_to_take_over(board: Leaderboard, capsys: pytest.CaptureFixture[str]):
    board.about["kernel_hash"] = kernel_hash()
    gpu = FakeGpu(us=lambda c, run: 90.0 if c.tile_m == 192 else 99.0)
    session(board, FakeBuilder(), gpu, Plan("random", per_round=100, limit=300)).run()
    best = board.best("d64-dense")[0].candidate
    assert run_tune("--report", "--leaderboard", board.path) == 0
    text = capsys.readouterr().out
    assert "sm_90 rows on a GPU" in text and "300 candidates" in text
    (first,) = [line for line in text.splitlines() if re.match(r" *1 +accepted", line)]
    assert best.label in first and " 1.111x " in first
    assert INCUMBENT.label in text and "slower ones" in text
    assert run_tune("--report", "--all", "--leaderboard", board.path) == 0
    assert capsys.readouterr().out.count("slower") > 100
    assert run_tune("--accept", "--leaderboard", board.path) == 0
    shown = capsys.readouterr().out
    (line,) = manifest.parse(shown)
    assert (line.archs, line.candidate) == ((90,), best) and f"before: {INCUMBENT.key}" in shown
    board.about["kernel_hash"] = "0" * 64
    board.save()
    assert run_tune("--accept", "--leaderboard", board.path) == 1
    assert "is about kernels 000000000000, and src/ outside the manifest has" in capsys.readouterr().err


def test_a_dry_run_prints_manifest_lines_and_needs_no_gpu(capsys: pytest.CaptureFixture[str]):
    options = (
        "--dry-run",
        "--arch",
        "120",
        "--shape",
        "b1_h8_s4096_d128_bf16",
        "--round",
        "5",
        "--seed",
        "3",
    )
    assert run_tune(*options) == 0
    first = capsys.readouterr().out
    lines = manifest.parse("".join(x.partition("  #")[0] + "\n" for x in first.splitlines()))
    assert len(lines) == 5 and all(line.archs == (120,) and line.candidate.head_dim == 128 for line in lines)
    assert run_tune(*options) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dry-run", "--arch", "90", "--shape", "b1"], "is no shape"),
        (["--dry-run", "--arch", "89", "--smem", "200"], "99 KiB of shared memory on sm_89"),
        (["--dry-run", "--arch", "90", "--shape", "b1_h1_s64_d160_fp16"], "no sm_90 row of head dim 160"),
        (["--report", "--leaderboard", "nowhere.json"], "can't be read"),
    ],
)
def test_a_request_that_cannot_be_followed_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert tune.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("tune: ") and error.count("\n") == 1 and sentence in error


def test_without_a_gpu_a_search_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--preset", "dense", "--head-dim", "64"]) == 1
    assert "a search needs a GPU" in capsys.readouterr().err
