"""An L4 that obeys the cost model at costs that no datasheet knows, and calibrations of it."""

import random

import torch
from fake_build import L4, make_build
from fake_cuda import FakeGpu

import cutlass_fmha
from cutlass_fmha import _C, cost
from cutlass_fmha.calibrate import fit, measurements, problems
from cutlass_fmha.cost import PRICES, RowCost, datasheet, store
from cutlass_fmha.dispatch.problem import Problem

BUILD = make_build((89,))
LIMITS = problems.Limits.of_device(L4.sm_count, 24 << 30)
KINDS = measurements.kinds(L4, BUILD)


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
    return FakeGpu(BUILD, L4, law).install(monkeypatch)


def a_calibration(**changes: object) -> store.Calibration:
    kept = [row for row in BUILD.rows if row.head_dim == 64]
    rows = {x.name: store.Fit(datasheet.row_cost(x, L4).scaled(1.25), 0.01, 0.05, 20) for x in kept}
    own = {"gpu": L4.name, "sm_count": L4.sm_count, "package": cutlass_fmha.__version__, "rows": rows}
    own |= {"source_hash": str(_C.build_info()["source_hash"]), "date": "2026-11-20T00:00:00+00:00"}
    return store.Calibration(**{**own, "scale": {"sm89_tile": 1.25}, **changes})


def predicted(row, problem: Problem, calibration: store.Calibration) -> float:
    return cost.predict(row, problem, L4, calibration.cost(row, L4))
