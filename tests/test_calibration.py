"""Calibration: which problems are timed, how, what is fitted, the file of it, the command, and explain's times."""

from __future__ import annotations

import functools
import json
import logging
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy
import pytest
import resources
import torch
from fake_build import L4, Row, make_build
from fake_calibration import BUILD, KINDS, LIMITS, a_calibration, fake_gpu, predicted, true_costs

import cutlass_fmha
from cutlass_fmha import _C, cli, cost
from cutlass_fmha.calibrate import command, fit, measurements, problems, timing, verdict
from cutlass_fmha.calibrate.timing import RowTime
from cutlass_fmha.cost import PRICES, datasheet, store
from cutlass_fmha.dispatch import choose, device, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.problem import CAUSAL, Problem
from cutlass_fmha.dispatch.table import Table

pytestmark = pytest.mark.usefixtures("hermetic")


# ---- problems ----------------------------------------------------------------------------------------------


def test_a_holdout_has_no_problem_of_the_calibration_and_repeats_itself():
    grid = problems.calibration(KINDS, L4.sm_count, LIMITS, 16)
    held_out, again, other = (problems.holdout(240, seed, KINDS, LIMITS, grid) for seed in (1, 1, 2))
    shapes = {problems.shape(problem) for problem in held_out}
    assert len(held_out) == len(shapes) == 240 and not shapes & {problems.shape(problem) for problem in grid}
    assert held_out == again and held_out != other


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
    small, large = (problems.designed(64, ["float16", "bfloat16"], sms) for sms in (58, 132))
    assert {problem.dtype for problem in small} == {"float16", "bfloat16"} and len(small) == len(large)
    blocks = [sum(p.batch * p.num_heads for p in found) for found in (small, large)]
    assert 0.3 < blocks[0] / blocks[1] < 0.6


# ---- timing ------------------------------------------------------------------------------------------------


def rows_of_head_dim_64() -> list[Row]:
    return [row for row in BUILD.rows if row.dtype == "float16" and row.head_dim == 64]


def test_calls_rotate_through_inputs_that_exceed_the_cache(monkeypatch):
    gpu = fake_gpu(monkeypatch, noise=0.0)
    problem, rows = Problem(2, 64, 64, 4, 2, 64, "float16", "top-left"), rows_of_head_dim_64()
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
    problem, rows = Problem(4, 2048, 2048, 16, 16, 64, "float16"), rows_of_head_dim_64()
    gpu.law = lambda row, problem: 1000.0 if row.copy == "element" and problem.batch > 1 else 100.0
    times = timing.RowTimer(0, [problem]).time(problem, rows, give_up=3.0)
    slow = {row.name for row in rows if row.copy == "element"}
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


def test_damaged_timings_get_a_sentence(tmp_path):
    known = '{"schema": "cutlass_fmha-timings-1"}'
    no_timings = "holds no timings"
    for text, message in (
        (None, no_timings),
        ("{", no_timings),
        ("[]", "its schema is not"),
        (known, "damaged .*KeyE"),
    ):
        if text is not None:
            (tmp_path / "t.json").write_text(text)
        with pytest.raises(measurements.InvalidTimings, match=message):
            measurements.load(tmp_path / "t.json")


# ---- the fit -----------------------------------------------------------------------------------------------


def test_least_squares_are_least_and_not_negative():
    generator = numpy.random.default_rng(1)
    for _ in range(50):
        rows, targets = generator.uniform(0, 1, (9, 4)), generator.uniform(-0.5, 1, 9)
        found = numpy.array(fit.nonnegative_least_squares(rows.tolist(), targets.tolist()))
        assert found.min() >= 0
        near = numpy.maximum(0, found + generator.normal(0, 0.05, (40, 4)))
        assert (((rows @ found - targets) ** 2).sum() <= ((near @ rows.T - targets) ** 2).sum(1) + 1e-12).all()


@functools.cache
def measured() -> tuple[measurements.Machine, tuple[measurements.Sample, ...]]:
    """A calibration's timings of the fake GPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_gpu(monkeypatch, noise=0.0)
        grid = problems.calibration(KINDS, L4.sm_count, LIMITS, 24)
        samples = measurements.collect(grid, 0, BUILD, "grid", measurements.GIVE_UP)
        return measurements.this_machine(0), tuple(samples)


def measured_of_head_dim_64() -> tuple[measurements.Machine, list[measurements.Sample]]:
    machine, samples = measured()
    return machine, [sample for sample in samples if sample.problem.head_dim == 64]


def with_rows(sample: measurements.Sample, us: Callable[[str, RowTime], float | None]) -> measurements.Sample:
    """The sample with other times of its rows, or without those of which there is none."""
    times = {name: us(name, time) for name, time in sample.rows.items()}
    return replace(sample, rows={x: replace(sample.rows[x], us=t) for x, t in times.items() if t is not None})


@functools.cache
def fitted() -> store.Calibration:
    return fit.fit(*measured(), BUILD)


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
            if row in (contenders(problem) if row.takes_features else eligible(problem))
        ]
        if not errors:  # a scored one that none of the fresh problems is for
            continue
        assert sorted(errors)[len(errors) // 2] < 0.02
        few = row.copy == "element" or row.takes_features  # those get few timings, being slow or for decoding
        assert max(errors) < (0.3 if few else 0.1)
    # Shared memory and launch bounds don't tell how many blocks are resident: registers do, which nobody counts.
    tiles = [r for r in BUILD.rows if r.kv_warps == 1 and r.copy != "element" and not r.takes_features]
    right = [found.rows[row.name].cost.resident == truth[row.name].resident for row in tiles]
    assert sum(right) >= 0.8 * len(tiles)


def eligible(problem: Problem) -> list:
    return eligibility.eligible_rows(problem, L4, BUILD)


def contenders(problem: Problem) -> list:
    return list(choose.contenders(eligible(problem), problem))


def test_scored_rows_are_timed_where_they_are_in_question(monkeypatch):
    gpu = fake_gpu(monkeypatch)
    decode, prefill = (Problem(2, seqlen_q, 4096, 8, 2, 64, "float16") for seqlen_q in (1, 512))
    first, second = measurements.collect([decode, prefill], 0, BUILD, "a")
    timed = {name for name in first.rows if name.endswith("_scored")}
    assert timed == {row.name for row in contenders(decode) if row.takes_features} != set()
    assert not any(name.endswith("_scored") for name in second.rows)
    assert any(name.endswith("_scored") for name, _, _ in gpu.launches)


def test_ranged_rows_are_timed_beside_plain_ones(monkeypatch):
    """What they are for, many queries of lengths that the device knows, is not among what is timed."""
    size = {"head_dim": 64, "tile_m": 128, "tile_n": 64, "warps": 8, "smem_bytes": 40 << 10}
    ranged = Row(len(BUILD.rows), 89, "float16", copy="cp_async_16", takes_features=True, ranged=True, **size)
    wider = replace(ranged, index=len(BUILD.rows) + 1, head_dim=96)
    build = Table((*BUILD.rows, ranged, wider))  # type: ignore[arg-type]
    gpu = fake_gpu(monkeypatch)
    gpu.build, gpu.law = build, lambda row, problem: 1.0 if row.takes_features else 2.0
    (sample,) = measurements.collect([Problem(2, 512, 4096, 8, 2, 64, "float16")], 0, build, "a")
    assert ranged.name in sample.rows and wider.name not in sample.rows
    # Selection takes plain rows there, so that it is not held against the time of a ranged one.
    (pick,) = verdict.judge([sample], L4, build)
    assert pick.best_us == 2.0


def test_what_all_rows_of_a_problem_have_in_common_bends_no_price():
    """A GPU that is slow at some sizes, for every row alike, is told as well which row is the best."""
    machine, samples = measured_of_head_dim_64()
    generator = random.Random(3)
    factors = [generator.uniform(1.0, 1.25) for _ in samples]
    slowed = [with_rows(s, lambda _, time, f=f: f * time.us) for s, f in zip(samples, factors, strict=True)]
    picks = verdict.judge(samples, L4, BUILD, fit.fit(machine, slowed, BUILD))
    assert verdict.share_right(picks) >= 0.95


def test_one_wild_timing_does_not_bend_a_fit():
    machine, samples = measured_of_head_dim_64()
    name = "fwd_sm89_f16_d64_m64n64w4"
    index = next(i for i, sample in enumerate(samples) if name in sample.times)
    samples[index] = with_rows(samples[index], lambda row, time: time.us * (20 if row == name else 1))
    bent = fit.fit(machine, samples, BUILD)
    problem = Problem(4, 2048, 2048, 16, 16, 64, "float16", "bottom-right")
    row = BUILD.by_name(name)
    assert predicted(row, problem, bent) == pytest.approx(predicted(row, problem, fitted()), rel=0.03)


def test_dtypes_share_their_timings():
    machine, samples = measured_of_head_dim_64()
    found = fit.fit(machine, [sample for sample in samples if sample.problem.dtype == "float16"], BUILD)
    assert {BUILD.by_name(name).dtype for name in found.rows} == {"float16"}  # of rows that were timed
    for name, both in fitted().rows.items():
        assert both is fitted().rows[name.replace("_bf16_", "_f16_")]


def test_a_row_with_too_few_timings_keeps_the_default_at_its_kinds_scale():
    machine, samples = measured_of_head_dim_64()
    tile, kept = "fwd_sm89_d64_m64n64w4", 0
    for index, sample in enumerate(samples):
        kept += sum(fit.tile_of(name) == tile for name in sample.rows)
        if kept >= fit.MIN_SAMPLES:
            samples[index] = with_rows(sample, lambda row, time: None if fit.tile_of(row) == tile else time.us)
    found = fit.fit(machine, samples, BUILD)
    rows = [row for row in BUILD.rows if row.head_dim == 64 and not row.takes_features]
    missing = {row.name for row in rows} - set(found.rows)
    assert {fit.tile_of(name) for name in missing} == {tile}
    for name in missing:
        expected = datasheet.row_cost(BUILD.by_name(name), L4).scaled(found.scale["sm89_tile"])
        assert found.cost(BUILD.by_name(name), L4) == expected


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_calibration_survives_its_file(tmp_path):
    given, path = a_calibration(), tmp_path / "deep" / "c.json"
    store.save(given, path)
    found = store.loads(path.read_text(), given.origin)
    assert found.rows.keys() == given.rows.keys()
    for name, expected in given.rows.items():
        assert asdict(found.rows[name].cost) == pytest.approx(asdict(expected.cost), rel=1e-3)
    assert replace(found, rows={}) == replace(given, rows={})


def test_a_file_that_can_not_be_written_leaves_the_old_one_and_nothing_temporary(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    store.save(a_calibration(), path)
    old = path.read_text()
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.save(a_calibration(scale={}), path)
    assert path.read_text() == old and list(tmp_path.iterdir()) == [path]


def damaged(**changes: object) -> str:
    content = json.loads(store.dumps(a_calibration()))
    for place, value in changes.items():
        of_a_row = place in (*PRICES, "resident", "error")
        (next(iter(content["rows"].values())) if of_a_row else content)[place] = value
    return json.dumps({name: value for name, value in content.items() if value is not None})


DAMAGES = [
    ("", "it is no JSON"),
    (damaged(resident=0), "0 is no count"),
    ("[1]", "its schema is not 'cutlass_fmha-costs-"),
    (damaged(schema="cutlass_fmha-costs-2"), "its schema is not 'cutlass_fmha-costs-3'"),
    (damaged(rows=None), "it lacks 'rows'"),
    (damaged(step=-1.0), "-1.0 is no finite number from 0 on"),
    (damaged(step=math.nan), "nan is no finite number"),
    (damaged(step="fast"), "'fast' is no finite number"),
    (damaged(scale={"sm89_tile": 0}), "a scale of 0"),
    (damaged(sm_count=0), "0 is no count"),
    (damaged(rows=[]), "'list' object has no attribute"),
    (damaged(gpu="NVIDIA L40S"), "it is of NVIDIA L40S with 58 SMs"),
    (damaged(sm_count=57), "it is of NVIDIA L4 with 57 SMs"),
    (damaged(package="0.0.1"), "it is of cutlass_fmha 0.0.1"),
    (damaged(source_hash="other"), "it is of kernels from other sources"),
]


@pytest.mark.parametrize(("text", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_a_damaged_or_stale_file_is_ignored_with_one_warning(hermetic, caplog, text: str, message: str):
    caplog.set_level(logging.WARNING, logger="cutlass_fmha")
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    problem = Problem(1, 512, 512, 8, 8, 64, "float16")
    expected = choose.choose(problem, L4, table=BUILD, calibration=store.default(L4))
    for _ in range(3):
        assert choose.choose(problem, L4, table=BUILD) == expected
    (record,) = caplog.records
    assert message in record.getMessage() and str(path) in record.getMessage()
    assert "`python -m cutlass_fmha calibrate` renews it" in record.getMessage()


def test_without_a_home_or_a_cache_there_is_no_calibration(hermetic, monkeypatch, caplog):
    store.user_file(L4.name, cutlass_fmha.__version__).mkdir(parents=True)  # which can't be read
    assert store.for_device(L4) == store.default(L4)
    assert len(caplog.records) == 1
    monkeypatch.setenv(store.CACHE_DIR, str(Path(__file__) / "cache"))
    store.forget()
    assert store.for_device(L4).origin == store.default(L4).origin
    monkeypatch.delenv(store.CACHE_DIR)
    usual = Path.home() / ".cache"
    for named, base in (("", usual), ("/elsewhere", Path("/elsewhere")), ("x", usual)):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert store.cache_directory() == base / "cutlass_fmha"
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    store.forget()
    assert store.for_device(L4).origin == store.default(L4).origin
    assert len(caplog.records) == 1
    with pytest.raises(FileNotFoundError, match=f"no home directory.* set {store.CACHE_DIR}"):
        store.user_file(L4.name, "1")


def test_the_users_calibration_counts_and_says_so(hermetic):
    assert store.for_device(L4) == store.default(L4)
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    assert path == hermetic / f"costs-nvidia-l4-{cutlass_fmha.__version__}.json"
    store.save(a_calibration(), path)
    assert store.for_device(L4) == store.default(L4)  # looked for once
    store.forget()
    found = store.for_device(L4)
    assert found.origin == f"measured on this machine, {path}"
    row, absent, split = (
        BUILD.by_name(f"fwd_sm89_f16_{tile}") for tile in ("d64_m64n64w4", "d128_m64n64w4", "d128_m16n16w8k8")
    )
    assert found.cost(row, L4) == found.rows[row.name].cost
    assert found.cost(absent, L4) == datasheet.row_cost(absent, L4).scaled(1.25)  # the scale of its kind
    assert found.cost(split, L4) == datasheet.row_cost(split, L4)
    assert store.for_device(device.PRESETS["rtx4090"]).rows == {}


def test_a_gpu_that_takes_rows_of_another_architecture_pays_its_own_rates():
    h200, gb10, build = device.PRESETS["h200"], device.PRESETS["gb10"], make_build((89, 120))
    for name in ("fwd_sm89_f16_d128_m256n64w8", "fwd_sm89_f16_d128_m16n16w8k8", "fwd_sm120_f16_d128_m64n64w4"):
        row = build.by_name(name)
        assert datasheet.row_cost(row, h200) == datasheet.row_cost(replace(row, arch=90), h200)
        assert datasheet.row_cost(row, h200) != datasheet.row_cost(row, replace(h200, capability=(8, 9)))
    row = build.by_name("fwd_sm120_f16_d128_m64n64w4")  # the datasheets have no capability 12.1
    assert datasheet.row_cost(row, gb10) == datasheet.row_cost(row, replace(gb10, capability=(12, 0)))


def test_the_shipped_calibration_counts_after_the_users_and_a_named_one_alone(hermetic, tmp_path, monkeypatch):
    shipped = a_calibration(source_hash="of the release", package="the same")
    path = tmp_path / "shipped.json"
    store.save(shipped, path)
    monkeypatch.setattr(store, "shipped_file", lambda gpu: path if gpu == L4.name else tmp_path / "absent")
    assert store.for_device(L4).origin == "measured on NVIDIA L4, shipped with the package"
    assert store.for_device(replace(L4, sm_count=30)).rows == {}  # a part of one
    store.save(a_calibration(), store.user_file(L4.name, cutlass_fmha.__version__))
    store.forget()
    assert "measured on this machine" in store.for_device(L4).origin
    monkeypatch.setenv(store.WHICH, "off")
    assert store.for_device(L4) == store.default(L4)
    named = tmp_path / "named.json"
    store.save(a_calibration(source_hash="of a build in progress", scale={}), named)
    monkeypatch.setenv(store.WHICH, str(named))
    assert store.for_device(L4).origin == f"{named}, named by {store.WHICH}"
    assert store.for_device(device.PRESETS["rtx4090"]).rows == {}  # it is of another GPU
    named.write_text("{")
    store.forget()
    with pytest.raises(store.InvalidCalibration, match="named.json can't be used: it is no JSON"):
        store.for_device(L4)


SHIPPED = sorted((Path(cutlass_fmha.__file__).parent / "data" / "costs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_valid_and_of_rows_of_the_manifest(path: Path):
    found = store.loads(path.read_text(), "")
    assert path.stem == store.slug(found.gpu) and found.rows and found.scale
    assert len({name.split("_")[1] for name in found.rows}) == 1  # one architecture
    stale = set(found.rows) - resources.manifest_rows().keys()
    assert not stale, f"calibrate {found.gpu} again: these rows are no more"


# The row that was the fastest of these on an H200, with its microseconds in a CUDA graph, full and causal.
FASTEST_ON_AN_H200 = [
    (32, 256, "m32n64w8k8", 3.36, 3.56),
    (32, 512, "m32n64w8k8", 4.59, 4.40),
    (64, 512, "m32n32w8k8", 5.16, 4.91),
]


@pytest.mark.parametrize(("head_dim", "seqlen", "tile", "full_us", "causal_us"), FASTEST_ON_AN_H200)
def test_the_shipped_costs_find_the_row_that_was_measured_to_be_the_fastest(head_dim, seqlen, tile, full_us, causal_us):
    h200 = device.PRESETS["h200"]
    shipped = store.for_device(h200)
    assert shipped.origin == "measured on NVIDIA H200, shipped with the package"
    build = tables.Table(tuple(row for row in make_build((90,)).rows if row.name in shipped.rows))
    for causal, measured in (("none", full_us), ("bottom-right", causal_us)):
        problem = Problem(1, seqlen, seqlen, 8, 8, head_dim, "float16", causal)
        chosen = choose.choose(problem, h200, table=build)
        assert chosen.name == f"fwd_sm90_f16_d{head_dim}_{tile}_pdl"
        assert choose.predicted_us(chosen, problem, h200) == pytest.approx(measured, rel=0.2)


# ---- the command -------------------------------------------------------------------------------------------


def test_calibrate_measures_fits_and_keeps(hermetic, monkeypatch, capsys, tmp_path):
    gpu = fake_gpu(monkeypatch)
    monkeypatch.setattr(problems, "DRAWN", 4)
    assert cli.main(["calibrate", "--report", "--timings", str(tmp_path / "t.json")]) == 0
    out, err = capsys.readouterr()
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    assert f"kept in {path}" in out and "calibrate: " in err and gpu.launches
    assert all(f"\n{row.name} " in "\n" + out for row in BUILD.rows if not row.takes_features)
    assert "of the picks are within 5% of the best row" in out
    found = store.for_device(L4)
    assert found.origin == f"measured on this machine, {path}"
    assert {row.name for row in BUILD.rows if not row.takes_features} <= set(found.rows)
    again = tmp_path / "again.json"
    assert cli.main(["calibrate", "--from-timings", f"{tmp_path}/t.json", "--output", str(again)]) == 0
    refitted = store.loads(again.read_text(), found.origin)  # from times that were rounded to a nanosecond
    assert replace(refitted, rows={}, scale={}) == replace(found, rows={}, scale={})
    for name, one in refitted.rows.items():
        row = BUILD.by_name(name)
        problem = Problem(2, 1024, 1024, 8, 8, row.head_dim, "float16")
        assert predicted(row, problem, refitted) == pytest.approx(predicted(row, problem, found), rel=0.01)
        assert one.samples == found.rows[name].samples


def test_calibrate_refuses_what_could_not_be_used(capsys, monkeypatch, tmp_path):
    def refused(*arguments: str) -> str:
        assert command.main(list(arguments)) == 1
        return capsys.readouterr().err

    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_available", lambda: False)
        said = refused()
        assert said.startswith("calibrate: a GPU is timed and ") and len(said.splitlines()) == 1
    fake_gpu(monkeypatch)
    with monkeypatch.context() as forced:
        forced.setenv(device.FORCE_ARCH, "89")
        assert "unset it, or name a file with --output" in refused()
    with monkeypatch.context() as emulation:
        emulation.setattr(_C, "build_info", lambda: {"emulation": True, "source_hash": "0"})
        assert "this build emulates other GPUs" in refused()
    monkeypatch.setattr(tables, "this_build", lambda: make_build((120,)))
    assert "holds rows for sm_120 only, none of which NVIDIA L4" in refused()
    assert "absent.json holds no timings" in refused("--from-timings", str(tmp_path / "absent.json"))


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_measures_every_eligible_row(monkeypatch, capsys):
    gpu = fake_gpu(monkeypatch, noise=0.0)
    slow = "fwd_sm89_f16_d64_m256n64w8"
    asked = {"shape": (1, 512, 8, 64), "dtype": "float16", "measure": True}
    found = cutlass_fmha.explain(**asked, device=0)
    assert found.costs == "the default for GPUs that were never measured"
    for row in found.rows:
        expected = cost.predict(row.row, found.problem, L4, true_costs()[row.row.name])
        assert row.measured_us == (pytest.approx(expected) if row.eligible else None)
    gpu.law = lambda row, problem: 30.0 if row.name == slow else 40.0
    found = cutlass_fmha.explain(**asked)
    assert found.winner != slow and found.lost == pytest.approx(1 / 3)
    assert str(found).endswith(f"measured: {slow} is the fastest; the row that runs takes 33.3% longer")
    assert cli.main(["explain", "--shape", "1,512,8,64", "--dtype", "float16", "--measure"]) == 0
    text = capsys.readouterr().out
    assert "  measured\n" in text and "       40.0 us  eligible\n" in text
    forced = cutlass_fmha.explain(**asked, row=slow)
    assert forced.lost == 0 and str(forced).endswith("measured: no eligible row is faster")


def test_explain_measures_only_what_is_there(monkeypatch):
    fake_gpu(monkeypatch)
    for arguments, message in (
        ({"device": "h200"}, "measured on a CUDA device of this machine, and NVIDIA H200 .* is none"),
        ({"device": "cpu"}, "and the CPU is none"),
        ({"arch": 89}, "and NVIDIA GeForce RTX 4090 .* is none"),
        ({"shape": (0, 512, 8, 64)}, "an empty problem launches nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            cutlass_fmha.explain(**{"shape": (1, 512, 8, 64), "measure": True, **arguments})
