"""How a tuner runs candidates: the worker that times them, who is blamed when it dies, the parity gate."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu as launches
import pytest
import torch
from fake_build import make_build
from fake_general import FakeKernels, _at
from fake_tuning import HANG_S, INCUMBENT
from tuning import gates, worker
from tuning.evaluate import EvaluationError, Evaluator, Job
from tuning.leaderboard import Sighting
from tuning.targets import make_targets

from cutlass_fmha.bench import timing

# ---- running candidates, and who ended the process ---------------------------------------------------------

WORKER = """
import json, os, signal, sys
spec = json.load(open(sys.argv[1]))
def tell(event, **fields): print(json.dumps({"event": event, **fields}), flush=True)
behaviour = json.loads(os.environ["BEHAVIOUR"])
if behaviour.get("start"): raise SystemExit(behaviour["start"])
for job in spec["jobs"]:
    tell("begin")
    what = behaviour.get(job["tag"])
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        tell("alive", seconds=-behaviour["hang_s"])  # a step that may take no time
        signal.pause()
    if what == "cuda": tell("failed", reason="CUDA error: an illegal memory access"); sys.exit(3)
    if what == "bug": raise KeyError(job["tag"])
    if what == "wrong": tell("dropped", fate="parity", reason="wrong"); continue
    cases = [case["head_dim"] and "b1_h1_s1_d64_bf16" for case in job["cases"]]
    rows = {case: {key: 100.0 for key in job["incumbents"].values()} for case in cases}
    tell("times", us=dict.fromkeys(cases, 50.0), incumbents_us=rows, quick=False)
"""


def run_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[int, str]) -> list[str]:
    """Fates of six candidates, by what the worker does when it comes to each: -1 is its start."""
    (tmp_path / "worker.py").write_text(WORKER)
    candidates = [replace(INCUMBENT, stages=stages, min_blocks=b) for stages in (1, 3) for b in (1, 2, 3)]
    tagged = {candidates[i].tag: what for i, what in behaviour.items() if i >= 0}
    monkeypatch.setenv("BEHAVIOUR", json.dumps({**tagged, "start": behaviour.get(-1), "hang_s": HANG_S}))
    command = [sys.executable, str(tmp_path / "worker.py")]
    evaluator = Evaluator(tmp_path, 90, hang_s=HANG_S, start_s=HANG_S, command=command)
    target = make_targets([], ["b1_h1_s1_d64_bf16"])[0]
    jobs = [Job(target, candidate, target.dtypes, (INCUMBENT,)) for candidate in candidates]
    fates: dict[str, str] = {}

    def record(job, what, result) -> None:
        assert job.candidate.key not in fates, "told twice"
        fates[job.candidate.key] = what if isinstance(result, Sighting) else f"{what}: {result}"

    evaluator.evaluate(tmp_path / "none.so", jobs, record)
    return [fates[c.key] for c in candidates]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("wrong", "parity: wrong"),
        ("segfault", "crash: ended by signal 11 (SIGSEGV)"),
        ("hang", "crash: no answer within 0 s"),
        ("cuda", "crash: CUDA error: an illegal memory access"),
    ],
)
def test_the_candidate_that_fails_is_found_and_the_others_go_on(
    what: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fates = run_workers(tmp_path, monkeypatch, {1: what, 4: what, 5: what})
    assert fates == ["times", expected, "times", "times", expected, expected]


@pytest.mark.parametrize(
    ("behaviour", "expected"), [({-1: "no GPU here"}, "no GPU here"), ({2: "bug"}, "KeyError: 't[0-9a-f]+'")]
)
def test_a_failure_of_the_tuner_blames_no_candidate(
    behaviour: dict[int, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(EvaluationError, match=expected):
        run_workers(tmp_path, monkeypatch, behaviour)


# ---- the parity gate, on kernels that compute in Python ----------------------------------------------------

ROW = make_build((90,)).templates[7]  # float16, head dim 64, a small tile


class Defect(FakeKernels):
    """A fake kernel with one thing wrong."""

    def __init__(self, what: str) -> None:
        super().__init__(make_build((90,)))
        self.what = what

    def __call__(self, row, params, device, stream) -> None:
        p, template = params.copy(), self.build.templates[row]
        if self.what == "sign":
            p.scale = abs(p.scale)
        if self.what == "diagonal" and p.window_right >= 0:
            p.window_right += 1
        if self.what == "group" and p.num_heads_kv == 2:
            p.num_heads_kv = 1
        super().__call__(row, p, device, stream)
        dtype = getattr(torch, template.dtype)
        if self.what == "outside" and p.batch and p.seqlen_q:
            fake_at(p.o - 2 * template.head_dim, dtype).fill_(0)
        if (
            self.what == "race"
            and len(self.launches) % 3 == 0
            and p.batch * p.seqlen_q * p.seqlen_k * p.num_heads
        ):
            out = fake_at(p.o, dtype)
            out.copy_(torch.nextafter(out, torch.full_like(out, 1.0)))


def fake_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    return _at(address, dtype, (1,), (1,))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", None),
        ("sign", "scale=-0.3.*times the tolerance"),
        ("diagonal", "times the tolerance"),
        ("group", "h4/2.*times the tolerance"),
        ("outside", "wrote outside its outputs"),
        ("race", "3 launches do not agree to the bit"),
    ],
)
def test_the_gate_sees(what: str, expected: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launches._C, "run", Defect(what))
    # Scores of 1e30 are beyond a kernel that computes softmax from its LSE.
    problems = [problem for problem in gates.quick_problems(ROW) if not problem.exact_scores]
    found = gates.failures(ROW, problems, torch.device("cpu"), stream=0)
    if expected is None:
        assert list(found) == []
    else:
        assert any(re.search(expected, line) for line in found)
    assert {p.causal for p in problems} == {"none", "top-left", "bottom-right"}
    assert {(p.scale or 1) < 0 for p in problems} == {True, False}
    assert any(p.num_heads != p.num_heads_kv for p in problems)


def test_acceptance_asks_for_all_of_the_parity_tests_problems():
    listed = {str(problem) for problem in gates.listed() if problem.runs_on(ROW.alignment)}
    assert listed and listed <= {str(problem) for problem in gates.all_problems(ROW)}


# ---- the worker, on a clock that is made up ----------------------------------------------------------------

ROW_A, ROW_B = "a", "b"
#: Microseconds on the short and on the long case.
US = {"look": (150, 90), "two": (90, 106), "fine": (95, 95), ROW_A: (100, 130), ROW_B: (180, 100)}
SHORT, LONG = "b1_h1_s64_d64_fp16", "b1_h1_s128_d64_fp16"


class FakeStand:
    """Timers whose first look is 5 % off."""

    turns: list[list[str]]

    def __init__(self, case: Any) -> None:
        self.long = case.seqlen_q > 64

    def timer(self, row: Any) -> Any:
        us = US[row.tag][self.long]
        return SimpleNamespace(us=us, calls=10, graph_us=10.5 * us)

    @classmethod
    def interleaved(cls, timers: dict[str, Any], budget_s: float) -> dict[str, Any]:
        cls.turns.append(sorted(timers))
        return {name: SimpleNamespace(p50_us=float(timer.us)) for name, timer in timers.items()}


@pytest.mark.parametrize(
    ("tag", "us", "turns"),
    [  # the short case first; what a first look finds far behind is not timed in turns
        ("fine", {SHORT: 95.0, LONG: 95.0}, [["a", "fine"], ["b", "fine"]]),
        ("two", {SHORT: 90.0, LONG: 106.0}, [["a", "two"], ["b", "two"]]),
        ("look", {SHORT: pytest.approx(157.5)}, []),
    ],
)
def test_what_is_far_behind_is_not_timed_further(
    tag: str, us: dict[str, float], turns: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker.Stand, "of", lambda case, device: FakeStand(case))
    monkeypatch.setattr(timing, "time_interleaved", FakeStand.interleaved)
    FakeStand.turns = []
    target = make_targets([], [LONG, SHORT])[0]
    job = {"tag": tag, "cases": [asdict(case) for case in target.cases], "budget_s": 0.1}
    job["incumbents"] = {ROW_A: "key of a", ROW_B: "key of b"}
    rows = {(tag, "float16"): SimpleNamespace(tag=tag) for tag in US}
    found = worker.time_job(job, rows, torch.device("cpu"), lambda event, **fields: None)
    assert (found["us"], FakeStand.turns) == (us, turns)
    assert found["quick"] == (len(us) == 1)
    if turns:
        assert found["incumbents_us"] == {SHORT: {"key of a": 100.0}, LONG: {"key of b": 100.0}}


SPEC = {"arch": 89, "mma_passes": 1, "shared_per_sm": 100 * 1024}


def test_every_dtype_is_judged_and_in_full_for_acceptance(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, bool]] = []
    everything = [object(), object()]
    monkeypatch.setattr(gates, "quick_problems", lambda row: everything[:1])
    monkeypatch.setattr(gates, "all_problems", lambda row: everything)

    def failures(row: Any, problems: list[Any], device: torch.device) -> list[str]:
        asked.append((row.dtype, problems[0] is everything[1]))
        return ["wrong"] if row.tag == "two" and row.dtype == "bfloat16" else []

    monkeypatch.setattr(gates, "failures", failures)
    dtypes = ["float16", "bfloat16"]
    rows = {
        (tag, dtype): SimpleNamespace(tag=tag, dtype=dtype, smem_bytes=1, min_blocks=1)
        for tag in US
        for dtype in dtypes
    }

    def judge(**job: Any) -> list[tuple[str, str]]:
        asked.clear()
        return list(worker.objections(job, rows, SPEC, torch.device("cpu"), lambda event: None))

    assert judge(tag="look", dtypes=["float16"], full_gate=False) == [] and asked == [("float16", False)]
    assert judge(tag="fine", dtypes=dtypes, full_gate=True) == []
    assert asked == [(dtype, second) for dtype in dtypes for second in (False, True)]
    assert judge(tag="two", dtypes=dtypes, full_gate=True)[0] == ("parity", "wrong")


@pytest.mark.parametrize(("arch", "passes", "dropped"), [(89, 1, True), (90, 3, True), (89, 3, False)])
def test_a_launch_that_asks_for_too_much_shared_memory_is_dropped(
    arch: int, passes: int, dropped: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gates, "quick_problems", lambda row: [])
    for size, expected in ((49 * 1024, False), (49 * 1024 + 1, dropped)):
        rows = {("x", "float16"): SimpleNamespace(smem_bytes=size, min_blocks=2)}
        job = {"tag": "x", "dtypes": ["float16"], "full_gate": False}
        spec = {**SPEC, "arch": arch, "mma_passes": passes}
        found = worker.objections(job, rows, spec, torch.device("cpu"), lambda event: None)
        assert [fate for fate, _ in found] == ["resources"] * expected
