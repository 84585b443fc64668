"""The parity tests' own parts, with fake kernels: what launches pack, what is noticed, what is reported."""

import itertools
import json
import math
import os
import pkgutil
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import parity_run
import pytest
import torch
from fake_build import make_build
from fake_kernels import FakeKernels
from hypothesis import given, settings
from launches import Launch
from oracle import Errors
from parity_report import ParityReport
from problems import DEFAULTS, Problem, problems

BUILD = make_build((89,))
ROWS = [row for row in BUILD.rows if row.takes_features and row.dtype == "float16"]
ROW = next(row for row in ROWS if row.head_dim == 256)


@pytest.fixture
def kernels(monkeypatch) -> FakeKernels:
    fake = FakeKernels(BUILD)
    fake.install(monkeypatch)
    monkeypatch.setattr(gpu, "unusable", lambda: None)
    monkeypatch.setattr(gpu, "scored_rows", lambda: ROWS)
    monkeypatch.setattr(gpu, "simulated", lambda: True)
    monkeypatch.setattr(gpu, "rows_arch", lambda: 89)
    torch.set_num_threads(1)
    return fake


def test_drawn_problems_are_of_every_kind():
    seen: set[str] = set()

    @settings(max_examples=600, derandomize=True, database=None, deadline=None)  # the rarest kind is one in 60
    @given(problem=problems())
    def draw(problem: Problem) -> None:
        seen.update(problem.features)
        assert eval(str(problem)) == problem  # what is printed can be run again

    draw()
    kinds = {"splits", "top-left", "bottom-right", "other head_dim_v", "odd head dim", "grouped heads", "scale"}
    assert kinds | {name for name, value in DEFAULTS.items() if not value} - {"seed"} <= seen


#: A field that a kernel forgets, and a problem that shows it.
FORGOTTEN = {
    "window_left": Problem(40, 60, window=(5, -1)),
    "bottom_right": Problem(40, 60, causal="bottom-right"),
    "mask": Problem(mask=("bhqk", "plain")),
    "bias": Problem(bias=("bhqk", "float32", "plain")),
    "prefix_lengths": Problem(60, 60, causal="top-left", prefix=True),
    "block_counts": Problem(70, 200, blocks=(64, 64)),
    "softcap": Problem(softcap=0.5), "alibi_slopes": Problem(alibi="h"), "sinks": Problem(sinks="high"),
    "dropout_threshold": Problem(dropout=0.5), "seqused_q": Problem(used_q=True, seed=3),
    "seqused_k": Problem(used_k=True, seed=3), "leftpad_k": Problem(leftpad=True, seed=3),
    "batch_index_k": Problem(indexed=True, batch=4),
}  # fmt: skip


def test_a_field_that_a_kernel_forgets_outputs_that_nobody_writes_and_stray_writes_are_noticed(kernels: FakeKernels):
    for name, problem in FORGOTTEN.items():
        launch = Launch.of(ROW, problem, "cpu")
        launch.check()
        assert (launch.plan.splits, launch.plan.pack) == (1, 1)
        setattr(launch.plan, name, -1 if name.startswith("window") else type(getattr(launch.plan, name))(0))
        launch.run()
        with pytest.raises(AssertionError):
            launch.errors().check()
    launch = Launch.of(ROW, Problem(packed_q=True, out_layout="padded"), "cpu")
    with pytest.raises(AssertionError):
        launch.errors().check()
    launch.check()
    view, intact = launch.out.view, launch.out.buffer.clone()
    for beside in (-1, view.shape[-1], view.stride(0) * len(view)):
        launch.out.buffer[view.storage_offset() + beside] = 0.0
        with pytest.raises(AssertionError, match="wrote outside its outputs"):
            launch.check()
        launch.out.buffer.copy_(intact)


ALONE = ("--processes", "1", "--longest", "60")


def reports(directory: Path, said: list[str]) -> tuple[int, dict[str, Any]]:
    """What a run returned, and the newest report."""
    status = parity_run.main([*ALONE, "--report", str(directory), *said])
    path = max(directory.glob("*.json"), key=os.path.getmtime)
    assert str(directory) not in path.read_text()
    return status, json.loads(path.read_text())


def test_a_long_run_counts_what_it_drew(kernels: FakeKernels, tmp_path):
    (status, content), (_, again) = (reports(tmp_path, ["--problems", "60", "--seed", "3"]) for _ in range(2))
    assert status == 0 and content["passed"] and content["problems"] == 60 == sum(content["rows"].values())
    assert set(content["rows"]) == {row.name for row in ROWS}
    assert parity_run.main(["--problems", "1", "--processes", "3", "--longest", "60", "--rows", ROW.name]) == 0
    assert content["features"]["splits"] > 5 and 0 < content["worst_ratio"] <= 1
    assert "CUTLASS_FMHA_SIMULATOR_SEED" not in os.environ  # which whoever runs next would get
    assert (again["features"], again["rows"]) == (content["features"], content["rows"])


def test_a_mismatch_ends_a_run_with_the_line_that_repeats_it(kernels: FakeKernels, monkeypatch, printed):
    right = kernels.features

    def wrong(params, dtype):
        found = right(params, dtype)
        return found | {"softcap": found["softcap"] * 1.5}

    monkeypatch.setattr(kernels, "features", wrong)
    failure = printed(parity_run.main, *ALONE, "--problems", "100", status=1).err
    line = re.search(r"python tools/parity_run.py --rows (\S+) --problem '(.*)'", failure)
    assert line is not None and '"softcap": 0.0' not in line[2]
    assert parity_run.main(["--rows", line[1], "--problem", line[2]]) == 1
    monkeypatch.setattr(kernels, "features", right)
    assert "agrees on 1 rows" in printed(parity_run.main, "--rows", line[1], "--problem", line[2]).out


#: Of each op what a fault changes: of which name, and what it makes of it.
FAULTS: dict[str, tuple[str, Any]] = {
    "rms_norm": ("test_parity_beside.rms_norm", lambda f: lambda *x, eps, **said: f(*x, eps=2 * eps, **said)),
    "gated": ("test_parity_beside.UNITS", lambda units: units | {"gelu": units["gelu_tanh"]}),
    "swiglu_mlp": ("test_parity_beside.swiglu_mlp", lambda f: lambda x, w, *y, **said: f(x, w.flip(0), *y, **said)),
    "rotary_qk": ("cutlass_fmha.rotary_qk", lambda f: lambda *x, cu_seqlens=None, **said: f(*x, **said)),
    "qk_norm_rope": ("cutlass_fmha.qk_norm_rope", lambda f: lambda *x, eps, **said: f(*x, **said)),
    "qk_norm_rope_to_cache": ("cutlass_fmha.qk_norm_rope", lambda f: lambda *x, leftpad_k=None, **said: f(*x, **said)),
    "append": ("test_parity_helpers.append_kv_", lambda f: lambda *x, leftpad_k=None, **said: f(*x, **said)),
}


@pytest.mark.parametrize("op", FAULTS)
def test_a_fault_beside_attention_ends_a_run(kernels: FakeKernels, monkeypatch, tmp_path, printed, op: str):
    said = ["--beside", "--rows", f"^{op}$", "--problems", "60", "--seed", "3"]
    status, content = reports(tmp_path, said)
    assert status == 0 and content["passed"] and content["rows"] == {op: 60} and content["ratios"][op] <= 1
    assert not torch.are_deterministic_algorithms_enabled()
    name, wrong = FAULTS[op]
    with monkeypatch.context() as planted:
        planted.setattr(name, wrong(pkgutil.resolve_name(name)))
        line = shlex.split(printed(parity_run.main, *ALONE, *said, status=1).err.splitlines()[-1])
        assert line[:2] == ["python", "tools/parity_run.py"] and parity_run.main(line[2:]) == 1
    assert parity_run.main(line[2:]) == 0


def test_a_run_that_its_time_or_a_death_ends_has_not_passed(kernels, monkeypatch, tmp_path, capsys, printed):
    now = itertools.count(0.0, 0.5)
    clock = SimpleNamespace(time=lambda: next(now), perf_counter=lambda: 0.0)
    monkeypatch.setattr(parity_run, "time", clock)
    status, content = reports(tmp_path, ["--problems", "60", "--seconds", "5"])
    assert (status, content["passed"], content["problems"], content["wanted"]) == (1, False, 9, 60)
    assert "not whole: 9 of 60 problems ran" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "backward_rows", list)
    monkeypatch.setattr(parity_run, "rows_named", lambda *_: ROWS)
    reports(tmp_path, ["--gradients", "--seconds", "0"])
    assert len(list(tmp_path.glob("*.json"))) == 2  # neither report takes the other's place
    monkeypatch.setattr(torch, "set_num_threads", os._exit)  # what each process begins with
    assert "a process died" in printed(parity_run.main, "--problems", "2", "--processes", "2", status=1).err


def test_a_report_names_the_problem_whose_error_is_no_number():
    report = ParityReport()
    report.record("row", "right", Errors(0.5, 0.5))
    for ratio in (math.nan, 2.0):
        with pytest.raises(AssertionError, match="times the tolerance"):
            report.record("row", f"wrong by {ratio}", Errors(math.inf, ratio))
    assert (report.rows["row"].worst_problem, report.rows["row"].out_ratio) == ("wrong by nan", math.inf)


def test_a_machine_that_can_run_nothing_says_so(monkeypatch, printed, tmp_path):
    monkeypatch.setattr(gpu, "unusable", lambda: "there is no GPU")
    assert printed(parity_run.main, status=2).err == "parity_run: there is no GPU\n"
    monkeypatch.setattr(gpu, "unusable", lambda: None)
    monkeypatch.setattr(gpu, "other_sources", lambda: "built from others")
    said = printed(parity_run.main, "--report", tmp_path, status=2).err
    assert "built from others" in said and not [*tmp_path.iterdir()]
    monkeypatch.setattr(gpu, "scored_rows", list)
    said = printed(parity_run.main, "--rows", "d7", status=2).err
    assert "no scored row under test has 'd7' in its name" in said
