"""Calibration of rows that compute gradients: which compete, on what they are timed, the fit, and that selection goes
by it."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_build import L4

from cutlass_fmha.calibrate import fit, gradients, measurements
from cutlass_fmha.calibrate.problems import Limits
from cutlass_fmha.calibrate.timing import RowTime
from cutlass_fmha.cost import gradients as cost
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import gradients as selection
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.problem import Problem

LIMITS = Limits.of_device(L4.sm_count, 24 << 30)
LONG, SHORT = 256, 128


def row(name: str, dtype: str, tile_n: int, **changes) -> SimpleNamespace:
    usual = {"family": "backward", "arch": 89, "head_dim": 64, "tile_m": 64, "groups": 1, "tail": 0}
    usual |= {"scored": False, "writes_scores": False}
    return SimpleNamespace(name=name, dtype=dtype, tile_n=tile_n, smem_bytes=99000, alignment=16, **usual | changes)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Two tiles of both dtypes, and what competes with nobody."""
    pairs = [(word, dtype) for dtype, word in (("float16", "f16"), ("bfloat16", "bf16"))]
    made = [row(f"bwd_sm89_{word}_d64_n{n}", dtype, n) for word, dtype in pairs for n in (LONG, SHORT)]
    made += [row("alone", "float16", LONG, head_dim=128), row("scored", "float16", LONG, scored=True)]
    made += [row("ds", "float16", SHORT, writes_scores=True), row("other", "float16", SHORT, arch=90)]
    for index, each in enumerate(made):
        each.index = index
    monkeypatch.setattr(tables, "backward", lambda: tables.Table(tuple(made)))
    monkeypatch.setattr(tables, "query_products", lambda: set())
    monkeypatch.delenv(devices.FORCE_ARCH, raising=False)
    return made


def prices(rows: list[SimpleNamespace], block: float, step: float) -> dict[str, store.Fit]:
    """Other costs than the default's: times as much for a block and a step of the narrow tile."""
    found = {}
    for each in rows:
        price = replace(cost.default_cost(each, L4), launch=9.0)
        if each.tile_n == SHORT:
            price = replace(price, block=block * price.block, step=step * price.step)
        found[each.name] = store.Fit(price, 0.0, 0.0, 9)
    return found


def test_those_compete_that_differ_in_their_tiles_alone_on_problems_within_limits(rows):
    ((first, second),) = gradients.competing(L4, tables.backward())
    assert (first, second) == tuple(rows[:2])
    asked = gradients.problems(first, L4.sm_count, LIMITS)
    assert len(asked) > 5 and {x.causal for x in asked} == {"none", "bottom-right"}
    assert all(x.head_dim == 64 and x.dtype == "float16" and LIMITS.allow(x, gradients.PASSES) for x in asked)
    assert gradients.problems(first, L4.sm_count, Limits(1.0, 1.0)) == []


def test_a_fit_recovers_what_blocks_and_steps_take_in_both_dtypes(rows):
    truth, generator = prices(rows, 1.7, 1.2), random.Random(3)
    samples = []
    for problem in gradients.problems(rows[0], L4.sm_count, LIMITS):
        us = [cost.walks_us(x, problem, L4, truth[x.name].cost) * generator.uniform(0.99, 1.01) for x in rows[:2]]
        samples.append(measurements.Sample(problem, {x.name: RowTime(t, t, 5) for x, t in zip(rows, us, strict=False)}))
    found = fit.fit_gradients(L4, samples, tables.backward())
    assert found.keys() == {x.name for x in rows[:4]}
    for name, fitted in found.items():
        assert fitted.worst < 0.03 and fitted.samples == len(samples)
        assert fitted.cost.step == pytest.approx(truth[name].cost.step, rel=0.05)
    assert fit.fit_gradients(L4, samples[:3], tables.backward()) == {}


def test_selection_goes_by_what_was_measured_if_all_that_compete_were(rows, monkeypatch):
    problem = Problem(8, 512, 512, 12, 12, 64, "float16", "bottom-right")
    kept = {"rows": {}}
    monkeypatch.setattr(store, "for_device", lambda device: replace(store.default(device), **kept))
    route = selection.choose(problem, L4)
    assert route.row is rows[1] and "us predicted, " in route.why and route.why.endswith(f"by {rows[0].name}")
    kept["rows"] = prices(rows, 5.0, 5.0)
    assert selection.choose(problem, L4).row is rows[0]
    del kept["rows"][rows[0].name]
    assert selection.choose(problem, L4).row is rows[1]
    assert selection.choose(problem, L4, rows[0].name).row is rows[0]


def test_timings_of_gradients_survive_their_file_which_older_ones_have_none_of(tmp_path, rows):
    machine = measurements.Machine("L4", (8, 9), 58, 99 << 10, 24 << 30, "0", "", "2", "2026-01-01")
    problem = Problem(1, 64, 64, 4, 4, 64, "float16")
    taken = measurements.Measurements(machine, gradients=[measurements.Sample(problem, {"a": RowTime(2.0, 1.0, 3)})])
    path = tmp_path / "t.json"
    measurements.save(taken, path)
    assert measurements.load(path).gradients == taken.gradients
    text = path.read_text()
    path.write_text(text[: text.index(',\n "gradients"')] + "\n}\n")
    assert measurements.load(path).gradients == []


@pytest.mark.gpu
def test_rows_of_a_gpu_that_compete_are_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    device = devices.of_index(0)
    machine = measurements.this_machine(0)
    samples = gradients.collect(0, device, Limits.of_device(device.sm_count, machine.memory_bytes))
    competing = gradients.competing(device, tables.backward())
    assert {name for sample in samples for name in sample.rows} == {x.name for rows in competing for x in rows}
    found = fit.fit_gradients(device, samples, tables.backward())
    assert found.keys() <= {x.name for x in tables.backward().rows}  # fewer where a busy GPU seemed too slow
    assert all(time.us > 0 for sample in samples for time in sample.rows.values())
