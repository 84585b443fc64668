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
import tune
from fake_build import make_build
from fake_general import FakeKernels, _at
from fake_tuning import HANG_S, INCUMBENT
from tuning import gates, worker
from tuning.evaluate import EvaluationError, Evaluator, Job, TargetJobs
from tuning.leaderboard import Sighting

from cutlass_fmha.bench import timing

# ---- running candidates, and who ended the process ---------------------------------------------------------

WORKER = """
import json, os, signal, sys, time
spec = json.load(open(sys.argv[1]))
pipe = os.fdopen(int(sys.argv[2]), "w", buffering=1)
def tell(event, **fields): pipe.write(json.dumps({"event": event, **fields}) + "\\n")
behaviour = json.loads(os.environ["BEHAVIOUR"])
if behaviour.get("start"): raise SystemExit(behaviour["start"])
tell("ready", gpu="none")
for target in spec["targets"]:
    name = target["name"]
    for candidate in target["candidates"]:
        tag = candidate["tag"]
        tell("begin", target=name, tag=tag)
        what = behaviour.get(tag)
        if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hang":
            tell("begin", target=name, tag=tag, seconds=-behaviour["hang_s"])  # a step that may take no time
            signal.pause()
        if what == "cuda": tell("failed", reason="CUDA error: an illegal memory access"); sys.exit(3)
        if what == "bug": raise KeyError(tag)
        tell("gate", target=name, tag=tag, fate="parity", reason="wrong" if what == "wrong" else None)
        if what == "wrong": continue
        tell("begin", target=name, tag=None)
        if what == "late": os.kill(os.getpid(), signal.SIGKILL)
        us = {case["head_dim"] and "b1_h1_s1_d64_bf16": 50.0 for case in target["cases"]}
        rows = {case: {target["incumbents"][0]: 100.0} for case in us}
        tell("times", target=name, tag=tag, us=us, incumbents_us=rows, quick=False)
tell("done")
"""


def run_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[int, str]) -> list[str]:
    """Fates of six candidates, by what the worker does when it comes to each: -1 is its start."""
    (tmp_path / "worker.py").write_text(WORKER)
    candidates = [replace(INCUMBENT, stages=stages, min_blocks=b) for stages in (1, 3) for b in (1, 2, 3)]
    tagged = {candidates[i].tag: what for i, what in behaviour.items() if i >= 0}
    monkeypatch.setenv("BEHAVIOUR", json.dumps({**tagged, "start": behaviour.get(-1), "hang_s": HANG_S}))
    evaluator = Evaluator(tmp_path, 90, hang_s=HANG_S, start_s=HANG_S)
    evaluator.command = [sys.executable, str(tmp_path / "worker.py")]
    target = tune.make_targets([], ["b1_h1_s1_d64_bf16"])[0]
    jobs = tuple(Job(c, target.dtypes) for c in candidates)
    fates: dict[str, str] = {}

    def record(target, candidate, what, result) -> None:
        assert candidate.key not in fates, "told twice"
        fates[candidate.key] = what if isinstance(result, Sighting) else f"{what}: {result}"

    evaluator.evaluate(tmp_path / "none.so", [TargetJobs(target, (INCUMBENT,), jobs, 0.1)], record)
    return [fates[c.key] for c in candidates]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("wrong", "parity: wrong"),
        ("segfault", "crash: ended by signal 11 (SIGSEGV)"),
        ("hang", "crash: no answer within 0 s"),
        ("cuda", "crash: CUDA error: an illegal memory access"),
        ("late", "crash: ended by signal 9 (SIGKILL)"),  # while all ran in turns: found by running them apart
    ],
)
def test_the_candidate_that_fails_is_found_and_the_others_go_on(
    what: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fates = run_workers(tmp_path, monkeypatch, {1: what, 4: what})
    assert fates == ["times", expected, "times", "times", expected, "times"]


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
    found = list(gates.failures(ROW, problems, torch.device("cpu"), stream=0))
    if expected is None:
        assert found == []
    else:
        assert any(re.search(expected, line) for line in found), found
    assert {p.causal for p in problems} == {"none", "top-left", "bottom-right"}
    assert {(p.scale or 1) < 0 for p in problems} == {True, False}
    assert any(p.num_heads != p.num_heads_kv for p in problems)


def test_acceptance_asks_for_all_of_the_parity_tests_problems():
    listed = {str(problem) for problem in gates.listed() if problem.runs_on(ROW.alignment)}
    assert listed and listed <= {str(problem) for problem in gates.all_problems(ROW)}


# ---- timing, on a clock that is made up --------------------------------------------------------------------

SLOW_LOOK, SLOW_ON_TWO, FINE, ROW_A, ROW_B = "look", "two", "fine", "a", "b"
#: Microseconds on the short and on the long case.
US = {SLOW_LOOK: (150, 90), SLOW_ON_TWO: (90, 106), FINE: (95, 95), ROW_A: (100, 130), ROW_B: (180, 100)}


class FakeTimer:
    """A GraphTimer whose first look is 5 % off."""

    def __init__(self, call: Any, sets: int) -> None:
        (launch, *_) = call.args[0]
        self.us = US[launch.row.tag][launch.q.shape[1] > 64]
        self.calls, self.graph_us = 10, 10.5 * self.us


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the worker tells of three candidates and two rows on two cases, the longer one given first."""
    turns: list[list[str]] = []

    def interleaved(timers: dict[str, FakeTimer], budget_s: float) -> dict[str, Any]:
        turns.append(sorted(timers))
        return {name: SimpleNamespace(p50_us=float(timer.us)) for name, timer in timers.items()}

    properties = SimpleNamespace(L2_cache_size=2**16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(timing, "GraphTimer", FakeTimer)
    monkeypatch.setattr(timing, "time_interleaved", interleaved)
    target = tune.make_targets([], ["b1_h1_s128_d64_fp16", "b1_h1_s64_d64_fp16"])[0]
    described = {
        "name": target.name,
        "cases": [asdict(case) for case in target.cases],
        "incumbents": [ROW_A, ROW_B],
        "budget_s": 0.1,
    }
    rows = {(tag, "float16"): SimpleNamespace(tag=tag, head_dim=64, dtype="float16") for tag in US}
    lines: list[dict[str, Any]] = []

    def tell(event: str, **fields: Any) -> None:
        lines.append({"event": event, **fields})

    worker.time_target(described, [SLOW_LOOK, SLOW_ON_TWO, FINE], rows, torch.device("cpu"), tell)
    lines.append({"event": "turns", "turns": turns})
    return lines


def test_what_is_far_behind_is_not_timed_further(told: list[dict[str, Any]]):
    (turns,) = [line["turns"] for line in told if line["event"] == "turns"]
    # The short case first; neither the candidate nor the row that a look finds far behind is timed in turns.
    assert turns == [sorted([SLOW_ON_TWO, FINE, ROW_A]), sorted([SLOW_ON_TWO, FINE, ROW_B])]
    short, long = "b1_h1_s64_d64_fp16", "b1_h1_s128_d64_fp16"
    times = {line["tag"]: line for line in told if line["event"] == "times"}
    assert times[FINE]["us"] == {short: 95.0, long: 95.0}
    assert times[FINE]["incumbents_us"] == {short: {ROW_A: 100.0}, long: {ROW_B: 100.0}}
    assert times[SLOW_LOOK]["us"] == {short: pytest.approx(157.5)}
    assert [times[tag]["quick"] for tag in (FINE, SLOW_ON_TWO, SLOW_LOOK)] == [False, False, True]


def test_each_step_names_the_candidate_at_work(told: list[dict[str, Any]]):
    begun = [line["tag"] for line in told if line["event"] == "begin"]
    assert begun[:6] == [None, None, SLOW_LOOK, SLOW_ON_TWO, FINE, None]
    assert SLOW_LOOK not in begun[6:]


@pytest.mark.parametrize(("arch", "passes", "dropped"), [(89, 1, True), (90, 3, True), (89, 3, False)])
def test_a_launch_that_asks_for_too_much_shared_memory_is_dropped(arch: int, passes: int, dropped: bool):
    sizes = {"fits": (49 * 1024, 2), "not": (49 * 1024 + 1, 2)}
    rows = {
        (tag, "float16"): SimpleNamespace(smem_bytes=size, min_blocks=blocks)
        for tag, (size, blocks) in sizes.items()
    }
    target = {"name": "t", "candidates": [{"tag": tag, "dtypes": ["float16"]} for tag in sizes]}
    spec = {"arch": arch, "mma_passes": passes, "shared_per_sm": 100 * 1024}
    told: list[tuple[str, str]] = []

    def tell(event: str, **fields: Any) -> None:
        told.append((fields["tag"], fields["fate"]))

    fitting = [candidate["tag"] for candidate in worker.check_shared_memory(target, rows, spec, tell)]
    assert (fitting, told) == ((["fits"], [("not", "resources")]) if dropped else (["fits", "not"], []))


def test_only_what_is_correct_is_timed(monkeypatch: pytest.MonkeyPatch):
    """Every dtype is judged, in full for acceptance."""
    asked: list[tuple[str, str, bool]] = []
    everything = [object(), object()]
    monkeypatch.setattr(gates, "quick_problems", lambda row: everything[:1])
    monkeypatch.setattr(gates, "all_problems", lambda row: everything)

    def first_failure(row: Any, problems: list[Any], device: torch.device) -> str | None:
        asked.append((row.tag, row.dtype, problems[0] is everything[1]))
        return "wrong" if (row.tag, row.dtype) == ("two", "bfloat16") else None

    monkeypatch.setattr(gates, "first_failure", first_failure)
    dtypes = ("float16", "bfloat16")
    rows = {(tag, dtype): SimpleNamespace(tag=tag, dtype=dtype) for tag in US for dtype in dtypes}
    candidates = [
        {"tag": "look", "dtypes": ["float16"], "full_gate": False},
        {"tag": "two", "dtypes": dtypes, "full_gate": True},
        {"tag": "fine", "dtypes": dtypes, "full_gate": True},
    ]
    reasons: dict[str, str | None] = {}

    def tell(event: str, **fields: Any) -> None:
        if event == "gate":
            reasons[fields["tag"]] = fields["reason"]

    target = {"name": "t", "candidates": candidates}
    assert worker.gate_target(target, rows, torch.device("cpu"), tell) == ["look", "fine"]
    assert reasons == {"look": None, "two": "wrong", "fine": None}
    assert [(dtype, second) for tag, dtype, second in asked if tag == "fine"] == [
        ("float16", False),
        ("float16", True),
        ("bfloat16", False),
        ("bfloat16", True),
    ]
    assert [dtype for tag, dtype, _ in asked if tag == "look"] == ["float16"]
