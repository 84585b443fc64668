"""Calibration: which problems are timed, how, the fit, its file, the command, explain's times, tools/holdout.py."""

import functools
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import holdout
import numpy
import pytest
import resources
import torch
from fake_build import L4, Row, make_build
from fake_cuda import L2_BYTES, FakeGpu

import cutlass_fmha
from cutlass_fmha import _C, cli, cost
from cutlass_fmha.calibrate import command, fit, measurements, problems, timing, verdict
from cutlass_fmha.calibrate.timing import RowTime
from cutlass_fmha.cost import PRICES, RowCost, datasheet, store
from cutlass_fmha.dispatch import choose, device, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.problem import CAUSAL, Problem

# An L4 that obeys the cost model at costs that no datasheet knows, and calibrations of it.
BUILD = make_build((89,))
LIMITS = problems.Limits.of_device(L4.sm_count, 24 << 30)
KINDS = measurements.kinds(L4, BUILD)
ROWS_OF_HEAD_DIM_64 = [row for row in BUILD.rows if row.dtype == "float16" and row.head_dim == 64]
pytestmark = pytest.mark.usefixtures("hermetic")


def true_costs(seed: int = 0) -> dict[str, RowCost]:
    """Costs that no datasheet knows, up to 1.6 times more or less than the default: alike in both dtypes."""
    generator = random.Random(seed)
    tiles: dict[str, RowCost] = {}
    for row in BUILD.rows:
        default = datasheet.row_cost(row, L4)
        prices = (getattr(default, name) * generator.uniform(0.6, 1.6) for name in PRICES)
        tiles.setdefault(fit.tile_of(row.name), RowCost(*prices, resident=default.resident))
    return {row.name: tiles[fit.tile_of(row.name)] for row in BUILD.rows}


def fake_gpu(monkeypatch, noise: float = 0.01, seed: int = 0) -> FakeGpu:
    truth, generator = true_costs(seed), random.Random(seed)

    def law(row, problem: Problem) -> float:
        us = cost.predict(row, problem, L4, truth[row.name])
        return max(0.1, us * (1 + noise * generator.uniform(-1, 1)))

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_C, "device_count", lambda: 1)
    monkeypatch.setattr(
        command.gradients, "collect", lambda index, device, limits: []
    )  # tests/test_calibrate_gradients.py
    return FakeGpu(BUILD, L4, law).install(monkeypatch)


def a_calibration(**changes: object) -> store.Calibration:
    kept = [row for row in BUILD.rows if row.head_dim == 64]
    rows = {x.name: store.Fit(datasheet.row_cost(x, L4).scaled(1.25), 0.01, 0.05, 20) for x in kept}
    own = {"gpu": L4.name, "sm_count": L4.sm_count, "package": cutlass_fmha.__version__, "rows": rows}
    own |= {"source_hash": str(_C.build_info()["source_hash"]), "date": "2026-11-20T00:00:00+00:00"}
    return store.Calibration(**{**own, "scale": {"sm89_tile": 1.25}, **changes})


def predicted(row, problem: Problem, calibration: store.Calibration) -> float:
    return cost.predict(row, problem, L4, calibration.cost(row, L4))


def test_problems_are_of_every_kind_within_limits_and_repeat_but_none_of_others():
    drawn = problems.draws(600, "all", KINDS, LIMITS)
    assert len(set(map(problems.shape, drawn))) == 600 and all(LIMITS.allow(problem) for problem in drawn)
    assert {(problem.head_dim, problem.dtype) for problem in drawn} == set(KINDS)
    assert {problem.causal for problem in drawn} == set(CAUSAL)
    assert {problem.num_heads // problem.num_heads_kv for problem in drawn} == {1, 2, 4, 8}
    lengths = sorted(problem.seqlen_q for problem in drawn)
    assert lengths[0] == 1 and lengths[-1] > 8192
    assert 32 < lengths[300] < 1024  # log-uniform: the median is about the geometric mean
    assert sum(problem.seqlen_q == problem.seqlen_k for problem in drawn) > 240
    assert sum(problem.seqlen_q <= 16 < problem.seqlen_k for problem in drawn) > 60
    grid = problems.calibration(KINDS, L4.sm_count, LIMITS, 16)
    first, again, other = (problems.holdout(240, seed, KINDS, LIMITS, grid) for seed in (1, 1, 2))
    assert first == again != other
    for without in (first, [replace(problem, dtype="float32") for problem in first]):  # alike in other dtypes
        rest = problems.holdout(240, 1, KINDS, LIMITS, [*grid, *without])
        assert set(map(problems.shape, rest)).isdisjoint(map(problems.shape, [*grid, *first]))
    # Designed ones grow with the GPU.
    small, large = (problems.designed(64, ["float16", "bfloat16"], sms) for sms in (58, 132))
    assert {problem.dtype for problem in small} == {"float16", "bfloat16"} and len(small) == len(large)
    blocks = [sum(p.batch * p.num_heads for p in found) for found in (small, large)]
    assert 0.3 < blocks[0] / blocks[1] < 0.6


def test_calls_rotate_through_inputs_that_exceed_the_cache_and_a_hopeless_row_is_launched_twice(monkeypatch):
    gpu, rows = fake_gpu(monkeypatch, noise=0.0), ROWS_OF_HEAD_DIM_64
    problem = Problem(2, 64, 64, 4, 2, 64, "float16", "top-left")
    times = timing.RowTimer(0, [problem]).time(problem, rows, give_up=math.inf)
    for row in rows:
        assert times[row.name].us == pytest.approx(cost.predict(row, problem, L4, true_costs()[row.name]))
        assert timing.MIN_ROUNDS <= times[row.name].rounds <= timing.MAX_ROUNDS
    inputs = {p[:3] for name, timed, p in gpu.launches if (name, timed) == (rows[0].name, problem)}
    assert problems.input_bytes(problem) * len(inputs) >= 1.5 * L2_BYTES
    q, k, v = min(inputs)
    assert k - q == 2 * 2 * 64 * 4 * 64 and v - k == 2 * 2 * 64 * 2 * 64  # bytes of Q and of K
    assert all(address % 16 == 0 for addresses in inputs for address in addresses)
    gpu.law = lambda row, problem: 1000.0 if row.copy == "element" and problem.batch > 1 else 100.0
    large = Problem(4, 2048, 2048, 16, 16, 64, "float16")
    times = timing.RowTimer(0, [large]).time(large, rows, give_up=3.0)
    (slow,) = (row.name for row in rows if row.copy == "element")
    assert [name for name, time in times.items() if time.skipped] == [slow]
    assert times[slow].us == pytest.approx(1000)
    assert [launched for name, launched, _ in gpu.launches if name == slow].count(large) == 2
    # Of long calls those count that find the GPU at its power limit.
    gpu.launches.clear()
    gpu.law = lambda row, problem: 1500.0 if len(gpu.launches) > 14 else 1200.0
    (hot,) = timing.RowTimer(0, [large]).time(large, rows[:1]).values()
    assert hot.min_us == pytest.approx(1500) and timing.MAX_ROUNDS < hot.rounds < timing.HOT_ROUNDS
    # V and O have room for a head dim of their own.
    wide, size = Problem(2, 1024, 1024, 8, 8, 64, "float16", head_dim_v=128), 2 * 2 * 1024 * 8 * 128
    timer = timing.RowTimer(0, [wide])
    timer.time(wide, [row for row in BUILD.rows if row.takes_features and row.head_dim == 128][:1])
    values, last = timer.pools["float16"].values, max(p[2] for _, timed, p in gpu.launches if timed == wide)
    assert last + size <= values.data_ptr() + values.nbytes and timer.output.nbytes >= size


def test_timings_survive_their_file_and_a_damaged_one_gets_a_sentence(monkeypatch, tmp_path):
    fake_gpu(monkeypatch)
    path = tmp_path / "t.json"
    taken = measurements.Measurements(measurements.this_machine(0), seed=7, wall_s=1.5)
    taken.calibration = measurements.collect(problems.draws(5, "a", KINDS, LIMITS), 0, BUILD, "a")
    taken.holdout = measurements.collect(problems.draws(4, "b", KINDS, LIMITS), 0, BUILD, "b", give_up=1.1)
    assert any(time.skipped for sample in taken.holdout for time in sample.rows.values())
    measurements.save(taken, path, {"share_right": 1.0})
    found = measurements.load(path)
    assert found.machine == taken.machine and found.machine.device == L4 and found.gradients == []
    assert (found.seed, found.wall_s) == (7, 1.5)
    for kept, sample in zip(found.calibration + found.holdout, taken.calibration + taken.holdout, strict=True):
        assert kept.problem == sample.problem and kept.times == pytest.approx(sample.times, abs=1e-3)
    assert json.loads(path.read_text())["verdict"] == {"share_right": 1.0}
    known = '{"schema": "cutlass_fmha-timings-1"}'
    for text, message in (("{", "holds no timings"), ("[]", "its schema is not"), (known, "damaged .*KeyE")):
        path.write_text(text)
        with pytest.raises(measurements.InvalidTimings, match=message):
            measurements.load(path)


def test_least_squares_are_least_and_not_negative():
    generator = numpy.random.default_rng(1)
    for _ in range(50):
        rows, targets = generator.uniform(0, 1, (9, 4)), generator.uniform(-0.5, 1, 9)
        found = numpy.array(fit.nonnegative_least_squares(rows.tolist(), targets.tolist()))
        assert found.min() >= 0
        near = numpy.maximum(0, found + generator.normal(0, 0.05, (40, 4)))
        assert (((rows @ found - targets) ** 2).sum() <= ((near @ rows.T - targets) ** 2).sum(1) + 1e-12).all()


@functools.cache
def measured() -> tuple[measurements.Machine, list[measurements.Sample]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_gpu(monkeypatch, noise=0.0)
        grid = problems.calibration(KINDS, L4.sm_count, LIMITS, 24)
        return measurements.this_machine(0), measurements.collect(grid, 0, BUILD, "grid", measurements.GIVE_UP)


def of_head_dim_64() -> tuple[measurements.Machine, list[measurements.Sample]]:
    machine, samples = measured()
    return machine, [sample for sample in samples if sample.problem.head_dim == 64]


def with_rows(sample: measurements.Sample, us: Callable[[str, RowTime], float | None]) -> measurements.Sample:
    times = {name: us(name, time) for name, time in sample.rows.items()}
    return replace(sample, rows={x: replace(sample.rows[x], us=t) for x, t in times.items() if t is not None})


def contenders(problem: Problem) -> list:
    return list(choose.contenders(eligibility.eligible_rows(problem, L4, BUILD), problem))


def test_a_fit_recovers_the_model_that_the_timings_come_from():
    found, truth = fit.fit(*measured(), BUILD), true_costs()
    assert {row.name for row in BUILD.rows if not row.takes_features} <= set(found.rows)
    fresh = problems.draws(90, "fresh", KINDS, LIMITS)
    kept = [row for row in BUILD.rows if row.name in found.rows]  # of some scored ones there are too few timings
    assert any(row.takes_features for row in kept)
    for row in kept:
        assert found.rows[row.name].error < 0.01
        assert found.rows[row.name] is found.rows[row.name.replace("_bf16_", "_f16_")]  # dtypes share their timings
        own = [
            p
            for p in fresh
            if row in (contenders(p) if row.takes_features else eligibility.eligible_rows(p, L4, BUILD))
        ]
        exact = ((p, cost.predict(row, p, L4, truth[row.name])) for p in own)
        errors = sorted(abs(predicted(row, p, found) / us - 1) for p, us in exact)
        few = row.copy == "element" or row.takes_features  # those get few timings, being slow or for decoding
        assert not errors or (errors[len(errors) // 2] < 0.02 and errors[-1] < (0.3 if few else 0.1))
    # Shared memory and launch bounds don't tell how many blocks are resident: registers do, which nobody counts.
    tiles = [r for r in BUILD.rows if r.kv_warps == 1 and r.copy != "element" and not r.takes_features]
    right = [found.rows[row.name].cost.resident == truth[row.name].resident for row in tiles]
    assert sum(right) >= 0.8 * len(tiles)


def test_rows_that_take_features_are_timed_where_they_are_in_question_and_ranged_ones_beside_plain_ones(monkeypatch):
    """What these are for, many queries of lengths that the device knows, is not among what is timed."""
    size = {"head_dim": 64, "tile_m": 128, "tile_n": 64, "warps": 8, "smem_bytes": 40 << 10}
    ranged = Row(len(BUILD.rows), 89, "float16", copy="cp_async_16", takes_features=True, ranged=True, **size)
    wider = replace(ranged, index=len(BUILD.rows) + 1, head_dim=96)
    gpu = fake_gpu(monkeypatch)
    gpu.build = build = tables.Table((*BUILD.rows, ranged, wider))  # type: ignore[arg-type]
    gpu.law = lambda row, problem: 1.0 if row.takes_features else 2.0
    decode, prefill = (Problem(2, seqlen_q, 4096, 8, 2, 64, "float16") for seqlen_q in (1, 512))
    samples = measurements.collect([decode, prefill], 0, build, "a")
    timed = [{name for name in sample.rows if build.by_name(name).takes_features} for sample in samples]
    scored = {row.name for row in contenders(decode) if row.takes_features}
    assert timed == [scored | {ranged.name}, {ranged.name}] and scored
    assert timed[0] <= {name for name, _, _ in gpu.launches}
    # Selection takes plain rows there, so that it is not held against the time of a ranged one.
    (pick,) = verdict.judge(samples[1:], L4, build)
    assert pick.best_us == 2.0


def test_neither_what_all_rows_of_a_problem_have_in_common_nor_one_wild_timing_bends_a_price():
    """A GPU that is slow at some sizes, for every row alike, is told as well which row is the best."""
    machine, samples = of_head_dim_64()
    generator = random.Random(3)
    factors = [generator.uniform(1.0, 1.25) for _ in samples]
    slowed = [with_rows(s, lambda _, time, f=f: f * time.us) for s, f in zip(samples, factors, strict=True)]
    found, spread = fit.fit(machine, slowed, BUILD), []  # of what is predicted wrong between a problem's best rows
    for sample in samples:
        near = [(BUILD.by_name(x), us) for x, us in sample.times.items() if us < 1.3 * min(sample.times.values())]
        errors = [predicted(row, sample.problem, found) / us for row, us in near]
        spread += [max(errors) / min(errors) - 1] * (len(near) > 2)
    assert sum(spread) / len(spread) < 0.025
    # Nor does one wild timing.
    name = "fwd_sm89_f16_d64_m64n64w4"
    index = next(i for i, sample in enumerate(samples) if name in sample.times)
    samples[index] = with_rows(samples[index], lambda row, time: time.us * (0.3 if row == name else 1))
    bent = fit.fit(machine, samples, BUILD)
    row = BUILD.by_name(name)
    errors = [predicted(row, x.problem, bent) / x.times[name] - 1 for x in of_head_dim_64()[1] if name in x.times]
    assert max(map(abs, errors)) < 0.1


def test_a_row_with_too_few_timings_keeps_the_default_at_its_kinds_scale():
    """And one of another dtype, which was not timed."""
    machine, samples = of_head_dim_64()
    samples = [sample for sample in samples if sample.problem.dtype == "float16"]
    tile, kept = "fwd_sm89_d64_m64n64w4", 0
    for index, sample in enumerate(samples):
        kept += sum(fit.tile_of(name) == tile for name in sample.rows)
        if kept >= fit.MIN_SAMPLES:
            samples[index] = with_rows(sample, lambda row, time: None if fit.tile_of(row) == tile else time.us)
    found = fit.fit(machine, samples, BUILD)
    row = BUILD.by_name("fwd_sm89_f16_d64_m64n64w4")
    assert {row.name for row in ROWS_OF_HEAD_DIM_64 if not row.takes_features} - set(found.rows) == {row.name}
    assert all(BUILD.by_name(name).dtype == "float16" for name in found.rows)
    assert found.cost(row, L4) == datasheet.row_cost(row, L4).scaled(found.scale["sm89_tile"])


def test_a_calibration_survives_its_file_which_is_whole_or_the_old_one(tmp_path, monkeypatch):
    given, path = a_calibration(), tmp_path / "deep" / "c.json"
    store.save(given, path)
    found = store.loads(path.read_text(), given.origin)
    assert found.rows.keys() == given.rows.keys()
    for name, expected in given.rows.items():
        assert asdict(found.rows[name].cost) == pytest.approx(asdict(expected.cost), rel=1e-3)
    assert replace(found, rows={}) == replace(given, rows={})
    old = path.read_text()
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.save(a_calibration(scale={}), path)
    assert path.read_text() == old and list(path.parent.iterdir()) == [path]


def damaged(**changes: object) -> str:
    content = json.loads(store.dumps(a_calibration()))
    for place, value in changes.items():
        of_a_row = place in (*PRICES, "resident", "error")
        (next(iter(content["rows"].values())) if of_a_row else content)[place] = value
    return json.dumps({name: value for name, value in content.items() if value is not None})


DAMAGES = [
    ("", "it is no JSON"),
    (damaged(resident=0), "0 is no count"),
    ("[" * 100_000, "it is no JSON"),
    (damaged(step=10**400), "int too large"),
    ("[1]", "its schema is not 'cutlass_fmha-costs-"),
    (damaged(schema="cutlass_fmha-costs-2"), "its schema is not 'cutlass_fmha-costs-3'"),
    (damaged(rows=None), "it lacks 'rows'"),
    (damaged(step=-1.0), "-1.0 is no finite number from 0 on"),
    (damaged(step=math.nan), "nan is no finite number"),
    (damaged(step="fast"), "'fast' is no finite number"),
    (damaged(scale={"sm89_tile": 0}), "a scale of 0"),
    (damaged(rows=[]), "'list' object has no attribute"),
    (damaged(gpu="NVIDIA L40S"), "it is of NVIDIA L40S with 58 SMs"),
    (damaged(sm_count=57), "it is of NVIDIA L4 with 57 SMs"),
    (damaged(package="0.0.1"), "it is of cutlass_fmha 0.0.1"),
    (damaged(source_hash="other"), "it is of kernels from other sources"),
]


@pytest.mark.parametrize(("text", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_a_damaged_or_stale_file_is_ignored_with_one_warning(hermetic, caplog, text: str, message: str):
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert [store.for_device(L4) for _ in range(3)] == [store.default(L4)] * 3
    (record,) = caplog.records
    assert message in record.getMessage() and str(path) in record.getMessage()
    assert "`python -m cutlass_fmha calibrate` renews it" in record.getMessage()


def test_without_a_home_or_a_cache_there_is_no_calibration(hermetic, monkeypatch, caplog):
    def is_default() -> bool:
        store.forget()
        return store.for_device(L4) == store.default(L4) and len(caplog.records) == 1

    store.user_file(L4.name, cutlass_fmha.__version__).mkdir(parents=True)  # which can't be read
    assert is_default()
    monkeypatch.setenv(store.CACHE_DIR, str(Path(__file__) / "cache"))
    assert is_default()
    monkeypatch.delenv(store.CACHE_DIR)
    usual = Path.home() / ".cache"
    for named, base in (("", usual), ("/elsewhere", Path("/elsewhere")), ("x", usual)):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert store.cache_directory() == base / "cutlass_fmha"
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert is_default()
    with pytest.raises(FileNotFoundError, match=f"no home directory.* set {store.CACHE_DIR}"):
        store.user_file(L4.name, "1")


def test_the_users_calibration_counts_before_the_shipped_one_and_a_named_one_alone(hermetic, tmp_path, monkeypatch):
    assert store.for_device(L4) == store.default(L4)
    shipped, named = tmp_path / "shipped.json", tmp_path / "named.json"
    store.save(a_calibration(source_hash="of the release", package="the same"), shipped)
    monkeypatch.setattr(store, "shipped_file", lambda gpu: shipped if gpu == L4.name else tmp_path / "absent")
    assert store.for_device(L4) == store.default(L4)  # looked for once
    store.forget()
    assert store.for_device(L4).origin == "measured on NVIDIA L4, shipped with the package"
    assert store.for_device(replace(L4, sm_count=30)).rows == {}  # a part of one
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    assert path == hermetic / f"costs-nvidia-l4-{cutlass_fmha.__version__}.json"
    store.save(a_calibration(), path)
    store.forget()
    found = store.for_device(L4)
    assert found.origin == f"measured on this machine, {path}"
    for tile, factor in (("d128_m64n64w4", 1.25), ("d128_m16n16w8k8", 1.0)):  # the scale of its kind, and none
        row = BUILD.by_name(f"fwd_sm89_f16_{tile}")
        assert found.cost(row, L4) == datasheet.row_cost(row, L4).scaled(factor)
    monkeypatch.setenv(store.WHICH, "off")
    assert store.for_device(L4) == store.default(L4)
    store.save(a_calibration(source_hash="of a build in progress", scale={}), named)
    monkeypatch.setenv(store.WHICH, str(named))
    assert store.for_device(L4).origin == f"{named}, named by {store.WHICH}"
    assert store.for_device(device.PRESETS["rtx4090"]).rows == {}  # it is of another GPU
    for content, said in ((b"{", "it is no JSON"), (b"\xff", "'utf-8' codec can't decode")):
        named.write_bytes(content)
        store.forget()
        with pytest.raises(store.InvalidCalibration, match=f"named.json can't be used: {said}"):
            store.for_device(L4)


def test_a_gpu_that_takes_rows_of_another_architecture_pays_its_own_rates():
    h200, gb10, build = device.PRESETS["h200"], device.PRESETS["gb10"], make_build((89, 120))
    for name in ("fwd_sm89_f16_d128_m256n64w8", "fwd_sm89_f16_d128_m16n16w8k8", "fwd_sm120_f16_d128_m64n64w4"):
        row = build.by_name(name)
        assert datasheet.row_cost(row, h200) == datasheet.row_cost(replace(row, arch=90), h200)
        assert datasheet.row_cost(row, h200) != datasheet.row_cost(row, replace(h200, capability=(8, 9)))
    # The datasheets have no capability 12.1.
    assert datasheet.row_cost(row, gb10) == datasheet.row_cost(row, replace(gb10, capability=(12, 0)))


def test_a_shipped_file_is_valid_and_of_rows_of_the_manifest():
    shipped = list((Path(cutlass_fmha.__file__).parent / "data" / "costs").glob("*.json"))
    assert shipped
    for path in shipped:
        found = store.loads(path.read_text(), "")
        assert path.stem == store.slug(found.gpu) and found.rows and found.scale
        assert len({name.split("_")[1] for name in found.rows}) == 1  # one architecture
        stale = set(found.rows) - resources.manifest_rows().keys()
        assert not stale, f"calibrate {found.gpu} again: these rows are no more"


def test_the_shipped_costs_find_the_row_that_was_measured_to_be_the_fastest():
    """Of these on an H200, with its microseconds in a CUDA graph, full and causal."""
    h200 = device.PRESETS["h200"]
    shipped = store.for_device(h200)
    assert shipped.origin == "measured on NVIDIA H200, shipped with the package"
    build = tables.Table(tuple(row for row in make_build((90,)).rows if row.name in shipped.rows))
    for head_dim, seqlen, tile, *us in (
        (32, 256, "m32n64w8k8", 3.36, 3.56),
        (32, 512, "m32n64w8k8", 4.59, 4.40),
        (64, 512, "m32n32w8k8", 5.16, 4.91),
    ):
        for causal, measured in zip(("none", "bottom-right"), us, strict=True):
            problem = Problem(1, seqlen, seqlen, 8, 8, head_dim, "float16", causal)
            chosen = choose.choose(problem, h200, table=build)
            assert chosen.name == f"fwd_sm90_f16_d{head_dim}_{tile}_pdl"
            assert choose.predicted_us(chosen, problem, h200) == pytest.approx(measured, rel=0.2)


def test_uncalibrated_picks_fail_and_calibrated_ones_pass(hermetic, tmp_path, printed, monkeypatch):
    gpu, path = fake_gpu(monkeypatch, noise=0.0, seed=3), store.user_file(L4.name, cutlass_fmha.__version__)
    monkeypatch.setattr(problems, "DRAWN", 12)
    out, timings, table, again = (tmp_path / name for name in ("out.json", "t.json", "holdout.md", "again.json"))
    text = printed(holdout.main, "--problems", 60, "--with-calibration", 2, "--output", out, status=1).out
    assert "of 60 picks are within 5% of the best row (95% are required)" in text
    assert "Costs: the default for GPUs that were never measured" in text
    content, taken = json.loads(out.read_text()), measurements.load(out)
    assert content["verdict"]["problems"] == 60 and content["verdict"]["share_right"] < 0.95
    shapes = {problems.shape(each.problem) for each in taken.calibration}
    assert taken.seed == 1 and shapes and shapes.isdisjoint(problems.shape(each.problem) for each in taken.holdout)
    gpu.launches.clear()
    text = printed(command.main, "--report", "--timings", timings).out
    assert f"kept in {path}" in text and gpu.launches and "of the picks are within 5% of the best row" in text
    assert all(f"\n{row.name} " in "\n" + text for row in BUILD.rows if not row.takes_features)
    assert (kept := store.for_device(L4)).origin == f"measured on this machine, {path}"
    text = printed(holdout.main, "--evaluate", out, "--markdown", table).out
    assert text.removesuffix("\n") == table.read_text() and str(tmp_path) not in text  # what is committed names no path
    assert f"Costs: measured on NVIDIA L4, {taken.machine.date[:10]}, cutlass_fmha " in text
    assert all(re.search(rf"\n\| +{head_dim} +\| +20 +\|", text) for head_dim in (32, 64, 128))
    printed(command.main, "--from-timings", timings, "--output", again)
    assert store.loads(again.read_text(), "").rows.keys() == kept.rows.keys()


def test_what_could_not_be_used_is_refused_in_a_sentence(printed, monkeypatch, tmp_path):
    def refused(main: Callable[[list[str]], int], *arguments: str) -> str:
        said: str = printed(main, *arguments, status=1).err
        assert said.startswith(f"{'holdout' if main is holdout.main else 'calibrate'}: ") and said.count("\n") == 1
        return said

    absent = str(tmp_path / "absent.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for main, reading in ((holdout.main, "--evaluate"), (command.main, "--from-timings")):
        assert "absent.json holds no timings" in refused(main, reading, absent)
        assert ": a GPU is timed and " in refused(main, "--output", absent)
    fake_gpu(monkeypatch)
    with monkeypatch.context() as forced:
        forced.setenv(device.FORCE_ARCH, "89")
        assert "unset it, or name a file with --output" in refused(command.main)
    with monkeypatch.context() as emulation:
        emulation.setattr(_C, "build_info", lambda: {"emulation": True, "source_hash": "0"})
        assert "this build emulates other GPUs" in refused(command.main)
    monkeypatch.setattr(tables, "this_build", lambda: make_build((120,)))
    assert "holds rows for sm_120 only, none of which NVIDIA L4" in refused(command.main)


def test_explain_measures_every_eligible_row(monkeypatch, printed):
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
    text = printed(cli.main, "explain", "--shape", "1,512,8,64", "--dtype", "float16", "--measure").out
    assert "  measured\n" in text and "       40.0 us  eligible\n" in text
    forced = cutlass_fmha.explain(**asked, row=slow)
    assert forced.lost == 0 and str(forced).endswith("measured: no eligible row is faster")
    for arguments, message in (
        ({"device": "h200"}, "measured on a CUDA device of this machine, and NVIDIA H200 .* is none"),
        ({"device": "cpu"}, "and the CPU is none"),
        ({"arch": 89}, "and NVIDIA GeForce RTX 4090 .* is none"),
        ({"shape": (0, 512, 8, 64)}, "an empty problem launches nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            cutlass_fmha.explain(**{"shape": (1, 512, 8, 64), "measure": True, **arguments})


def test_a_pick_is_judged_against_the_best_row():
    problem = Problem(1, 512, 512, 8, 8, 64, "float16")
    chosen = choose.choose(problem, L4, table=BUILD).name
    other = next(row.name for row in eligibility.eligible_rows(problem, L4, BUILD) if row.name != chosen)
    for chosen_us, right in ((10.4, True), (10.6, False), (50.0, False)):  # the last: hopeless at first sight
        times = {chosen: RowTime(chosen_us, chosen_us, 5, chosen_us == 50.0), other: RowTime(10.0, 10.0, 5, False)}
        (pick,) = verdict.judge([measurements.Sample(problem, times)], L4, BUILD)
        assert (pick.row, pick.best_row, pick.right) == (chosen, other, right)
        assert pick.loss == pytest.approx(chosen_us / 10 - 1)
    # Timings without scored rows judge the others.
    decode = Problem(1, 1, 16384, 32, 8, 128, "float16")
    able = eligibility.eligible_rows(decode, L4, BUILD)
    timed = {row.name: RowTime(10.0, 10.0, 5) for row in able if not row.takes_features}
    (pick,) = verdict.judge([measurements.Sample(decode, timed)], L4, BUILD)
    assert pick.right and not BUILD.by_name(pick.row).scored
    split = choose.choose(decode, L4, table=BUILD).name
    (pick,) = verdict.judge([measurements.Sample(decode, {**timed, split: RowTime(5.0, 5.0, 5)})], L4, BUILD)
    assert pick.row == split


def test_a_recorded_holdout_is_large_good_enough_and_apart_from_the_calibration():
    recorded = list((Path(__file__).resolve().parents[1] / "benchmarks" / "results").glob("holdout-*.json"))
    assert recorded
    for path in recorded:
        taken, found = measurements.load(path), json.loads(path.read_text())["verdict"]
        assert found["problems"] == len(taken.holdout) >= 200 and found["share_right"] >= holdout.REQUIRED, path
        kinds = sorted({(each.problem.head_dim, each.problem.dtype) for each in taken.holdout})
        grid = problems.calibration(kinds, taken.machine.sm_count, taken.machine.limits)
        assert {problems.shape(problem) for problem in grid}.isdisjoint(
            problems.shape(x.problem) for x in taken.holdout
        )


@pytest.mark.gpu
def test_all_rows_of_a_gpu_can_be_measured(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv(store.CACHE_DIR, str(tmp_path))
    problem = Problem(2, 1000, 1000, 8, 8, 64, "float16", "bottom-right")
    found = cutlass_fmha.explain(shape=(2, 1000, 8, 64), dtype="float16", causal=True, device="cuda:0", measure=True)
    assert found.problem == problem and found.measured
    assert found.lost is not None and found.lost >= 0  # how much, others decide who use the GPU now
    measured = [row.measured_us for row in found.rows if row.eligible]
    assert all(us is not None and us > 0 for us in measured)
