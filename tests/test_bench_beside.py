"""Other benchmarks, small and on the CPU, notice what is wrong; what bench.export writes is loaded, run, and right."""

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import serving
import torch
import yaml
from spied import attention

import cutlass_fmha
from cutlass_fmha import bench
from cutlass_fmha.bench import beside, contenders, export, finetune, host_time, models, surfaces
from cutlass_fmha.bench.cases import Case, select_cases
from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import transformers as integration


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def registered() -> None:
    pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")
    integration.register()


def told(module: Any, printed: Callable[..., Any], kept: Path, *argv: str) -> str:
    """What is printed, and again of what was kept."""
    text: str = printed(module.main, *argv, "--json", kept).out
    assert printed(module.main, "--from-json", kept).out == text
    return text


@pytest.mark.usefixtures("registered")
def test_a_training_step_is_told_by_contender(tmp_path: Path, printed: Callable[..., Any]):
    text = told(finetune, printed, tmp_path / "found.json", "--shapes", "1x16", "--rounds", "1")
    for name, model in finetune.MODELS.items():
        assert f"| {name} | 1 x 16 |" in text
        assert len(finetune.contenders(model)) == (4 if model.applies else 3)
    with mock.patch("cutlass_fmha.integrations.transformers.attention", lambda q, *_, **__: 2 * q):
        wrong = printed(finetune.main, "--shapes", "1x16", "--rounds", "1", "--models", "Llama 3.2 3B", status=1)
    assert "gradients of Llama 3.2 3B are further off" in wrong.err


def test_ops_are_told_beside_torchs(tmp_path: Path, printed: Callable[..., Any]):
    text = told(beside, printed, tmp_path / "found.json", "--sizes", "8192", "--budget", "0.001")
    for name in beside.OPS:
        assert f"| {name}, forward |" in text and (f"| {name}, backward |" in text or "- |" in text)
    assert text.count("x | 1 | 16 |") == text.count("x | 1 | - |") == 1
    with mock.patch("cutlass_fmha.rms_norm", lambda x, *_, **__: x):
        assert "append is" in printed(beside.main, "--ops", "append", "--budget", "0.001", status=1).err
    with mock.patch.dict(beside.OPS, {"swiglu": beside.OPS["swiglu"]._replace(ours=lambda gate, up: gate * up)}):
        said = printed(beside.main, "--ops", "swiglu", "--sizes", "4096", "--budget", "0.001", status=1)
    assert "swiglu is" in said.err
    peers = {"liger": ("json", lambda m: m.LigerSiLUMulFunction.apply), "quack": ("no_such_module", lambda m: m)}
    found, refused = beside.functions(beside.OPS["swiglu"]._replace(peers=peers))
    assert [*found] == [beside.OURS, beside.TORCH] and "LigerSiLUMulFunction" in refused["liger"]


def test_a_run_that_is_cut_leaves_the_cases_before(tmp_path: Path, printed: Callable[..., Any]):
    kept, case = tmp_path / "found.json", beside.measure("swiglu", 4096, torch.device("cpu"), 0.001)
    asked = ["--ops", "swiglu", "--sizes", "4096", "8192", "--budget", "0.001", "--json", str(kept)]
    with mock.patch.object(beside, "measure", side_effect=[case, KeyboardInterrupt]), pytest.raises(KeyboardInterrupt):
        beside.main(asked)
    assert json.loads(kept.read_text())["unfinished"] and [*tmp_path.iterdir()] == [kept]
    assert "| swiglu, forward | 4,096 |" in printed(beside.main, "--from-json", kept).out


@pytest.mark.parametrize("name", beside.OPS)
def test_bytes_that_must_move_are_those_of_tensors(name: str):
    """Forward: what is read and what is written, weights and tables aside."""
    op = beside.OPS[name]
    tensors = op.make(1 << 16, torch.device("cpu"), torch.float32)
    read = [x for x in tensors if x.dim() == 4 or (x.dim() == 2 and name not in ("rotary_qk", "qk_norm_rope"))]
    results = op.ours(*tensors)
    written = results if isinstance(results, tuple) else (results,)
    assert op.moved(tensors[0].nbytes)[0] == sum(x.nbytes for x in (*read, *written))


MASKS, FLASH = models.OURS
SMALL = Case("dense", 2, 4, 2, 48, 48, 32, "float16")
CASES_OF_TWO_KINDS = [SMALL, replace(SMALL, causal=True), replace(SMALL, seqlen_q=1), replace(SMALL, feature="window")]


def loaded(path: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(path)))


def is_right(case: Case, output: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
    """``inputs``: [batch, seqlen, heads, head_dim], as is the output."""
    assert [x.dtype for x in inputs] == [torch.float16] * 3
    return contenders.ErrorCheck(case, contenders.Inputs(*(x[None] for x in inputs)))(output).within


def test_kernelbench_s_problem_and_our_solution_agree(tmp_path: Path) -> None:
    files, left = export.write("kernelbench", CASES_OF_TWO_KINDS, None, tmp_path)
    assert left == [CASES_OF_TWO_KINDS[-1].name] and len(files) == 6
    for number, case in enumerate(CASES_OF_TWO_KINDS[:3], 1):
        [path] = (tmp_path / "KernelBench" / "level1").glob(f"{number}_*.py")
        problem, solution = loaded(path), loaded(tmp_path / "solutions" / "level1" / path.name)
        inputs = problem.get_inputs()
        of_rows = [x.transpose(1, 2) for x in inputs]
        for model in (problem.Model(*problem.get_init_inputs()), solution.ModelNew()):
            assert is_right(case, model(*inputs).transpose(1, 2), of_rows)


def test_robust_kbench_s_task_takes_each_of_its_configs(tmp_path: Path) -> None:
    export.write("robust-kbench", CASES_OF_TWO_KINDS, None, tmp_path)
    shapes = yaml.safe_load((tmp_path / "rbk_config.yaml").read_text())["shapes"]
    cases = [SMALL, replace(SMALL, seqlen_q=1), replace(SMALL, causal=True)]
    assert [shape["name"] for shape in shapes] == [case.name for case in cases]
    for shape, case in zip(shapes, cases, strict=True):
        task = loaded(tmp_path / shape["task"] / "func_forward.py")
        config = json.loads((tmp_path / shape["task"] / "config_forward.json").read_text())
        said = {name: shape[name] for name in ("batch_size", "seqlen_q", "seqlen_k")}
        assert said in config["multi_input_configs"]
        inputs = task.get_inputs(**said, **config["single_shared_configs"][0])
        output = task.Model(**config["single_init_configs"][0])(*inputs, fn=task.forward_fn)
        assert is_right(case, output, inputs) and len(task.input_names) == len(inputs)


def test_flashinfer_bench_s_reference_and_our_solution_agree(tmp_path: Path) -> None:
    export.write("flashinfer-bench", CASES_OF_TWO_KINDS, None, tmp_path)
    found = 0
    for file in sorted((tmp_path / "workloads").rglob("*.jsonl")):
        paths = f"definitions/gqa/{file.stem}.json", f"solutions/gqa/cutlass_fmha_{file.stem}.json"
        definition, solution = (json.loads((tmp_path / path).read_text()) for path in paths)
        fixed = {name: axis["value"] for name, axis in definition["axes"].items() if axis["type"] == "const"}
        spaces: tuple[dict[str, Any], ...] = {}, {}
        for source, space in zip((definition["reference"], solution["sources"][0]["content"]), spaces, strict=True):
            exec(source, space)
        for line in map(json.loads, file.read_text().splitlines()):
            assert line["definition"] == definition["name"] == solution["definition"] and line["workload"]["uuid"]
            sizes = line["workload"]["axes"] | fixed
            shapes = ([sizes[axis] for axis in definition["inputs"][name]["shape"]] for name in "qkv")
            inputs = [torch.randn(*shape, dtype=torch.float16) for shape in shapes]
            case = replace(SMALL, seqlen_q=sizes["seqlen_q"], causal="causal" in definition["name"])
            assert all(is_right(case, space["run"](*inputs), inputs) for space in spaces)
            found += 1
    assert found == 3


def test_every_plain_case_has_a_place(tmp_path, printed):
    for name in export.FORMATS:
        said = printed(bench.main, "--preset", "dense", "decode", "--export", name, tmp_path / name)
        assert "no place" not in said.out
    workloads = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(workloads) == len(select_cases(["dense", "decode"]))


@pytest.mark.usefixtures("registered")
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


@pytest.mark.usefixtures("registered")
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


@pytest.mark.usefixtures("registered")
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


def test_a_surface_is_held_to_its_bar(tmp_path: Path, printed: Callable[..., Any]) -> None:
    host_us = {
        f"{surfaces.SECTION}nothing": {"attention": 10.0, "torch SDPA": 19.0, "comfyui": 16.5, "vLLM": 16.0},
        "a new length at each call: growing decode, ours": {"p50": 60.0, "p99": 150.0},
    }
    (tmp_path / "kept.json").write_text(json.dumps({"machine": {"gpu": "x"}, "host_us": host_us}))
    text = printed(host_time.main, "--from-json", tmp_path / "kept.json").out
    cells = [" ".join(line.replace("|", " ").split()) for line in text.splitlines()]
    told = ["attention 10.00", "torch SDPA 19.00 +9.00 10, met", "comfyui 16.50 +6.50 6, missed"]
    told += ["vLLM 16.00 +6.00 6, met", "p50 60.00", "p99 150.00"]
    assert [line.endswith(end) for line, end in zip(cells[2:-1], told, strict=True)] == [True] * 6
