"""The benchmarks of surfaces: what they time is what it says, and is held to its bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import serving
import torch
from spied import attention

import cutlass_fmha
from cutlass_fmha.bench import host_time, models, surfaces
from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import transformers as integration

pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")

MASKS, FLASH = models.OURS


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


def test_the_benchmark_of_models_computes_what_eager_attention_does(tmp_path: Path) -> None:
    result = tmp_path / "models.json"
    assert models.main(["--seqlens", "24", "--budget", "0", "--json", str(result)]) == 0
    kept = json.loads(result.read_text())
    cases = [(each.name, mode) for each in models.MODELS for mode in models.MODES if each.pads or mode == "full"]
    assert "unfinished" not in kept and [(each["model"], each["mode"]) for each in kept["results"]] == cases
    for each in kept["results"]:
        ours = {MASKS} if each["model"].startswith("T5") else {MASKS, FLASH}
        assert set(each["us"]) == set(each["error"]) >= {"eager", *ours}
        assert max(each["error"].values()) < 1e-5, each


@pytest.mark.parametrize("of", models.MODELS, ids=lambda of: of.name)
def test_the_benchmark_of_models_calls_our_op_with_nothing_to_spare(of: models.Model) -> None:
    """Windows of up to 128 hide keys here."""
    problem = models.Problem(of, "full", 140, torch.device("cpu"))
    shown = {"window": (of.window or 140) < 139, "bias": of.position_bias, "softcap": of.softcap, "sinks": of.sinks}
    for name in (each for each in of.contenders() if each in models.OURS):
        call, said = {name: problem.call(name)}, set[str]()
        with attention(said), CountCalls() as counter:
            assert problem.errors(call)[name] < 1e-5
        assert counter.calls == 1
        for argument in said:
            with attention(set(), drop=argument):
                assert problem.errors(call)[name] > 1e-3, f"{argument} could be dropped"
        wanted = {"mask" if (x, name) == ("window", MASKS) else x for x in shown if shown[x]}
        assert said - {"causal"} == wanted


def test_host_times_are_of_calls_that_compute_the_same() -> None:
    with (
        serving.stand_ins("vllm"), serving.stand_ins("sglang"),
        torch.no_grad(), cutlass_fmha.sdpa("cpu"), CountCalls() as counter,
    ):  # fmt: skip
        measured = surfaces.sections(torch.device("cpu"))
        assert {"vLLM", "SGLang"} < {name for calls in measured.values() for name in calls}
        for said, calls in measured.items():
            found = []
            for timed in (timed for name, timed in calls.items() if name != surfaces.JAX_ALONE):
                out, before = timed(), counter.calls
                out = torch.as_tensor(out[0] if isinstance(out, tuple) else out)
                heads_first = out.shape[1:3] == (surfaces.HEADS, surfaces.SEQLEN)
                found.append((out.transpose(1, 2) if heads_first else out).flatten())
                timed()
                assert counter.calls == before + 1, (said, timed)
            assert len(found) > 1 and all(torch.equal(x, found[0]) for x in found), said


def test_a_surface_is_held_to_its_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host_us = {
        f"{surfaces.SECTION}nothing": {"attention": 10.0, "torch SDPA": 19.0, "comfyui": 16.5, "vLLM": 16.0},
        "a new length at each call: growing decode, ours": {"p50": 60.0, "p99": 150.0},
    }
    (tmp_path / "kept.json").write_text(json.dumps({"machine": {"gpu": "x"}, "host_us": host_us}))
    assert host_time.main(["--from-json", str(tmp_path / "kept.json")]) == 0
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert cells == [
        ["attention", "10.00", "", ""],
        ["torch SDPA", "19.00", "+9.00", "10, met"],
        ["comfyui", "16.50", "+6.50", "6, missed"],
        ["vLLM", "16.00", "+6.00", "6, met"],
        ["p50", "60.00", "", ""],
        ["p99", "150.00", "", ""],
    ]
