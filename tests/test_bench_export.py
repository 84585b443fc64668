"""Exporters of the benchmark: what they write is loaded and run as the other benchmarks do, and right."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from cutlass_fmha import bench
from cutlass_fmha.bench import contenders, export
from cutlass_fmha.bench.cases import Case, select_cases

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
    by_name = {case.name: case for case in CASES_OF_TWO_KINDS}
    found = [by_name[shape["name"]] for shape in shapes]
    assert found == [SMALL, replace(SMALL, seqlen_q=1), replace(SMALL, causal=True)]
    for shape in shapes:
        task = loaded(tmp_path / shape["task"] / "func_forward.py")
        config = json.loads((tmp_path / shape["task"] / "config_forward.json").read_text())
        said = {name: shape[name] for name in ("batch_size", "seqlen_q", "seqlen_k")}
        assert said in config["multi_input_configs"]
        inputs = task.get_inputs(**said, **config["single_shared_configs"][0])
        output = task.Model(**config["single_init_configs"][0])(*inputs, fn=task.forward_fn)
        assert is_right(by_name[shape["name"]], output, inputs) and len(task.input_names) == len(inputs)


def test_flashinfer_bench_s_reference_and_our_solution_agree(tmp_path: Path) -> None:
    export.write("flashinfer-bench", CASES_OF_TWO_KINDS, None, tmp_path)
    found = 0
    for file in sorted((tmp_path / "workloads").rglob("*.jsonl")):
        definition, solution = (
            json.loads((tmp_path / kind / "gqa" / f"{prefix}{file.stem}.json").read_text())
            for kind, prefix in (("definitions", ""), ("solutions", "cutlass_fmha_"))
        )
        spaces: tuple[dict[str, Any], ...] = {}, {}
        for source, space in zip((definition["reference"], solution["sources"][0]["content"]), spaces, strict=True):
            exec(source, space)
        for line in map(json.loads, file.read_text().splitlines()):
            assert line["definition"] == definition["name"] == solution["definition"] and line["workload"]["uuid"]
            sizes = line["workload"]["axes"] | {
                name: axis["value"] for name, axis in definition["axes"].items() if axis["type"] == "const"
            }
            shapes = ([sizes[axis] for axis in definition["inputs"][name]["shape"]] for name in "qkv")
            inputs = [torch.randn(*shape, dtype=torch.float16) for shape in shapes]
            case = replace(SMALL, seqlen_q=sizes["seqlen_q"], causal="causal" in definition["name"])
            assert all(is_right(case, space["run"](*inputs), inputs) for space in spaces)
            found += 1
    assert found == 3


def test_every_plain_case_has_a_place(tmp_path, capsys):
    for name in export.FORMATS:
        assert bench.main(["--preset", "dense", "decode", "--export", name, str(tmp_path / name)]) == 0
        assert "no place" not in capsys.readouterr().out
    workloads = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(workloads) == len(select_cases(["dense", "decode"]))
