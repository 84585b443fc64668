"""Calibration: which problems are timed, how, and what is fitted to the times."""

from __future__ import annotations

import functools
import json
import math
import random
from dataclasses import replace

import pytest
from fake_build import L4, Row
from fake_calibration import BUILD, KINDS, LIMITS, fake_gpu, predicted, true_costs

from cutlass_fmha import cost
from cutlass_fmha.calibrate import fit, measurements, problems, timing, verdict
from cutlass_fmha.cost import datasheet, store
from cutlass_fmha.dispatch import choose, eligibility
from cutlass_fmha.dispatch.problem import CAUSAL, Problem
from cutlass_fmha.dispatch.table import Table

pytestmark = pytest.mark.usefixtures("hermetic")


# ---- problems ----------------------------------------------------------------------------------------------


def test_a_holdout_has_no_problem_of_the_calibration_and_repeats_itself():
    grid = problems.calibration(KINDS, L4.sm_count, LIMITS, 16)
    held_out = problems.holdout(240, 1, KINDS, LIMITS, grid)
    shapes = {problems.shape(problem) for problem in held_out}
    assert len(held_out) == len(shapes) == 240
    assert not shapes & {problems.shape(problem) for problem in grid}
    assert held_out == problems.holdout(240, 1, KINDS, LIMITS, grid)
    assert held_out != problems.holdout(240, 2, KINDS, LIMITS, grid)


def test_drawn_problems_are_of_every_kind_and_within_limits():
    drawn = problems.draws(600, "all", KINDS, LIMITS)
    assert all(LIMITS.allow(problem) for problem in drawn)
    assert {(problem.head_dim, problem.dtype) for problem in drawn} == set(KINDS)
    assert {problem.causal for problem in drawn} == set(CAUSAL)
    assert {problem.num_heads // problem.num_heads_kv for problem in drawn} == {1, 2, 4, 8}
    lengths = sorted(problem.seqlen_q for problem in drawn)
    assert lengths[0] == 1 and lengths[-1] > 8192
    assert 32 < lengths[300] < 1024  # log-uniform: the median is about the geometric mean
    assert sum(problem.seqlen_q == problem.seqlen_k for problem in drawn) > 240
    assert sum(problem.seqlen_q <= 16 < problem.seqlen_k for problem in drawn) > 60


def test_designed_problems_grow_with_the_gpu():
    small = problems.designed(64, ["float16", "bfloat16"], 58)
    large = problems.designed(64, ["float16", "bfloat16"], 132)
    assert {problem.dtype for problem in small} == {"float16", "bfloat16"}
    assert len(small) == len(large) and small != large
    blocks = [sum(p.batch * p.num_heads for p in found) for found in (small, large)]
    assert 0.3 < blocks[0] / blocks[1] < 0.6


# ---- timing ------------------------------------------------------------------------------------------------


def test_calls_rotate_through_inputs_that_exceed_the_cache(monkeypatch):
    gpu = fake_gpu(monkeypatch, noise=0.0)
    problem = Problem(2, 64, 64, 4, 2, 64, "float16", "top-left")
    rows = [row for row in BUILD.rows if row.dtype == "float16" and row.head_dim == 64]
    times = timing.RowTimer(0, [problem]).time(problem, rows, give_up=math.inf)
    for row in rows:
        assert times[row.name].us == pytest.approx(cost.predict(row, problem, L4, true_costs()[row.name]))
        assert timing.MIN_ROUNDS <= times[row.name].rounds <= timing.MAX_ROUNDS
    inputs = {p[:3] for name, timed, p in gpu.launches if (name, timed) == (rows[0].name, problem)}
    assert problems.input_bytes(problem) * len(inputs) >= 1.5 * gpu.l2_bytes
    q, k, v = min(inputs)
    assert k - q == 2 * 2 * 64 * 4 * 64 and v - k == 2 * 2 * 64 * 2 * 64  # bytes of Q and of K
    assert all(address % 16 == 0 for addresses in inputs for address in addresses)


def test_a_hopeless_row_is_launched_once_and_skipped(monkeypatch):
    gpu = fake_gpu(monkeypatch)
    problem = Problem(4, 2048, 2048, 16, 16, 64, "float16")
    rows = {row.name: row for row in BUILD.rows if row.dtype == "float16" and row.head_dim == 64}
    gpu.law = lambda row, problem: 1000.0 if row.copy == "element" and problem.batch > 1 else 100.0
    times = timing.RowTimer(0, [problem]).time(problem, list(rows.values()), give_up=3.0)
    slow = {name for name, row in rows.items() if row.copy == "element"}
    assert {name for name, time in times.items() if time.skipped} == slow
    assert all(times[name].us == pytest.approx(1000) for name in slow)
    launched = [name for name, launched, _ in gpu.launches if launched == problem]
    assert [launched.count(name) for name in slow] == [1]


def test_timings_survive_their_file(monkeypatch, tmp_path):
    fake_gpu(monkeypatch)
    taken = measurements.Measurements(measurements.this_machine(0), seed=7, wall_s=1.5)
    taken.calibration = measurements.collect(problems.draws(5, "a", KINDS, LIMITS), 0, BUILD, "a")
    taken.holdout = measurements.collect(problems.draws(4, "b", KINDS, LIMITS), 0, BUILD, "b", give_up=1.1)
    assert any(time.skipped for sample in taken.holdout for time in sample.rows.values())
    measurements.save(taken, tmp_path / "t.json", {"share_right": 1.0})
    found = measurements.load(tmp_path / "t.json")
    assert found.machine == taken.machine and found.machine.device == L4
    assert (found.seed, found.wall_s) == (7, 1.5)
    for kept, sample in zip(found.calibration + found.holdout, taken.calibration + taken.holdout, strict=True):
        assert kept.problem == sample.problem and kept.times == pytest.approx(sample.times, abs=1e-3)
    assert json.loads((tmp_path / "t.json").read_text())["verdict"] == {"share_right": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no timings"),
        ("[]", "its schema is not"),
        ('{"schema": "cutlass_fmha-timings-1"}', "damaged timings: KeyError"),
    ],
)
def test_damaged_timings_get_a_sentence(tmp_path, text: str, message: str):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(measurements.InvalidTimings, match=message):
        measurements.load(tmp_path / "t.json")
    with pytest.raises(measurements.InvalidTimings, match="holds no timings"):
        measurements.load(tmp_path / "absent.json")


# ---- the fit -----------------------------------------------------------------------------------------------


def test_least_squares_are_least_and_not_negative():
    generator = random.Random(1)
    for _ in range(50):
        rows = [[generator.uniform(0, 1) for _ in range(4)] for _ in range(9)]
        targets = [generator.uniform(-0.5, 1) for _ in rows]

        def loss(x: list[float], rows=rows, targets=targets) -> float:
            pairs = zip(rows, targets, strict=True)
            return sum((sum(a * b for a, b in zip(row, x, strict=True)) - y) ** 2 for row, y in pairs)

        found = fit.nonnegative_least_squares(rows, targets)
        assert min(found) >= 0
        for _ in range(40):
            near = [max(0.0, x + generator.gauss(0, 0.05)) for x in found]
            assert loss(found) <= loss(near) + 1e-12


@functools.cache
def measured(noise: float) -> tuple[measurements.Machine, tuple[measurements.Sample, ...]]:
    """A calibration's timings of the fake GPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_gpu(monkeypatch, noise)
        grid = problems.calibration(KINDS, L4.sm_count, LIMITS, 24)
        samples = measurements.collect(grid, 0, BUILD, "grid", measurements.GIVE_UP)
        return measurements.this_machine(0), tuple(samples)


@functools.cache
def fitted(noise: float = 0.0) -> store.Calibration:
    machine, samples = measured(noise)
    return fit.fit(machine, samples, BUILD)


def test_a_fit_recovers_the_model_that_the_timings_come_from():
    found = fitted()
    assert {row.name for row in BUILD.rows if not row.takes_features} <= set(found.rows)
    assert any(row.takes_features and row.name in found.rows for row in BUILD.rows)
    fresh = problems.draws(90, "fresh", KINDS, LIMITS)
    truth = true_costs()
    for row in BUILD.rows:
        if row.name not in found.rows:  # a scored one that too few of the problems are for
            continue
        assert found.rows[row.name].error < 0.01
        errors = [
            abs(predicted(row, problem, found) / cost.predict(row, problem, L4, truth[row.name]) - 1)
            for problem in fresh
            if row in contenders(problem)
            or (not row.takes_features and not eligibility.reasons(row, problem, L4, BUILD))
        ]
        if not errors:  # a scored one that none of the fresh problems is for
            continue
        assert sorted(errors)[len(errors) // 2] < 0.02
        few = row.copy == "element" or row.takes_features  # those get few timings, being slow or for decoding
        assert max(errors) < (0.3 if few else 0.1)


def contenders(problem: Problem) -> list:
    eligible = [row for row in BUILD.rows if not eligibility.reasons(row, problem, L4, BUILD)]
    return list(choose.contenders(eligible, problem))


def test_scored_rows_are_timed_where_they_are_in_question(monkeypatch):
    gpu = fake_gpu(monkeypatch)
    decode = Problem(2, 1, 4096, 8, 2, 64, "float16")
    prefill = Problem(2, 512, 4096, 8, 2, 64, "float16")
    first, second = measurements.collect([decode, prefill], 0, BUILD, "a")
    timed = {name for name in first.rows if name.endswith("_scored")}
    assert timed == {row.name for row in contenders(decode) if row.takes_features} != set()
    assert not any(name.endswith("_scored") for name in second.rows)
    assert any(name.endswith("_scored") for name, _, _ in gpu.launches)


def test_ranged_rows_are_timed_beside_plain_ones(monkeypatch):
    """What they are for, many queries of lengths that the device knows, is not among what is timed."""
    ranged = Row(
        len(BUILD.rows), 89, "float16", 64, 128, 64, 8, "cp_async_16", 40 << 10, takes_features=True,
        ranged=True,
    )  # fmt: skip
    wider = replace(ranged, index=len(BUILD.rows) + 1, head_dim=96)
    build = Table((*BUILD.rows, ranged, wider))  # type: ignore[arg-type]
    gpu = fake_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "build", build)
    monkeypatch.setattr(gpu, "law", lambda row, problem: 1.0 if row.takes_features else 2.0)
    prefill = Problem(2, 512, 4096, 8, 2, 64, "float16")
    (sample,) = measurements.collect([prefill], 0, build, "a")
    assert ranged.name in sample.rows and wider.name not in sample.rows
    # Selection takes plain rows there, so that it is not held against the time of a ranged one.
    (pick,) = verdict.judge([sample], L4, build)
    assert pick.best_us == 2.0


def test_a_fit_finds_how_many_blocks_are_resident():
    """Which shared memory and launch bounds don't tell: registers do, and nobody counts them beforehand."""
    found = fitted()
    tiles = [r for r in BUILD.rows if r.kv_warps == 1 and r.copy != "element" and not r.takes_features]
    right = [found.rows[row.name].cost.resident == true_costs()[row.name].resident for row in tiles]
    assert sum(right) >= 0.8 * len(tiles)


def test_what_all_rows_of_a_problem_have_in_common_bends_no_price():
    """A GPU that is slow at some sizes, for every row alike, is told as well which row is the best."""
    machine, samples = measured(0.0)
    generator = random.Random(3)
    slowed = []
    for sample in of_head_dim_64(samples):
        factor = generator.uniform(1.0, 1.25)
        rows = {name: replace(time, us=factor * time.us) for name, time in sample.rows.items()}
        slowed.append(replace(sample, rows=rows))
    found = fit.fit(machine, slowed, BUILD)
    picks = verdict.judge(of_head_dim_64(samples), L4, BUILD, found)
    assert verdict.share_right(picks) >= 0.95


def of_head_dim_64(samples) -> list[measurements.Sample]:
    return [sample for sample in samples if sample.problem.head_dim == 64]


def test_one_wild_timing_does_not_bend_a_fit():
    machine, samples = measured(0.0)
    samples = of_head_dim_64(samples)
    name = "fwd_sm89_f16_d64_m64n64w4"
    index = next(i for i, sample in enumerate(samples) if name in sample.times)
    wild = replace(samples[index].rows[name], us=20 * samples[index].rows[name].us)
    samples[index] = replace(samples[index], rows={**samples[index].rows, name: wild})
    bent = fit.fit(machine, samples, BUILD)
    problem = Problem(4, 2048, 2048, 16, 16, 64, "float16", "bottom-right")
    row = BUILD.by_name(name)
    assert predicted(row, problem, bent) == pytest.approx(predicted(row, problem, fitted()), rel=0.03)


def test_dtypes_share_their_timings():
    machine, samples = measured(0.0)
    halves = [sample for sample in of_head_dim_64(samples) if sample.problem.dtype == "float16"]
    found = fit.fit(machine, halves, BUILD)
    assert {BUILD.by_name(name).dtype for name in found.rows} == {"float16"}  # of rows that were timed
    for name, both in fitted().rows.items():
        assert both is fitted().rows[name.replace("_bf16_", "_f16_")]


def test_a_row_with_too_few_timings_keeps_the_default_at_its_kinds_scale():
    machine, samples = measured(0.0)
    samples = of_head_dim_64(samples)
    tile, kept = "fwd_sm89_d64_m64n64w4", 0
    for index, sample in enumerate(samples):
        own = {name for name in sample.rows if fit.tile_of(name) == tile}
        kept += len(own)
        if kept >= fit.MIN_SAMPLES:
            rows = {row: time for row, time in sample.rows.items() if row not in own}
            samples[index] = replace(sample, rows=rows)
    found = fit.fit(machine, samples, BUILD)
    rows = [row for row in BUILD.rows if row.head_dim == 64 and not row.takes_features]
    missing = {row.name for row in rows} - set(found.rows)
    assert {fit.tile_of(name) for name in missing} == {tile}
    for name in missing:
        expected = datasheet.row_cost(BUILD.by_name(name), L4).scaled(found.scale["sm89_tile"])
        assert found.cost(BUILD.by_name(name), L4) == expected
