"""tools/holdout.py: the verdict on selection's picks, measured on a GPU made of a clock or from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import holdout
import pytest
import torch
from fake_build import L4
from fake_calibration import BUILD, fake_gpu
from fake_cuda import FakeGpu

import cutlass_fmha
from cutlass_fmha.calibrate import fit, measurements, problems, verdict
from cutlass_fmha.calibrate.timing import RowTime
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import choose, eligibility
from cutlass_fmha.dispatch.problem import Problem

PROBLEM = Problem(1, 512, 512, 8, 8, 64, "float16")


@pytest.fixture(autouse=True)
def gpu(monkeypatch, hermetic) -> FakeGpu:
    """An L4 whose rows cost what the default says, give or take half."""
    return fake_gpu(monkeypatch, noise=0.0, seed=3)


def run(*arguments: object) -> int:
    return holdout.main([str(argument) for argument in arguments])


def test_uncalibrated_picks_fail_and_calibrated_ones_pass(tmp_path, capsys, monkeypatch):
    out = tmp_path / "holdout.json"
    assert run("--problems", 60, "--with-calibration", 12, "--output", out) == 1
    text = capsys.readouterr().out
    assert "of 60 picks are within 5% of the best row (95% are required)" in text
    assert "Costs: the default for GPUs that were never measured" in text
    content = json.loads(out.read_text())
    assert content["verdict"]["problems"] == 60 and content["verdict"]["share_right"] < 0.95

    taken = measurements.load(out)
    assert taken.seed == 1
    shapes = {problems.shape(each.problem) for each in taken.calibration}
    assert taken.calibration and not shapes & {problems.shape(each.problem) for each in taken.holdout}
    costs = tmp_path / "costs.json"
    store.save(fit.fit(taken.machine, taken.calibration, BUILD), costs)
    monkeypatch.setenv(store.WHICH, str(costs))
    table = tmp_path / "holdout.md"
    assert run("--evaluate", out, "--markdown", table) == 0
    text = table.read_text()
    assert text == capsys.readouterr().out.removesuffix("\n")
    assert f"Costs: measured on NVIDIA L4, {taken.machine.date[:10]}, cutlass_fmha " in text
    assert str(tmp_path) not in text  # what is committed names no path
    for head_dim in (32, 64, 128):
        assert re.search(rf"\n\| +{head_dim} +\| +20 +\|", text)


def test_a_pick_is_judged_against_the_best_row():
    chosen = choose.choose(PROBLEM, L4, table=BUILD).name
    able = [row.name for row in BUILD.rows if not eligibility.reasons(row, PROBLEM, L4, BUILD)]
    other = next(name for name in able if name != chosen)
    for chosen_us, right in ((10.4, True), (10.6, False), (50.0, False)):  # the last: hopeless at first sight
        times = {chosen: RowTime(chosen_us, chosen_us, 5, chosen_us == 50.0), other: RowTime(10.0, 10.0, 5, False)}
        (pick,) = verdict.judge([measurements.Sample(PROBLEM, times)], L4, BUILD)
        assert (pick.row, pick.best_row, pick.right) == (chosen, other, right)
        assert pick.loss == pytest.approx(chosen_us / 10 - 1)


def test_what_can_not_be_done_is_one_sentence(tmp_path, capsys, monkeypatch):
    assert run("--evaluate", tmp_path / "absent.json") == 1
    assert "absent.json holds no timings" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--output", tmp_path / "x.json") == 1
    err = capsys.readouterr().err
    assert err.startswith("holdout: a GPU is timed and ") and len(err.splitlines()) == 1


RECORDED = sorted((Path(__file__).resolve().parents[1] / "benchmarks" / "results").glob("holdout-*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_holdout_is_large_good_enough_and_apart_from_the_calibration(path: Path):
    content = json.loads(path.read_text())
    taken = measurements.load(path)
    assert content["verdict"]["problems"] == len(taken.holdout) >= 200
    assert content["verdict"]["share_right"] >= holdout.REQUIRED
    kinds = sorted({(each.problem.head_dim, each.problem.dtype) for each in taken.holdout})
    grid = problems.calibration(kinds, taken.machine.sm_count, taken.machine.limits)
    shapes = {problems.shape(problem) for problem in grid}
    assert not any(problems.shape(each.problem) in shapes for each in taken.holdout)


@pytest.mark.gpu
def test_a_gpu_can_be_measured(monkeypatch, tmp_path):
    """A tiny run on the real thing: all rows are timed."""
    monkeypatch.undo()
    monkeypatch.setenv(store.CACHE_DIR, str(tmp_path))
    problem = Problem(2, 1000, 1000, 8, 8, 64, "float16", "bottom-right")
    found = cutlass_fmha.explain(shape=(2, 1000, 8, 64), dtype="float16", causal=True, device="cuda:0", measure=True)
    assert found.problem == problem and found.measured and found.lost is not None and found.lost < 1
    measured = [row.measured_us for row in found.rows if row.eligible]
    assert all(us is not None and us > 0 for us in measured)
