"""The oracle of gradients: its two ways agree; right gradients are within its tolerance, wrong ones not."""

import ctypes
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis
import oracle_gradients
import pytest
import torch
from backward_launch import OVERFLOWING, BackwardLaunch, listed
from problems import Problem, problems

from cutlass_fmha import _C

MIXED = [
    Problem(40, 70, "bottom-right", num_heads=4, window=(20, 3), seed=1),
    Problem(33, 50, num_heads=4, batch=3, packed_q=True, packed_k=True, used_q=True, seed=3),
    Problem(20, 30, "top-left", softcap=2.0, dropout=0.3, bias=("hqk", "same", "plain"), alibi="h", seed=5),
    Problem(20, 30, "bottom-right", sinks="normal", mask=("bqk", "plain"), dropout=0.5, prefix=True, seed=6),
]


def row(dtype: str) -> Any:
    """What a problem is fitted to, and the CPU backend computes."""
    said = {"family": "backward", "mma": "m16n8k16", "head_dim": 64, "scored": True, "writes_scores": False}
    return SimpleNamespace(name=None, dtype=dtype, **said)


def launched(dtype: str, problem: Problem, make: Callable[..., BackwardLaunch] = BackwardLaunch.of) -> BackwardLaunch:
    launch = make(row(dtype), problem, "cpu")
    launch.run()
    return launch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_cpu_backend_is_within_the_tolerance(dtype: str):
    """Drawn problems and, where it is tightest, those that rows are run on."""

    def check(problem: Problem) -> None:
        if problem.num_heads:
            launched(dtype, problem).errors().check()

    hypothesis.settings(max_examples=60)(hypothesis.given(problem=problems(longest=120))(check))()
    for problem in listed(row(dtype)) if dtype == "float32" else ():
        check(problem)


WRONG = (lambda x: x.roll(1, -1), lambda x: x * 1.05, lambda x: x * torch.nan)


@pytest.mark.parametrize("problem", MIXED, ids=str)
def test_a_wrong_gradient_is_not(problem: Problem):
    launch = launched("bfloat16", problem)
    right = launch.found
    for name in "qkv":
        rows = right[name].flatten(0, -2)
        largest = rows.norm(dim=-1).argsort(descending=True)
        wrongs = itertools.product(largest[[0, len(rows) // 3], None], WRONG)
        for row, wrong in [*wrongs, (largest[-1:], lambda x: x + 1)]:  # the least of packed rows is nobody's
            found = rows.index_copy(0, row, wrong(rows[row])).view(right[name].shape)
            launch.found = right | {name: found}
            assert not launch.errors().worst <= 1, f"{name}, row {row}"


def test_of_a_sinks_probability_only_what_is_below_the_least_normal_number_may_be_0():
    launch = launched("float32", Problem(1, 1, num_heads=1, num_heads_kv=1, sinks="normal"))
    call, dout = launch.call, launch.dout * 100
    score = float((call.q * call.k).sum()) * call.scale
    for below, is_right in ((80.0, False), (89.0, True)):  # 2e-35 and 2e-39
        call.features["sinks"].fill_(score - below)
        exact = oracle_gradients.reference(call, dout, None)
        assert 1.0 < exact["sinks"].abs() * math.exp(below) < 1e5
        found = {name: torch.zeros(x.shape) if name == "sinks" else x.float() for name, x in exact.items()}
        found = {name: found[name] for name in (*"qkv", "sinks")}
        assert (oracle_gradients.compare(call, found, dout, None).worst <= 1) == is_right


def first_ds(launch: BackwardLaunch) -> torch.Tensor:
    """Of the first sequence, in fp64: [num_heads, queries, keys]."""
    s, dout = next(oracle_gradients.sequences(launch.call)), launch.dout[0].transpose(0, 1).double()
    return oracle_gradients.terms(s, dout, launch.dlse[0], None).ds


def test_only_what_is_beyond_float16_may_not_be_finite():
    """dQ and dK of a dS beyond 65504, whatever the scale makes of it; dV where it is beyond itself."""
    for problem in OVERFLOWING[:2]:
        launch = launched("float16", problem, BackwardLaunch.overflowing)
        right, large = launch.found, first_ds(launch).abs() > 70000.0
        rows = {"q": large.any(2).T, "k": large.any(1).unflatten(0, (2, 2)).any(1).T}
        for name, beyond in rows.items():
            assert beyond.any() and not beyond.all()
            for where, wrong in ((beyond, torch.inf), (beyond, torch.nan), (beyond, 60000.0), (~beyond, torch.inf)):
                found = right[name].clone()
                found[0][where.nonzero()[0].unbind()] = wrong
                launch.found = right | {name: found}
                assert (launch.errors().worst <= 1) == (where is beyond and not wrong < torch.inf), f"{name} {wrong}"


@pytest.mark.parametrize("dims", ["q", "k", "hk"])
def test_a_bias_may_be_summed_in_fp32_one_addend_after_the_other(dims: str):
    problem = Problem(40, 1500, batch=1, bias=(dims, "float32", "plain"), fill="tiny", seed=1)
    launch = launched("float32", problem)
    order = {"q": (1, 0, 2), "k": (2, 0, 1), "hk": (0, 2, 1)}[dims]
    addends = first_ds(launch).float().permute(order).flatten(len(dims)).unbind(-1)
    for some, agrees in ((addends, True), (addends[1:], False)):
        launch.found["bias"] = sum(some).reshape(launch.found["bias"].shape)  # type: ignore[union-attr]
        assert (launch.errors().worst <= 1) == agrees


@pytest.mark.parametrize(
    ("field", "at", "intact"),
    [("dq", 0, True), ("dq", -2, False), ("dk", 512, False), ("dv", 514, False), ("workspace", -1, False)],
)
def test_what_a_kernel_writes_beside_gradients_and_workspace_is_seen(
    field: str, at: int, intact: bool, monkeypatch: pytest.MonkeyPatch
):
    """In place of a kernel, one byte ``at`` bytes from an address; a gradient has 512."""
    first = next(row for row in _C.backward_rows() if row.dtype == "float16")
    launch = BackwardLaunch.of(first, Problem(4, 4, batch=1, num_heads=2, head_dim=32, head_dim_v=32), "cpu")

    def kernel(index: int, params: Any, device: int, stream: int) -> None:
        ctypes.memset(getattr(params, field) + at, 1, 1)

    simulator = _C.build_info() | {"simulator": True}
    monkeypatch.setattr(_C, "build_info", lambda: simulator)
    monkeypatch.setattr(_C, "run", kernel)
    launch.run()
    assert launch.intact() == intact
    assert all(launch.found[name].isnan().any() for name in "qkv")  # no memory is taken as it was
